"""Check that the trainer gets exactly the tokens and log-probs that the engine sampled.

    python scripts/dev/bench/exactness.py                       # the policy of the quickstart
    python scripts/dev/bench/exactness.py --config-name smollm2_alfworld --dtype bfloat16
    python scripts/dev/bench/exactness.py --history window

``--stop . ,`` adds stop strings, for a policy that ends few turns itself.

The bench generates real trajectories. It records the engine's results independently of the
collector, and compares them with the packed rows:

* sampled: every turn of a row equals the engine's result for exactly the tokens before it;
* loss: the mask is 1 on those tokens and on no other;
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
from agent_system.multi_turn_rollout.packing import Row, pack, rows_of
from scripts.dev.bench.play import Workload
from verl.models.loader import load_causal_lm
from verl.models.policy import PolicyModel
from verl.protocol import DataProto
from verl.utils.sampling import SamplingResult
from verl.workers.branch_scores import score_rows
from verl.workers.engine import TrainEngine

MAX_TOKENS = 8192  # of a micro-batch


class Witness:
    """Engine client that records requests and results in order, by trajectory."""

    def __init__(self, client: TokenSource) -> None:
        self._client = client
        self.seen: dict[int, list[tuple[list[int], SamplingResult]]] = defaultdict(list)

    async def sample(self, prompt_ids: list[int], *, route: int, **request: Any) -> SamplingResult:
        """Sample and record. ``route`` is the number of the trajectory."""
        prompt = list(prompt_ids)
        result = await self._client.sample(prompt, route=route, **request)
        self.seen[route].append((prompt, result))
        return result

    async def close(self) -> None:
        """Close the engine client that this client wraps."""
        await self._client.close()


async def play(stage: Workload) -> tuple[list[Row], Witness]:
    """Generate every trajectory once. Return the rows, and the recorded requests."""
    collector = stage.collector()
    witness = collector._engine = Witness(collector._engine)
    collected = await collector.collect(stage.jobs, stage.settings)
    await collector.close()
    await stage.engine.close()
    return rows_of(collected.trajectories), witness


def separators(stage: Workload) -> tuple[list[int], list[int]]:
    """Return the template's token ids before and after an observation.

    The first list stands between the end of a turn and the observation. The second list stands
    between the observation and the next turn.
    """
    # These two texts occur in no template, so the rendered text can be split at them.
    said = "What I say."
    seen = "What I see."
    chat = [("user", "Begin."), ("assistant", said), ("user", seen)]
    messages = [{"role": role, "content": text} for role, text in chat]
    options = stage.cfg.data.apply_chat_template_kwargs
    text = stage.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    before, after = text.partition(said)[2].split(seen)
    return encode(stage, before), encode(stage, after)


def encode(stage: Workload, text: str) -> list[int]:
    """Return the token ids of ``text``, without special tokens."""
    return stage.tokenizer(text, add_special_tokens=False)["input_ids"]


@dataclass
class _Unpadded:
    """Row of the batch without padding. All columns have one entry per token."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]


def _unpadded(data: DataProto, row: int) -> _Unpadded:
    real = data.batch["attention_mask"][row].bool()
    prompt = data.batch["prompts"].shape[1]

    def of_response(name: str) -> list[Any]:
        # Response columns start after the padded prompt. Pad them in front to the row's length.
        padded = torch.nn.functional.pad(data.batch[name][row], (prompt, 0))
        return padded[real].tolist()

    ids = data.batch["input_ids"][row][real].tolist()
    return _Unpadded(ids, of_response("response_mask"), of_response("rollout_log_probs"))


COUNTS = (
    "turns",
    "tokens",
    "other tokens",
    "other log-probs",
    "loss elsewhere",
    "gaps",
    "separators lost",
    "retokenised",
)


def check_tokens(
    rows: Sequence[Row], data: DataProto, witness: Witness, stage: Workload
) -> dict[str, int]:
    """Return the counts ``COUNTS``: turns and tokens checked, and errors by kind."""
    between = separators(stage)
    found: dict[str, int] = dict.fromkeys(COUNTS, 0)
    for number, row in enumerate(rows):
        kept = _unpadded(data, number)
        sampled = 0
        last = None
        for turn in row.turns:
            prompt, result = witness.seen[row.trajectory.job.index][turn.step]
            start = len(prompt)
            end = start + len(result.token_ids)
            _check_turn(found, kept, prompt, result)
            encoded = encode(stage, stage.tokenizer.decode(result.token_ids))
            found["retokenised"] += encoded != list(result.token_ids)
            sampled += sum(kept.mask[start:end])
            if last is not None:
                found["gaps"] += 1
                found["separators lost"] += not _whole(kept.ids, last, start, between)
            last = end
        turns = sum(turn.end - turn.start for turn in row.turns)
        found["loss elsewhere"] += sum(kept.mask) != sampled or sampled != turns
    return found


def _check_turn(
    found: dict[str, int], kept: _Unpadded, prompt: list[int], result: SamplingResult
) -> None:
    start = len(prompt)
    end = start + len(result.token_ids)
    same = kept.ids[:start] == prompt and kept.ids[start:end] == list(result.token_ids)
    # Round to float32, the dtype of the row.
    logprobs = torch.tensor(result.logprobs).tolist()
    found["turns"] += 1
    found["tokens"] += end - start
    found["other tokens"] += not same
    found["other log-probs"] += kept.logprobs[start:end] != logprobs


def _whole(ids: list[int], last: int, start: int, between: tuple[list[int], list[int]]) -> bool:
    """Return True if ``ids[last:start]`` starts and ends with the template's separators."""
    before, after = between
    gap = ids[last:start]
    # If the policy sampled the end of turn itself, the template's copy is omitted.
    wanted = before[1:] if ids[last - 1] == before[0] else before
    return gap[: len(wanted)] == wanted and gap[-len(after) :] == after


def check_logprobs(data: DataProto, path: str, dtype: str) -> tuple[float, float]:
    """Return the mean and largest absolute difference of log-probs, trainer - engine, in nats."""
    engine = TrainEngine(PolicyModel(load_causal_lm(path)), device="cpu", dtype=dtype)
    scored = score_rows(engine, data, max_tokens=MAX_TOKENS).log_probs
    gaps = (scored - data.batch["rollout_log_probs"]).abs()[data.batch["response_mask"].bool()]
    return gaps.mean().item(), gaps.max().item()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the bench for the command line, and print its results."""
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
    words = [
        f"env.history={args.history}",
        f"actor_rollout_ref.rollout.dtype={args.dtype}",
        "env.rollout.n=4",
    ]
    stage = Workload(args.config_name, [*words, *args.overrides], -(-args.trajectories // 4))
    stage.settings = replace(stage.settings, stop=(*stage.settings.stop, *args.stop))
    rows, witness = asyncio.run(play(stage))
    played = [row.trajectory for row in rows]
    trajectories = len({id(trajectory) for trajectory in played})
    data = pack(rows, stage.tokenizer.pad_token_id)
    found = check_tokens(rows, data, witness, stage)
    path = str(stage.path)
    mean, largest = check_logprobs(data, path, args.dtype)
    fed = int(data.batch["attention_mask"].sum())
    lines = [
        f"{path}, {args.dtype}, {args.history}: {trajectories} trajectories, {len(rows)} rows",
        f"{found['turns']} turns, {found['tokens']} sampled tokens: "
        f"{found['other tokens']} turns have other tokens,",
        f"{found['other log-probs']} other log-probs; "
        f"{found['loss elsewhere']} rows have loss elsewhere",
        f"{found['gaps']} separators, of which not whole {found['separators lost']}",
        f"|trainer - engine| mean {mean:.1e}, largest {largest:.1e} nats",
        "turns that would be other tokens if their text were encoded again: "
        f"{found['retokenised']}",
        f"per episode: {found['tokens'] / trajectories:.0f} sampled, "
        f"{fed / trajectories:.0f} fed to the trainer",
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
