"""Small trials of what a run is made of, each in a process of its own: a hang is a finding too.

``python -m verl.trainer.launch.doctor.smoke PART`` does one of them and says what came of it.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from verl.trainer.launch.doctor.facts import Finding, State

DEADLINE_S = 120.0
TEXTS = ["You are at 3. The target is 5.", "<action>right</action>", "<action>left</action>"]
TAGS = ("<action>", "</action>")
TOKENS = 8  # of an answer


def smoke_findings(parts: list[str] | None = None, deadline_s: float = DEADLINE_S) -> list[Finding]:
    """A finding per part: what it said, or why it failed; nothing trains where one does."""
    return [_tried(part, deadline_s) for part in (parts or list(PARTS))]


def _tried(part: str, deadline_s: float) -> Finding:
    command = [sys.executable, "-m", "verl.trainer.launch.doctor.smoke", part]
    began = time.monotonic()
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        why = f"not done after {deadline_s:g} s"
        return Finding(f"smoke: {part}", why, State.MISSING, f"run it by hand: {_shown(part)}")
    said = ran.stdout.strip().splitlines()
    if ran.returncode == 0 and said:
        return Finding(f"smoke: {part}", f"{said[-1]}, {time.monotonic() - began:.0f} s")
    errors = ran.stderr.strip().splitlines() or [f"it ended with status {ran.returncode}"]
    return Finding(f"smoke: {part}", errors[-1][:300], State.MISSING, f"all of it: {_shown(part)}")


def _shown(part: str) -> str:
    return f"python -m verl.trainer.launch.doctor.smoke {part}"


def play() -> str:
    """An environment in a worker process: won by its expert, lost by silence, twice alike."""
    from agent_system.environments.cli.checking import check

    findings = check("number_line", {"size": 6}, tasks=1, steps=12)
    if findings.wrong:
        raise RuntimeError(findings.wrong[0])
    return f"{len(findings.plays)} plays"


def sample_and_learn() -> str:
    """An engine samples, the trainer takes a step on it, and the engine samples with the weights
    that come of it.
    """
    import torch

    from verl.config.schema.actor import ActorRolloutRefConfig
    from verl.models.new_policy import build_policy
    from verl.workers.actor import ActorWorker
    from verl.workers.rollout import create_engine

    with tempfile.TemporaryDirectory() as place:
        path = build_policy(
            Path(place), TEXTS, tags=TAGS, vocab_size=400, hidden=64, layers=1, heads=2, ff=128
        )
        config = ActorRolloutRefConfig()
        config.model.path = str(path)
        config.actor.dtype = config.rollout.dtype = "float32"
        config.actor.ppo_mini_batches = 1
        config.actor.optim.lr = 1e-2
        config.rollout.max_model_len = 64
        engine = create_engine("hf", config.rollout, str(path), num_threads=1)
        prompt = list(range(5, 13))
        before = _sampled(engine, prompt)
        actor = ActorWorker(config, device="cpu", num_threads=1)
        actor.init_model()
        metrics = actor.update_actor(_rows(prompt, before)).meta_info["metrics"]
        if not metrics["actor/grad_norm"] > 0:
            raise RuntimeError(f"a step without a gradient: {metrics}")
        engine.update_weights(actor.export_weights(), version=1)
        after = _sampled(engine, prompt)
        engine.close()
        if all(old.logprobs == new.logprobs for old, new in zip(before, after, strict=True)):
            raise RuntimeError("the engine samples as if nothing had been learnt")
        count = sum(len(result.token_ids) for result in [*before, *after])
        torch.distributed.destroy_process_group()
        return f"{count} tokens sampled, 1 step"


def _sampled(engine, prompt: list[int]) -> list:
    """Two continuations of ``prompt``, the same draws each time."""
    from verl.utils.sampling import SamplingRequest

    for seed in (1, 2):
        engine.add(SamplingRequest(f"r{seed}", prompt, max_tokens=TOKENS, seed=seed))
    found = []
    while engine.has_work():
        found += engine.step()
    return sorted(found, key=lambda result: result.request_id)


def _rows(prompt: list[int], sampled: list):
    """The answers as rows: the first was better than expected, the second worse."""
    import torch

    from verl.protocol import DataProto

    answers = [result.token_ids for result in sampled]
    wide = [ids + [0] * (TOKENS - len(ids)) for ids in answers]
    mask = torch.tensor([[1] * len(ids) + [0] * (TOKENS - len(ids)) for ids in answers])
    ids = torch.tensor([prompt + row for row in wide])
    attention = torch.cat([torch.ones(len(answers), len(prompt), dtype=torch.long), mask], -1)
    logprobs = torch.zeros(len(answers), TOKENS)
    for row, result in enumerate(sampled):
        logprobs[row, : len(result.logprobs)] = torch.tensor(result.logprobs)
    tensors = {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, len(prompt) :],
        "response_mask": mask,
        "advantages": torch.tensor([[1.0], [-1.0]]) * mask,
        "old_log_probs": logprobs,
    }
    names = {"uid": ["task"] * 2, "traj_uid": ["first", "second"]}
    return DataProto.from_dict(tensors, names, {"temperature": 1.0, "global_step": 1})


PARTS: dict[str, Callable[[], str]] = {
    "environment": play,
    "engine and trainer": sample_and_learn,
}


if __name__ == "__main__":
    print(PARTS[" ".join(sys.argv[1:])]())
