"""Check that the trainer gets exactly the tokens and log-probs that the engine sampled.

    python scripts/dev/bench/exactness.py                       # the policy of the quickstart
    python scripts/dev/bench/exactness.py --config-name smollm2_alfworld --dtype bfloat16
    python scripts/dev/bench/exactness.py --history window

``--stop . ,`` adds stop strings, for a policy that ends few turns itself.

The bench generates real trajectories. It records the engine's results independently of the
collector, and compares them with the packed rows:

* sampled: every turn of a row equals the engine's result for exactly the tokens before it;
* loss: the mask is 1 on the sampled tokens and on no other;
* separators: the text of the chat template between two turns is complete and occurs once;
* log-probs: the trainer's forward pass gives the rollout log-probs.

It also prints how many turns change when their text is encoded again, and how many tokens per
episode the trainer gets.
"""

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from agent_system.multi_turn_rollout.engine_client import TokenSource
from agent_system.multi_turn_rollout.packing import TrajectoryRow, build_rows, collate_rows
from scripts.dev.bench.workload import Workload
from verl.models.loader import load_causal_lm
from verl.models.policy import PolicyModel
from verl.protocol import DataProto
from verl.utils.sampling import SamplingResult
from verl.workers.branch_scores import compute_log_probs_and_scores
from verl.workers.engine import TrainEngine

MAX_MICRO_BATCH_TOKENS = 8192  # limit of a micro-batch


class RecordingClient:
    """Engine client that records requests and results in order, by trajectory."""

    def __init__(self, client: TokenSource) -> None:
        self._client = client
        self.requests: dict[int, list[tuple[list[int], SamplingResult]]] = defaultdict(list)

    async def sample(
        self, prompt_ids: list[int], *, routing_key: int, **request: Any
    ) -> SamplingResult:
        """Sample a turn and record it. ``routing_key`` is the number of the trajectory."""
        prompt = list(prompt_ids)
        result = await self._client.sample(prompt, routing_key=routing_key, **request)
        self.requests[routing_key].append((prompt, result))
        return result

    async def close(self) -> None:
        """Close the engine client that this client wraps."""
        await self._client.close()


async def collect_rows(workload: Workload) -> tuple[list[TrajectoryRow], RecordingClient]:
    """Generate the trajectories of ``workload``. Return their rows and the recorded requests."""
    collector = workload.make_collector()
    recorder = collector._engine = RecordingClient(collector._engine)
    collected = await collector.collect(workload.rollout_specs, workload.settings)
    await collector.close()
    await workload.engine.close()
    return build_rows(collected.trajectories), recorder


def find_separators(workload: Workload) -> tuple[list[int], list[int]]:
    """Return the token ids of the chat template between turn, observation and next turn."""
    # These two texts occur in no template, so the rendered text can be split at them.
    reply_text = "What I say."
    observation_text = "What I see."
    chat = [("user", "Begin."), ("assistant", reply_text), ("user", observation_text)]
    messages = [{"role": role, "content": text} for role, text in chat]
    template_options = workload.cfg.data.apply_chat_template_kwargs
    text = workload.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **template_options
    )
    prefix_text, suffix_text = text.partition(reply_text)[2].split(observation_text)
    return encode_text(workload, prefix_text), encode_text(workload, suffix_text)


def encode_text(workload: Workload, text: str) -> list[int]:
    """Return the token ids of ``text``, without special tokens."""
    return workload.tokenizer(text, add_special_tokens=False)["input_ids"]


@dataclass
class _UnpaddedRow:
    """Row of the batch without padding, with one entry per token."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]


def _unpad_row(data: DataProto, row_index: int) -> _UnpaddedRow:
    is_token = data.batch["attention_mask"][row_index].bool()
    prompt_length = data.batch["prompts"].shape[1]

    def unpad_column(name: str) -> list[Any]:
        # Response columns have no entries for the prompt, so add zeros for its tokens in front.
        padded = torch.nn.functional.pad(data.batch[name][row_index], (prompt_length, 0))
        return padded[is_token].tolist()

    ids = data.batch["input_ids"][row_index][is_token].tolist()
    return _UnpaddedRow(ids, unpad_column("response_mask"), unpad_column("rollout_log_probs"))


COUNT_NAMES = (
    "turns",
    "tokens",
    "other tokens",
    "other log-probs",
    "loss elsewhere",  # on a token that was not sampled
    "gaps",
    "separators lost",
    "retokenised",
)


def check_tokens(
    rows: Sequence[TrajectoryRow], data: DataProto, recorder: RecordingClient, workload: Workload
) -> dict[str, int]:
    """Compare ``rows`` with the results of the engine. Return the counts of ``COUNT_NAMES``."""
    separators = find_separators(workload)
    counts: dict[str, int] = dict.fromkeys(COUNT_NAMES, 0)
    for row_index, row in enumerate(rows):
        unpadded_row = _unpad_row(data, row_index)
        num_loss_tokens = 0
        previous_turn_end = None
        for turn in row.turns:
            prompt, result = recorder.requests[row.trajectory.spec.index][turn.step]
            start = len(prompt)
            end = start + len(result.token_ids)
            _check_turn(counts, unpadded_row, prompt, result)
            reencoded_ids = encode_text(workload, workload.tokenizer.decode(result.token_ids))
            counts["retokenised"] += reencoded_ids != list(result.token_ids)
            num_loss_tokens += sum(unpadded_row.mask[start:end])
            if previous_turn_end is not None:
                counts["gaps"] += 1
                counts["separators lost"] += not _has_separators(
                    unpadded_row.ids, previous_turn_end, start, separators
                )
            previous_turn_end = end
        num_turn_tokens = sum(turn.end - turn.start for turn in row.turns)
        counts["loss elsewhere"] += (
            sum(unpadded_row.mask) != num_loss_tokens or num_loss_tokens != num_turn_tokens
        )
    return counts


def _check_turn(
    counts: dict[str, int], unpadded_row: _UnpaddedRow, prompt: list[int], result: SamplingResult
) -> None:
    start = len(prompt)
    end = start + len(result.token_ids)
    has_same_tokens = unpadded_row.ids[:start] == prompt and unpadded_row.ids[start:end] == list(
        result.token_ids
    )
    # Round the engine's log-probs to float32, the dtype of the row.
    logprobs = torch.tensor(result.logprobs).tolist()
    counts["turns"] += 1
    counts["tokens"] += end - start
    counts["other tokens"] += not has_same_tokens
    counts["other log-probs"] += unpadded_row.logprobs[start:end] != logprobs


def _has_separators(
    row_ids: list[int],
    previous_turn_end: int,
    turn_start: int,
    separators: tuple[list[int], list[int]],
) -> bool:
    """Return True if the tokens between two turns start and end with the template's tokens."""
    prefix_ids, suffix_ids = separators
    tokens_between = row_ids[previous_turn_end:turn_start]
    # If the policy sampled the end-of-turn token, the template's token is omitted.
    expected_prefix = (
        prefix_ids[1:] if row_ids[previous_turn_end - 1] == prefix_ids[0] else prefix_ids
    )
    return (
        tokens_between[: len(expected_prefix)] == expected_prefix
        and tokens_between[-len(suffix_ids) :] == suffix_ids
    )


def check_logprobs(data: DataProto, path: str, dtype: str) -> tuple[float, float]:
    """Return the mean and largest absolute difference of log-probs, trainer - engine, in nats."""
    engine = TrainEngine(PolicyModel(load_causal_lm(path)), device="cpu", dtype=dtype)
    trainer_log_probs = compute_log_probs_and_scores(
        engine, data, max_tokens=MAX_MICRO_BATCH_TOKENS
    ).log_probs
    differences = (trainer_log_probs - data.batch["rollout_log_probs"]).abs()[
        data.batch["response_mask"].bool()
    ]
    return differences.mean().item(), differences.max().item()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark with the command-line options and print its results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config-name", default="quickstart")
    parser.add_argument("--history", choices=("append", "window"), default="append")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of engine and trainer"
    )
    parser.add_argument("--trajectories", type=int, default=200)
    parser.add_argument("--stop", nargs="*", default=[], help="texts that also end a turn")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    overrides = [
        f"env.history={args.history}",
        f"actor_rollout_ref.rollout.dtype={args.dtype}",
        "env.rollout.n=4",
    ]
    workload = Workload(args.config_name, [*overrides, *args.overrides], -(-args.trajectories // 4))
    workload.settings = replace(workload.settings, stop=(*workload.settings.stop, *args.stop))
    rows, recorder = asyncio.run(collect_rows(workload))
    num_trajectories = len({id(row.trajectory) for row in rows})
    data = collate_rows(rows, workload.tokenizer.pad_token_id)
    counts = check_tokens(rows, data, recorder, workload)
    path = str(workload.path)
    mean_difference, largest_difference = check_logprobs(data, path, args.dtype)
    num_trainer_tokens = int(data.batch["attention_mask"].sum())
    lines = [
        f"{path}, {args.dtype}, {args.history}: {num_trajectories} trajectories, {len(rows)} rows",
        f"{counts['turns']} turns, {counts['tokens']} sampled tokens: "
        f"{counts['other tokens']} turns have other tokens,",
        f"{counts['other log-probs']} other log-probs; "
        f"{counts['loss elsewhere']} rows have loss elsewhere",
        f"{counts['gaps']} separators, of which not whole {counts['separators lost']}",
        f"|trainer - engine| mean {mean_difference:.1e}, largest {largest_difference:.1e} nats",
        "turns that would be other tokens if their text were encoded again: "
        f"{counts['retokenised']}",
        f"per episode: {counts['tokens'] / num_trajectories:.0f} sampled, "
        f"{num_trainer_tokens / num_trajectories:.0f} fed to the trainer",
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
