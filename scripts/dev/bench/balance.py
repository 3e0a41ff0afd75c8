"""Simulate how evenly the ranks are loaded in an update, with the code that shards the rows.

    python -m scripts.dev.bench.balance

Nothing is trained. Row lengths are drawn as in ALFWorld. The members of a group share the
difficulty of their task. A trajectory without success has the maximum number of turns.
Efficiency is the mean load of a rank divided by the load of the busiest rank, in tokens. It covers
all optimizer steps of a training step. Loads of 80 and 100 tokens on two ranks give 90 / 100 = 0.9.

    before   the whole batch is sharded once, and mini-batches ignore this sharding
    now      every mini-batch is sharded separately
    at best  upper bound if no row is split, so that one rank has at least the longest row
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl.protocol import DataProto, object_array
from verl.trainer.ppo.minibatch_sharding import split_mini_batches
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.mini_batches import make_mini_batches

GROUP_SIZE = 8  # trajectories of a group
PROMPT_TOKENS = (600, 1200)  # tokens before the first turn
TURN_TOKENS = (60, 160)  # tokens of a turn and of the observation after it
MAX_TURNS = 50  # turns of a trajectory without success
HISTORY_TURNS = 3  # earlier turns that a row of window history shows


@dataclass(frozen=True)
class BalanceCase:
    """Sizes of a step: ranks, trajectories and optimizer steps."""

    num_ranks: int
    num_trajectories: int
    optimizer_steps: int
    has_window_history: bool = False  # one row per turn, instead of one row per trajectory


CASES = (
    BalanceCase(8, 128, 4),
    BalanceCase(64, 1024, 4),
    BalanceCase(1024, 10240, 8),
    BalanceCase(1024, 10240, 2),
    BalanceCase(1024, 10240, 8, has_window_history=True),
)


@dataclass(frozen=True)
class RowSizes:
    """Simulated rows: tokens of each row, its group (``uid``) and trajectory (``traj_uid``)."""

    sizes: list[int]  # tokens of each row
    table: DataProto


def sample_row_sizes(case: BalanceCase, seed: int = 0) -> RowSizes:
    """Draw the rows of one step."""
    rng = np.random.default_rng(seed)
    sizes: list[int] = []
    group_ids: list[str] = []
    traj_uids: list[str] = []
    success_rates = rng.uniform(0.1, 0.9, case.num_trajectories)
    min_turns = rng.integers(5, 20, case.num_trajectories)
    for traj_index in range(case.num_trajectories):
        group_index = traj_index // GROUP_SIZE
        is_success = rng.random() < success_rates[group_index]
        turns_to_success = int(min_turns[group_index] * rng.uniform(1.0, 2.0))
        num_turns = min(MAX_TURNS, turns_to_success) if is_success else MAX_TURNS
        turn_lengths = rng.integers(*TURN_TOKENS, num_turns)
        prompt_length = int(rng.integers(*PROMPT_TOKENS))
        window_tokens = [
            turn_lengths[max(0, i - HISTORY_TURNS) : i + 1].sum() for i in range(num_turns)
        ]
        row_lengths = window_tokens if case.has_window_history else [turn_lengths.sum()]
        sizes += [prompt_length + int(tokens) for tokens in row_lengths]
        group_ids += [f"group {group_index}"] * len(row_lengths)
        traj_uids += [f"trajectory {traj_index}"] * len(row_lengths)
    columns = {"uid": object_array(group_ids), "traj_uid": object_array(traj_uids)}
    return RowSizes(sizes, DataProto.from_dict({}, columns))


def compute_efficiency(
    mini_batches_of_rows: Sequence[Sequence[int]],
    rows_by_rank: Sequence[Sequence[int]],
    sizes: Sequence[int],
) -> float:
    """Return the mean load of the ranks divided by the load of the busiest rank.

    The arguments are row indices by mini-batch and by rank, and the tokens of each row. All ranks
    wait for each other after each mini-batch.
    """
    step_by_row = {
        row: step for step, mini_batch in enumerate(mini_batches_of_rows) for row in mini_batch
    }
    rank_loads = np.zeros((len(mini_batches_of_rows), len(rows_by_rank)))
    for rank, rank_rows in enumerate(rows_by_rank):
        for row in rank_rows:
            rank_loads[step_by_row[row], rank] += sizes[row]
    return float(rank_loads.sum() / len(rows_by_rank) / rank_loads.max(axis=1).sum())


def compute_best_efficiency(
    mini_batches_of_rows: Sequence[Sequence[int]], sizes: Sequence[int], ranks: int
) -> float:
    """Return the highest possible efficiency if no row is split between ranks."""
    tokens_by_mini_batch = [
        [sizes[row] for row in mini_batch] for mini_batch in mini_batches_of_rows
    ]
    busiest_loads = [
        max(sum(batch_tokens) / ranks, max(batch_tokens)) for batch_tokens in tokens_by_mini_batch
    ]
    return (
        sum(sum(batch_tokens) for batch_tokens in tokens_by_mini_batch) / ranks / sum(busiest_loads)
    )


def measure_efficiency(case: BalanceCase, seed: int = 0) -> tuple[float, float, float]:
    """Return the efficiencies ``before``, ``now`` and ``at best`` of the module's docstring."""
    row_sizes = sample_row_sizes(case, seed)
    mini_batches = make_mini_batches(row_sizes.table, seed, num_steps=case.optimizer_steps)
    num_rows = len(row_sizes.sizes)
    # Add empty rows, so that the ranks divide the number of rows. A run adds copies of rows.
    padded_sizes = [*row_sizes.sizes, *[0] * (-num_rows % case.num_ranks)]
    padded_rows_by_rank = get_seqlen_balanced_partitions(
        padded_sizes, case.num_ranks, equal_size=True
    )
    old_rows_by_rank = [
        [row for row in rank_rows if row < num_rows] for rank_rows in padded_rows_by_rank
    ]
    new_rows_by_rank = split_mini_batches(mini_batches, row_sizes.sizes, case.num_ranks)
    return (
        compute_efficiency(mini_batches, old_rows_by_rank, row_sizes.sizes),
        compute_efficiency(mini_batches, new_rows_by_rank, row_sizes.sizes),
        compute_best_efficiency(mini_batches, row_sizes.sizes, case.num_ranks),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the efficiencies of all cases as a Markdown table."""
    parser = argparse.ArgumentParser(description="Efficiency of an update, by simulation.")
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args(argv).seed
    print("| ranks | trajectories | history | optimizer steps | before | now | at best |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        history = "window" if case.has_window_history else "append"
        old_efficiency, new_efficiency, best_efficiency = measure_efficiency(case, seed)
        cells = (case.num_ranks, f"{case.num_trajectories:,}", history, case.optimizer_steps)
        efficiency_cells = (
            f"{value:.3f}" for value in (old_efficiency, new_efficiency, best_efficiency)
        )
        print(f"| {' | '.join(map(str, (*cells, *efficiency_cells)))} |")


if __name__ == "__main__":
    main()
