"""Smoke tests of the parts of a run. Each runs in a subprocess, so that a hang is detected.

``python -m verl.trainer.launch.doctor.smoke NAME`` runs one of them and prints its result.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from verl.trainer.launch.doctor.facts import FindingState, MachineFinding

DEADLINE_S = 120.0  # maximum time of one test
SAMPLE_TEXTS = ["You are at 3. The target is 5.", "<action>right</action>", "<action>left</action>"]
ACTION_TAGS = ("<action>", "</action>")
NUM_ANSWER_TOKENS = 8  # number of tokens that are sampled per answer


def run_smoke_tests(
    test_names: list[str] | None = None, deadline_s: float = DEADLINE_S
) -> list[MachineFinding]:
    """Run smoke tests (default: all) and return one finding per test: its output or its failure."""
    return [
        _run_smoke_test(test_name, deadline_s) for test_name in (test_names or list(SMOKE_TESTS))
    ]


def _run_smoke_test(test_name: str, deadline_s: float) -> MachineFinding:
    finding_name = f"smoke: {test_name}"
    module_arguments = ["-m", "verl.trainer.launch.doctor.smoke", test_name]
    shown_command = " ".join(["python", *module_arguments])
    start_time = time.monotonic()
    try:
        completed_process = subprocess.run(
            [sys.executable, *module_arguments], capture_output=True, text=True, timeout=deadline_s
        )
    except subprocess.TimeoutExpired:
        why = f"no result after {deadline_s:g} s"
        fix = f"run it by hand: {shown_command}"
        return MachineFinding(finding_name, why, FindingState.MISSING, fix)
    output_lines = completed_process.stdout.strip().splitlines()
    if completed_process.returncode == 0 and output_lines:
        return MachineFinding(
            finding_name, f"{output_lines[-1]}, {time.monotonic() - start_time:.0f} s"
        )
    error_lines = completed_process.stderr.strip().splitlines() or [
        f"it ended with status {completed_process.returncode}"
    ]
    fix = f"see the full output: {shown_command}"
    return MachineFinding(finding_name, error_lines[-1][:300], FindingState.MISSING, fix)


def check_example_environment() -> str:
    """Check the rewards of a small built-in environment in a worker process."""
    from agent_system.environments.cli.checking import check_environment

    findings = check_environment("number_line", {"size": 6}, num_tasks=1, max_steps=12)
    if findings.problems:
        raise RuntimeError(findings.problems[0])
    return f"{len(findings.episodes)} episodes"


def sample_and_update() -> str:
    """Sample with an engine, take a training step, and sample again with the updated weights."""
    import torch

    from verl.config.schema.actor_rollout_ref import ActorRolloutRefConfig
    from verl.config.schema.sft import NewPolicyConfig
    from verl.models.new_policy import build_policy
    from verl.workers.actor import ActorWorker
    from verl.workers.rollout import create_engine

    with tempfile.TemporaryDirectory() as directory:
        path = build_policy(
            Path(directory),
            SAMPLE_TEXTS,
            NewPolicyConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2),
            tags=ACTION_TAGS,
            vocab_size=400,
        )
        config = ActorRolloutRefConfig()
        config.model.path = str(path)
        config.actor.dtype = config.rollout.dtype = "float32"
        config.actor.ppo_mini_batches = 1
        config.actor.optim.lr = 1e-2
        config.rollout.max_model_len = 64
        engine = create_engine("hf", config.rollout, str(path), num_threads=1)
        prompt = list(range(5, 13))
        old_answers = _sample_answers(engine, prompt)
        actor = ActorWorker(config, device="cpu", num_threads=1)
        actor.init_model()
        metrics = actor.update_actor(_build_rows(prompt, old_answers)).meta_info["metrics"]
        if not metrics["actor/grad_norm"] > 0:
            raise RuntimeError(f"the training step had no gradient: {metrics}")
        engine.update_weights(actor.export_weights(), version=1)
        new_answers = _sample_answers(engine, prompt)
        engine.close()
        old_log_probs = [answer.logprobs for answer in old_answers]
        if old_log_probs == [answer.logprobs for answer in new_answers]:
            raise RuntimeError("the log-probs of the engine did not change with the weights")
        num_tokens = sum(len(result.token_ids) for result in [*old_answers, *new_answers])
        torch.distributed.destroy_process_group()
        return f"{num_tokens} tokens sampled, 1 step"


def _sample_answers(engine, prompt: list[int]) -> list:
    """Return two continuations of ``prompt``, sampled with fixed seeds."""
    from verl.utils.sampling import SamplingRequest

    for seed in (1, 2):
        engine.add(SamplingRequest(f"r{seed}", prompt, max_tokens=NUM_ANSWER_TOKENS, seed=seed))
    answers = []
    while engine.has_work():
        answers += engine.step()
    return sorted(answers, key=lambda result: result.request_id)


def _build_rows(prompt: list[int], sampled_answers: list):
    """Return the two ``sampled_answers`` as rows, with advantages 1 and -1."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from verl.protocol import DataProto

    answer_ids = [torch.tensor(answer.token_ids) for answer in sampled_answers]
    log_probs = [torch.tensor(answer.logprobs) for answer in sampled_answers]
    responses = pad_sequence(answer_ids, batch_first=True)
    response_mask = pad_sequence([torch.ones_like(ids) for ids in answer_ids], batch_first=True)
    prompts = torch.tensor([prompt] * len(sampled_answers))
    attention_mask = torch.cat([torch.ones_like(prompts), response_mask], -1)
    tensors = {
        "input_ids": torch.cat([prompts, responses], -1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        "responses": responses,
        "response_mask": response_mask,
        "advantages": torch.tensor([[1.0], [-1.0]]) * response_mask,
        "old_log_probs": pad_sequence(log_probs, batch_first=True),
    }
    id_columns = {"uid": ["task"] * 2, "traj_uid": ["first", "second"]}
    return DataProto.from_dict(tensors, id_columns, {"temperature": 1.0, "global_step": 1})


SMOKE_TESTS: dict[str, Callable[[], str]] = {
    "environment": check_example_environment,
    "engine and trainer": sample_and_update,
}


if __name__ == "__main__":
    print(SMOKE_TESTS[" ".join(sys.argv[1:])]())
