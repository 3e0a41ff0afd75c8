"""Compare a GRPO step of ``main_ppo`` with one of TRL's ``GRPOTrainer`` on CPU.

Both use the same policy, tasks, tokens and cores.

    python scripts/dev/bench/against_trl.py                    # games of several turns
    python scripts/dev/bench/against_trl.py --single       # one answer of 240 tokens per question
    python scripts/dev/bench/against_trl.py --rounds 2 actor_rollout_ref.rollout.name=hf

*Turns*: 16 ALFWorld games, 8 trajectories of each, with the quickstart's policy. TRL gets a rollout
function as its users write them. All unfinished episodes sample their next turn with the
generation of ``GRPOTrainer`` (transformers, left-padded). Then all environments step.

*Single*: 16 sums, 8 answers of each. The policy has random weights and never ends a turn, so every
completion has 240 tokens. TRL runs without a rollout function. One long batch is its best case.

Both do four optimizer steps per training step, and compute old log-probs. The measure is
wall-clock seconds from the end of one step to the end of the next. The first step is a warm-up and
is not counted. The table shows medians over the other steps. The two programs alternate for
``--rounds`` rounds. The learning rate is 0, so both policies stay equal.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

ROOT = Path(__file__).resolve().parents[3]
# Import from the repository root instead of the directory of this file.
sys.path[0] = str(ROOT)

from agent_system.environments.env import Observation
from agent_system.environments.env_registry import get_package
from agent_system.environments.manager import make_envs
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import TokenConversation, TokenLimits
from agent_system.tokens.ledger import SegmentKind
from scripts.dev.bench.rlvcr_step import build_training_overrides, run_main_ppo
from verl.trainer.launch.extensions import load_config
from verl.utils.chat_template import find_stop_token_ids
from verl.utils.processes import available_cpus
from verl.utils.sampling import SamplingResult, StopReason
from verl.workers.rollout.base import StopConditionFactory

# Sizes of a training step: groups of trajectories, trajectories of a group, optimizer steps.
NUM_GROUPS, GROUP_SIZE, UPDATES_PER_STEP = 16, 8, 4
ANSWER_TOKENS = 240  # tokens of a completion
QUICKSTART_POLICY = ROOT / "configs/policies/quickstart"


def build_arguments(is_single_turn: bool, policy: Path) -> list[str]:
    """Return the arguments of ``main_ppo``, from which TRL's policy, tasks and lengths are read."""
    size_overrides = [
        f"data.train_batch_size={NUM_GROUPS}",
        f"env.rollout.n={GROUP_SIZE}",
        f"actor_rollout_ref.actor.ppo_mini_batches={UPDATES_PER_STEP}",
        "actor_rollout_ref.actor.optim.lr=0",
        f"actor_rollout_ref.model.path={policy}",
        "algorithm.adv_estimator=grpo",
    ]
    if not is_single_turn:
        return ["--config-name", "quickstart_grpo", *size_overrides]
    return [
        "--config-name",
        "arithmetic",
        f"env.max_turn_tokens={ANSWER_TOKENS}",
        f"data.max_response_length={ANSWER_TOKENS}",
        f"actor_rollout_ref.rollout.num_threads={available_cpus()}",
        *size_overrides,
    ]


def make_endless_policy(directory: Path) -> Path:
    """Save a random policy that never samples a token that ends a turn.

    Embedding and output head are tied. Component 0 of the embedding is -1 for tokens that end a
    turn, and 1 for all others. So the logits of the tokens that end a turn are far below the
    others.
    """
    source_policy = ROOT / "experiments/policies/arithmetic"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source_policy))
    tokenizer = AutoTokenizer.from_pretrained(source_policy)
    end_ids = set(find_stop_ids(source_policy, tokenizer, ()))
    # Stop strings are single tokens, but encoding a text never gives them. Find them by decoding.
    stop_strings = get_package("reasoning_gym").stop
    for token in range(model.config.vocab_size):
        if any(stop_string in tokenizer.decode([token]) for stop_string in stop_strings):
            end_ids.add(token)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding[:, 0] = 1.0
        embedding[sorted(end_ids), 0] = -1.0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def find_stop_ids(policy: Path, tokenizer: Any, stop: tuple[str, ...]) -> frozenset[int]:
    """Return the token ids that end a turn. Exits if a stop string has several tokens."""
    stop_conditions = StopConditionFactory(
        tokenizer, find_stop_token_ids(tokenizer, policy)
    ).get_conditions(stop)
    if stop_conditions.stop_strings:
        raise SystemExit(
            f"stop strings {stop_conditions.stop_strings} have several tokens each: TRL would "
            "sample past them; use stop strings of one token"
        )
    return stop_conditions.token_ids


class LockStepRolloutFunction:
    """Rollout function for TRL, in which all trajectories take each turn together.

    Its method ``reward`` is the reward function to use with it.
    """

    def __init__(self, cfg: Any, tokenizer: Any) -> None:
        self.envs = make_envs(cfg)[0]
        self.package = get_package(cfg.env.env_name)
        self.prompts = self.package.prompts(self.envs.settings)
        self.bridge = ChatBridge(tokenizer, cfg.data.apply_chat_template_kwargs)
        self.limits = TokenLimits(
            cfg.data.max_prompt_length,
            cfg.data.max_response_length,
            max_turn=cfg.env.max_turn_tokens,
        )
        self.levels = cfg.env.levels
        self.max_steps = cfg.env.max_steps
        self.num_calls = 0

    def __call__(self, _prompts: list, trainer: Any) -> dict[str, Any]:
        """Generate a batch. Return ids of prompts and completions, masks, and successes."""
        self.num_calls += 1
        conversations = self._start_conversations()
        success_values = [0.0] * len(conversations)
        active_indices = list(range(len(conversations)))
        for turn in range(self.max_steps):
            prompt_ids = [conversations[env_index].prompt_ids for env_index in active_indices]
            reply_ids, _ = trainer._generate_single_turn(prompt_ids, None, {}, 1)
            reply_texts = [""] * len(conversations)
            for active_index, turn_ids in zip(active_indices, reply_ids, strict=True):
                result = SamplingResult("", turn_ids, [0.0] * len(turn_ids), StopReason.STOP, 0)
                conversations[active_index].add_turn(result, turn)
                reply_texts[active_index] = self.bridge.decode(turn_ids)
            active_indices = self._step_environments(
                conversations, active_indices, reply_texts, turn, success_values
            )
            if not active_indices:
                break
        prompts, completions, masks = zip(*map(self._split_row, conversations), strict=True)
        return {
            "prompt_ids": list(prompts),
            "completion_ids": list(completions),
            "env_mask": list(masks),
            "logprobs": None,
            "won": success_values,
        }

    def _start_conversations(self) -> list[TokenConversation]:
        """Return one conversation per trajectory, with its first prompt."""
        observations, infos = self.envs.reset(self.envs.gen_batch(self.num_calls, NUM_GROUPS))
        system_prompt = self.prompts.system(self.levels)
        system_messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        conversations: list[TokenConversation] = []
        for text, info in zip(observations["text"], infos, strict=True):
            conversation = TokenConversation(self.bridge, self.limits, system_messages)
            conversation.add_observation(
                self.prompts.first(Observation(text, info=info), self.levels), 0
            )
            conversations.append(conversation)
        return conversations

    def _step_environments(
        self,
        conversations: list[TokenConversation],
        active_indices: list[int],
        reply_texts: list[str],
        turn: int,
        success_values: list[float],
    ) -> list[int]:
        """Step all environments. Return the indices of the episodes that continue."""
        observations, _, dones, infos = self.envs.step(reply_texts)
        continued_indices: list[int] = []
        for env_index in active_indices:
            info = infos[env_index]
            success_values[env_index] = float(bool(info.get("won")))
            prompt = self.prompts.turn(Observation(observations["text"][env_index], info=info))
            if not dones[env_index] and conversations[env_index].add_observation(prompt, turn + 1):
                continued_indices.append(env_index)
        return continued_indices

    @staticmethod
    def _split_row(conversation: TokenConversation) -> tuple[list[int], list[int], list[int]]:
        prompt, *segments = conversation.ledger.all_segments
        mask = [int(segment.kind is SegmentKind.AGENT) for segment in segments for _ in segment.ids]
        return list(prompt.ids), [token for part in segments for token in part.ids], mask

    @staticmethod
    def reward(completions: list, won: list[float], **_: Any) -> list[float | None]:
        """Return the success of each trajectory (1 or 0) as its reward."""
        del completions
        return list(won)


class StepRecorder(TrainerCallback):
    """Recorder of the end of each step of TRL's trainer, and of the tokens that it samples."""

    def __init__(self) -> None:
        self.end_times: list[float] = []
        self.tokens: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the time after the last optimizer step of a training step."""
        del args, control
        if state.global_step % UPDATES_PER_STEP == 0:
            self.end_times.append(time.perf_counter())

    def count_tokens(self, trainer: Any) -> None:
        """Record the tokens of all later generations of ``trainer``."""
        generate = trainer._generate

        def generate_and_count(prompts: list) -> tuple:
            output = generate(prompts)
            completions, masks = output[1:3]
            self.tokens.append(sum(map(sum, masks)) if masks else sum(map(len, completions)))
            return output

        trainer._generate = generate_and_count

    def summarize_steps(self) -> dict[str, Any]:
        """Return the seconds of each step and the mean sampled tokens, both without step 1."""
        step_seconds = [end - start for start, end in itertools.pairwise(self.end_times)]
        return {"seconds": step_seconds, "tokens": mean(self.tokens[1:])}


def compute_parity_reward(completions: list, **_: Any) -> list[float | None]:
    """Return the parity of the text length as the reward, which takes no time to compute."""
    return [float(len(str(completion)) % 2) for completion in completions]


def run_trl(
    is_single_turn: bool, policy: Path, arguments: Sequence[str], steps: int
) -> dict[str, Any]:
    """Train with TRL for ``steps`` steps, and return what ``StepRecorder`` recorded."""
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    torch.set_num_threads(available_cpus())
    cfg = load_config(arguments[1], list(arguments[2:]))
    tokenizer: Any = AutoTokenizer.from_pretrained(policy)
    rollout_function = None if is_single_turn else LockStepRolloutFunction(cfg, tokenizer)
    recorder = StepRecorder()
    with tempfile.TemporaryDirectory() as scratch:
        args = GRPOConfig(
            scratch,
            per_device_train_batch_size=NUM_GROUPS * GROUP_SIZE // UPDATES_PER_STEP,
            steps_per_generation=UPDATES_PER_STEP,
            num_generations=GROUP_SIZE,
            max_completion_length=cfg.env.max_turn_tokens,
            max_steps=UPDATES_PER_STEP * steps,
            learning_rate=0.0,
            temperature=1.0,
            beta=0.0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            str(policy),
            reward_funcs=compute_parity_reward
            if rollout_function is None
            else rollout_function.reward,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": build_prompts(cfg, is_single_turn)}),
            processing_class=tokenizer,
            callbacks=[recorder],
            rollout_func=rollout_function,
        )
        # The single-turn policy never ends a turn, so it needs no stop strings.
        stop_strings = () if is_single_turn else tuple(get_package(cfg.env.env_name).stop)
        stop_ids = sorted(find_stop_ids(policy, tokenizer, stop_strings))
        trainer.eos_token_ids = stop_ids
        trainer.generation_config.eos_token_id = stop_ids
        recorder.count_tokens(trainer)
        trainer.train()
    if rollout_function is not None:
        rollout_function.envs.close()
    return recorder.summarize_steps()


def build_prompts(cfg: Any, is_single_turn: bool) -> list[list[dict[str, str]]]:
    """Return one prompt for each group of each step."""
    if not is_single_turn:  # the rollout function makes its own prompts
        return [[{"role": "user", "content": str(row)}] for row in range(64 * NUM_GROUPS)]
    envs = make_envs(cfg)[0]
    batch = envs.gen_batch(1, 64 * NUM_GROUPS)
    observations, _ = envs.reset(batch[batch.non_tensor_batch["member"] == 0])
    envs.close()
    return [[{"role": "user", "content": text}] for text in observations["text"]]


def run_trl_process(
    is_single_turn: bool, policy: Path, arguments: Sequence[str], steps: int
) -> dict:
    """Run TRL in a new process and return its result, so that it shares no memory or threads."""
    command = [sys.executable, __file__, "--trl-side", str(policy), "--steps", str(steps)]
    environ = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    trl_process = subprocess.run(
        [*command, *(["--single"] if is_single_turn else []), "--", *arguments[2:]],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(trl_process.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark with the command-line options and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--single", action="store_true", help="one answer per question")
    parser.add_argument("--steps", type=int, default=4, help="steps of each run")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each, in turn")
    parser.add_argument("--trl-side", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for main_ppo")
    args = parser.parse_intermixed_args(argv)
    if args.steps < 2:
        parser.error("--steps must be 2 or more: the first step is not counted")
    if args.trl_side is not None:
        arguments = [*build_arguments(args.single, args.trl_side), *args.overrides]
        print(json.dumps(run_trl(args.single, args.trl_side, arguments, args.steps)))
        return
    our_runs: list[dict] = []
    trl_runs: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        scratch_dir = Path(scratch)
        policy = make_endless_policy(scratch_dir / "policy") if args.single else QUICKSTART_POLICY
        arguments = [*build_arguments(args.single, policy), *args.overrides]
        for round_index in range(args.rounds):
            run_dir = scratch_dir / f"ours-{round_index}"
            our_arguments = [*arguments, *build_training_overrides(args.steps, run_dir)]
            our_runs += run_main_ppo("main_ppo", run_dir, our_arguments)[1:]
            trl_runs.append(run_trl_process(args.single, policy, arguments, args.steps))
    print(format_table(our_runs, trl_runs))


def format_table(our_steps: Sequence[dict], trl_results: Sequence[dict]) -> str:
    """Return the Markdown table: seconds and sampled tokens per step of ``main_ppo`` and TRL."""
    our_seconds = median(step["timing_s/step"] for step in our_steps)
    trl_seconds = median(seconds for result in trl_results for seconds in result["seconds"])
    our_tokens = mean(step["perf/engine_tokens"] for step in our_steps)
    trl_tokens = mean(result["tokens"] for result in trl_results)
    return f"""\
| | main_ppo | TRL | ratio |
|---|---|---|---|
| seconds per step | {our_seconds:.2f} | {trl_seconds:.2f} | **{trl_seconds / our_seconds:.2f}** |
| sampled tokens | {our_tokens:,.0f} | {trl_tokens:,.0f} | {trl_tokens / our_tokens:.2f} |"""


if __name__ == "__main__":
    main()
