"""Is what is trained what was sampled? Plays real trajectories and checks every token and every
log-prob.

    python scripts/dev/bench/exactness.py                       # the policy of the quickstart
    python scripts/dev/bench/exactness.py --config-name smollm2_alfworld --dtype bfloat16
    python scripts/dev/bench/exactness.py --history window

``--stop . ,`` ends the turns of a policy that ends few of them itself.

What the engine returned is written down apart from the collector, and compared with the packed
rows:

* sampled: every turn of a row is what the engine returned for exactly the tokens before it;
* loss: the mask is 1 on those tokens and on no other;
* separators: between two turns stands what the tokenizer's chat template puts there, whole, once;
* log-probs: the trainer's own pass over the rows gives what the engine said when it sampled.

Printed besides: turns that would have become other tokens if their text had been encoded again, and
how many tokens an episode feeds to the trainer.
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
    """An engine client that writes down what it was asked and what came back, by trajectory, in
    order.
    """

    def __init__(self, client: TokenSource) -> None:
        self._client = client
        self.seen: dict[int, list[tuple[list[int], SamplingResult]]] = defaultdict(list)

    async def sample(self, prompt_ids: list[int], *, route: int, **request: Any) -> SamplingResult:
        """Sample; ``route`` is the number of the trajectory."""
        prompt = list(prompt_ids)
        result = await self._client.sample(prompt, route=route, **request)
        self.seen[route].append((prompt, result))
        return result

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()


async def play(stage: Workload) -> tuple[list[Row], Witness]:
    """Every job once, and what the engine saw of it."""
    collector = stage.collector()
    witness = collector._engine = Witness(collector._engine)
    collected = await collector.collect(stage.jobs, stage.settings)
    await collector.close()
    await stage.engine.close()
    return rows_of(collected.trajectories), witness


def separators(stage: Workload) -> tuple[list[int], list[int]]:
    """Tokens from the end of a turn to the next observation, and from there to the next turn, by
    the template.
    """
    # Two texts that occur nowhere in a template, so that what stands between them can be cut out.
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
    """The tokens of ``text`` and no others."""
    return stage.tokenizer(text, add_special_tokens=False)["input_ids"]


@dataclass
class _Unpadded:
    """One row of the batch without its padding, every column as long as its tokens."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]


def _unpadded(data: DataProto, row: int) -> _Unpadded:
    real = data.batch["attention_mask"][row].bool()
    prompt = data.batch["prompts"].shape[1]

    def of_response(name: str) -> list[Any]:
        # Response columns begin behind the padded prompt: zeros in front make them as long as the
        # row.
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
    """Counts of what is right and of every way to be wrong."""
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
    # Rounded to float32 as the row holds them.
    logprobs = torch.tensor(result.logprobs).tolist()
    found["turns"] += 1
    found["tokens"] += end - start
    found["other tokens"] += not same
    found["other log-probs"] += kept.logprobs[start:end] != logprobs


def _whole(ids: list[int], last: int, start: int, between: tuple[list[int], list[int]]) -> bool:
    """Whether the template's tokens stand around the observation ``ids[last:start]``."""
    before, after = between
    gap = ids[last:start]
    # An end of turn that the policy sampled itself is not repeated.
    wanted = before[1:] if ids[last - 1] == before[0] else before
    return gap[: len(wanted)] == wanted and gap[-len(after) :] == after


def check_logprobs(data: DataProto, path: str, dtype: str) -> tuple[float, float]:
    """Mean and largest absolute difference of the trainer's log-probs, in nats."""
    engine = TrainEngine(PolicyModel(load_causal_lm(path)), device="cpu", dtype=dtype)
    scored = score_rows(engine, data, max_tokens=MAX_TOKENS).log_probs
    gaps = (scored - data.batch["rollout_log_probs"]).abs()[data.batch["response_mask"].bool()]
    return gaps.mean().item(), gaps.max().item()


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
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
