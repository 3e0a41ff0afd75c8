"""Simulate how evenly the ranks are loaded in an update, with the code that shards the rows.

    python -m scripts.dev.bench.balance

Nothing is trained. Row lengths are drawn as in ALFWorld. The members of a group share the
difficulty of their task. A trajectory without success has the maximum number of turns.
Efficiency is the mean load of a rank divided by the load of the busiest rank, in tokens, over all
optimizer steps of a step. Loads of 80 and 100 tokens on two ranks give 90 / 100 = 0.9.

    before   the whole batch is sharded once, and mini-batches ignore this sharding
    now      every mini-batch is sharded separately
    at best  upper bound if no row is split: one rank has at least the longest row
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl.protocol import DataProto, object_array
from verl.trainer.ppo.minibatch_sharding import split_mini_batches
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.mini_batches import mini_batches

GROUP = 8
PROMPT = (600, 1200)  # tokens before the first turn
TURN = (60, 160)  # tokens of a turn and of the observation after it
MAX_TURNS = 50
HISTORY = 3  # earlier turns that a row of window history shows


@dataclass(frozen=True)
class BalanceCase:
    """Sizes of a step: ranks, trajectories and optimizer steps."""

    ranks: int
    num_trajectories: int
    steps: int
    window: bool = False  # one row per turn, instead of one row per trajectory


CASES = (
    BalanceCase(8, 128, 4),
    BalanceCase(64, 1024, 4),
    BalanceCase(1024, 10240, 8),
    BalanceCase(1024, 10240, 2),
    BalanceCase(1024, 10240, 8, window=True),
)


@dataclass(frozen=True)
class RowSizes:
    """Simulated rows: tokens of each row, and its ``uid`` and ``traj_uid``."""

    sizes: list[int]
    table: DataProto


def sample_rows(case: BalanceCase, seed: int = 0) -> RowSizes:
    """Draw the rows of one step."""
    draw = np.random.default_rng(seed)
    sizes: list[int] = []
    groups: list[str] = []
    traj_uids: list[str] = []
    chances = draw.uniform(0.1, 0.9, case.num_trajectories)
    min_turns = draw.integers(5, 20, case.num_trajectories)
    for traj_index in range(case.num_trajectories):
        group = traj_index // GROUP
        is_success = draw.random() < chances[group]
        turns_to_success = int(min_turns[group] * draw.uniform(1.0, 2.0))
        steps = min(MAX_TURNS, turns_to_success) if is_success else MAX_TURNS
        turns = draw.integers(*TURN, steps)
        prompt = int(draw.integers(*PROMPT))
        window_tokens = [turns[max(0, i - HISTORY) : i + 1].sum() for i in range(steps)]
        rows = window_tokens if case.window else [turns.sum()]
        sizes += [prompt + int(tokens) for tokens in rows]
        groups += [f"group {group}"] * len(rows)
        traj_uids += [f"play {traj_index}"] * len(rows)
    columns = {"uid": object_array(groups), "traj_uid": object_array(traj_uids)}
    return RowSizes(sizes, DataProto.from_dict({}, columns))


def compute_efficiency(
    parts: Sequence[Sequence[int]], shares: Sequence[Sequence[int]], sizes: Sequence[int]
) -> float:
    """Return the mean load of the ranks divided by the load of the busiest rank.

    ``shares[r]``: the rows that rank ``r`` computes. ``parts``: the rows of each mini-batch. All
    ranks wait for each other after each mini-batch. ``sizes``: tokens of each row.
    """
    step_of = {row: step for step, mini_batch in enumerate(parts) for row in mini_batch}
    loads = np.zeros((len(parts), len(shares)))
    for rank, rank_rows in enumerate(shares):
        for row in rank_rows:
            loads[step_of[row], rank] += sizes[row]
    return float(loads.sum() / len(shares) / loads.max(axis=1).sum())


def compute_best_efficiency(
    parts: Sequence[Sequence[int]], sizes: Sequence[int], ranks: int
) -> float:
    """Return the highest possible efficiency if no row is split between ranks."""
    loads = [[sizes[row] for row in mini_batch] for mini_batch in parts]
    step_loads = [max(sum(load) / ranks, max(load)) for load in loads]
    return sum(sum(load) for load in loads) / ranks / sum(step_loads)


def measure_efficiency(case: BalanceCase, seed: int = 0) -> tuple[float, float, float]:
    """Return three efficiencies: mean load of the ranks, divided by the largest load.

    They are those of a balanced batch that is split into mini-batches afterwards, of mini-batches
    that are balanced one by one, and of the best balance that whole rows allow.
    """
    rows = sample_rows(case, seed)
    batches = mini_batches(rows.table, seed, num_steps=case.steps)
    count = len(rows.sizes)
    # Empty rows make the number of rows divisible by the ranks, as copies of rows do in a run.
    padded = [*rows.sizes, *[0] * (-count % case.ranks)]
    batch_shares = get_seqlen_balanced_partitions(padded, case.ranks, equal_size=True)
    old_shares = [[row for row in rank_rows if row < count] for rank_rows in batch_shares]
    new_shares = split_mini_batches(batches, rows.sizes, case.ranks)
    return (
        compute_efficiency(batches, old_shares, rows.sizes),
        compute_efficiency(batches, new_shares, rows.sizes),
        compute_best_efficiency(batches, rows.sizes, case.ranks),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the efficiencies of all cases as a Markdown table."""
    parser = argparse.ArgumentParser(description="Efficiency of an update, by simulation.")
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args(argv).seed
    print("| ranks | trajectories | history | optimizer steps | before | now | at best |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        history = "window" if case.window else "append"
        old_efficiency, new_efficiency, best_efficiency = measure_efficiency(case, seed)
        cells = (case.ranks, f"{case.num_trajectories:,}", history, case.steps)
        figures = (f"{value:.3f}" for value in (old_efficiency, new_efficiency, best_efficiency))
        print(f"| {' | '.join(map(str, (*cells, *figures)))} |")


if __name__ == "__main__":
    main()
