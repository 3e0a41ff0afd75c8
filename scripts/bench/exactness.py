"""Is what is trained what was sampled? Plays real trajectories and checks every token and every
log-prob.

    python scripts/bench/exactness.py                                                  # the policy of the quickstart
    python scripts/bench/exactness.py --config-name smollm2_alfworld --dtype bfloat16
    python scripts/bench/exactness.py --history window
    python scripts/bench/exactness.py --config-name smollm2_alfworld --stop . ,   # a policy that ends few turns

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from agent_system.multi_turn_rollout.packing import Row, pack, rows_of
from scripts.bench.play import Workload
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

    def __init__(self, client: Any) -> None:
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
    said, seen = "What I say.", "What I see."
    chat = [("user", "Begin."), ("assistant", said), ("user", seen)]
    messages = [{"role": role, "content": text} for role, text in chat]
    tokenizer, options = stage.tokenizer, stage.cfg.data.apply_chat_template_kwargs
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **options
    )
    before, after = text.partition(said)[2].split(seen)
    return tuple(tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))


def check_tokens(
    rows: Sequence[Row], data: DataProto, witness: Witness, stage: Workload
) -> dict[str, int]:
    """Counts of what is right and of every way to be wrong."""
    tokenizer, (before, after) = stage.tokenizer, separators(stage)
    found = dict.fromkeys(
        ("turns", "tokens", "other tokens", "other log-probs", "loss elsewhere", "gaps"), 0
    )
    found |= {"separators lost": 0, "retokenised": 0}
    width = data.batch["prompts"].shape[1]
    for number, row in enumerate(rows):
        real = data.batch["attention_mask"][number].bool()
        ids = data.batch["input_ids"][number][real].tolist()
        mask = torch.nn.functional.pad(data.batch["response_mask"][number], (width, 0))[
            real
        ].tolist()
        logprobs = torch.nn.functional.pad(data.batch["rollout_log_probs"][number], (width, 0))[
            real
        ].tolist()
        sampled, last = 0, None
        for turn in row.turns:
            prompt, result = witness.seen[row.trajectory.job.index][turn.step]
            start, end = len(prompt), len(prompt) + len(result.token_ids)
            found["other tokens"] += ids[:start] != prompt or ids[start:end] != list(
                result.token_ids
            )
            found["other log-probs"] += (
                logprobs[start:end] != torch.tensor(result.logprobs).tolist()
            )
            sampled += sum(mask[start:end])
            found["turns"] += 1
            found["tokens"] += end - start
            text = tokenizer.decode(result.token_ids)
            found["retokenised"] += tokenizer(text, add_special_tokens=False)["input_ids"] != list(
                result.token_ids
            )
            if last is not None:
                gap = ids[last:start]
                wanted = before[1:] if ids[last - 1] == before[0] else before
                found["gaps"] += 1
                found["separators lost"] += (
                    gap[: len(wanted)] != wanted or gap[-len(after) :] != after
                )
            last = end
        turns = sum(turn.end - turn.start for turn in row.turns)
        found["loss elsewhere"] += sum(mask) != sampled or sampled != turns
    return found


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
    mean, largest = check_logprobs(data, stage.path, args.dtype)
    fed = int(data.batch["attention_mask"].sum())
    print(
        f"{stage.path}, {args.dtype}, {args.history}: {trajectories} trajectories, {len(rows)} rows"
    )
    print(
        f"{found['turns']} turns, {found['tokens']} sampled tokens: {found['other tokens']} turns have other tokens,"
    )
    print(
        f"{found['other log-probs']} other log-probs; {found['loss elsewhere']} rows have loss elsewhere"
    )
    print(f"{found['gaps']} separators, of which not whole {found['separators lost']}")
    print(f"|trainer - engine| mean {mean:.1e}, largest {largest:.1e} nats")
    print(
        f"turns that would be other tokens if their text were encoded again: {found['retokenised']}"
    )
    print(
        f"per episode: {found['tokens'] / trajectories:.0f} sampled, {fed / trajectories:.0f} fed to the trainer"
    )


if __name__ == "__main__":
    main()
