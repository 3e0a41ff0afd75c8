"""Estimate the load of driver, links and devices in a step, for many ranks and trajectories.

    python -m scripts.dev.bench.scale

    driver    CPU seconds per row, per token and per rank, which ``scripts.dev.bench.driver``
              measures on small batches; sharding is measured at full size with the code of a run
    journal   CPU seconds of the driver's thread that sends values to the collectors and writes
              the lines of the rollout log
    collector CPU seconds of a collector that packs its trajectories and encodes their lines; a
              node has COLLECTORS_PER_NODE
    store     bytes through the object store of the driver's node: trajectories, rows, answers
    links     bytes of the driver's link to other nodes; bytes of every device's link for gathered
              weights and reduced gradients in each micro-batch
    devices   time of the update divided by the efficiency of the sharding, and the other parts of
              ``scripts/dev/recipes.py``, for 1.5B parameters on H100s in nodes of 8

Row lengths are drawn as in ``scripts.dev.bench.balance``. Nothing was measured on a cluster. The
table shows where a single driver becomes the bottleneck, not how long a step takes.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from scripts.dev.bench import balance, driver
from scripts.dev.recipes import (
    FLOAT32_BYTES,
    GIGA,
    H100,
    MODELS,
    estimate_part_seconds,
)
from verl.config.memory import BYTES_PER_VALUE, count_micro_batch_tokens
from verl.config.schema import PPOConfig
from verl.trainer.launch.extensions import load_config
from verl.trainer.ppo.minibatch_sharding import split_mini_batches
from verl.utils.seqlen_balancing import partition_rows
from verl.workers.mini_batches import make_mini_batches

# Every pair of these two sizes of a training step is one line of the table.
RANKS = (8, 64, 1024)
TRAJECTORIES = (1_000, 10_000, 100_000)
RECIPE_NAME = "alfworld_qwen2.5_1.5b_8gpu"
DEVICES_PER_NODE = 8
COLLECTORS_PER_NODE = 2
DRIVER_LINK_GB_PER_S = 25.0  # a network link of 200 Gb/s
DEVICE_LINK_GB_PER_S = 50.0  # a network link of 400 Gb/s for each device
OPTIMIZER_STEPS = 4  # optimizer steps of a training step
# The driver's cost is measured for a short and a long row, and for few and many ranks.
SHORT_TRAJECTORY = driver.TrajectoryShape(
    turns=10, prompt=400, sampled_tokens=60, observation_tokens=60
)
LONG_TRAJECTORY = driver.TrajectoryShape(
    turns=40, prompt=400, sampled_tokens=60, observation_tokens=60
)
MANY_RANKS = 128  # compared with ``driver.RANKS`` to measure the cost per rank


@dataclass(frozen=True)
class DriverModel:
    """Cost model of the driver: the cost of a step is linear in these numbers."""

    seconds_per_row: float
    seconds_per_token: float  # per token of padded rows
    seconds_per_rank: float
    journal_seconds_per_token: float  # per token of a trajectory
    collector_seconds_per_token: float  # per token of a trajectory
    received_bytes_per_token: float  # from the collectors, per token of a trajectory
    moved_bytes_per_token: float  # to the ranks and back, per token of padded rows


@dataclass(frozen=True)
class StepLoad:
    """Estimated seconds (``_s``) and transferred gigabytes (``_gb``) of one training step."""

    ranks: int
    num_trajectories: int
    driver_s: float
    shard_s: float  # time in which the driver assigns rows to ranks
    journal_s: float
    collector_s: float
    store_gb: float
    driver_link_s: float
    device_link_gb: float
    device_link_s: float
    device_s: float
    efficiency: float
    idle_share: float  # share of pairs of rank and mini-batch without a row

    @property
    def slowest_part(self) -> str:
        """Name of the part of the step with the most seconds, such as ``driver`` or ``devices``."""
        part_seconds = {
            "driver": self.driver_s + self.shard_s,
            "journal": self.journal_s,
            "collectors": self.collector_s,
            "driver's link": self.driver_link_s,
            "devices' links": self.device_link_s,
            "devices": self.device_s,
        }
        return max(part_seconds, key=part_seconds.__getitem__)


def fit_driver_model(rows: int) -> DriverModel:
    """Measure three steps with ``rows`` rows, and return the cost model of the driver."""
    # Warm-up: the steps of a run use the memory of earlier steps again.
    driver.measure_driver_cost(rows, shape=LONG_TRAJECTORY)
    short_cost = driver.measure_driver_cost(rows, shape=SHORT_TRAJECTORY)
    long_cost = driver.measure_driver_cost(rows, shape=LONG_TRAJECTORY)
    many_ranks_cost = driver.measure_driver_cost(rows, MANY_RANKS, SHORT_TRAJECTORY)
    extra_row_tokens = LONG_TRAJECTORY.row_tokens - SHORT_TRAJECTORY.row_tokens
    # The minimum keeps the cost per row at 0 or more when the measurements are noisy.
    token_ms = min(
        (long_cost.blocking_ms - short_cost.blocking_ms) / extra_row_tokens,
        long_cost.blocking_ms / LONG_TRAJECTORY.row_tokens,
    )
    row_ms = long_cost.blocking_ms - token_ms * LONG_TRAJECTORY.row_tokens
    rank_ms = (
        (many_ranks_cost.blocking_ms - short_cost.blocking_ms) * rows / (MANY_RANKS - driver.RANKS)
    )
    num_tokens = rows * LONG_TRAJECTORY.row_tokens
    moved_data_parts = ("send", "answers", "update", driver.JOURNAL_PART)
    moved_bytes = sum(long_cost.sent[part] for part in moved_data_parts)
    return DriverModel(
        row_ms / 1e3,
        token_ms / 1e3,
        max(0.0, rank_ms) / 1e3,
        long_cost.seconds[driver.JOURNAL_PART] / num_tokens,
        long_cost.seconds[driver.COLLECTOR_PART] / num_tokens,
        long_cost.sent["receive"] / num_tokens,
        moved_bytes / num_tokens,
    )


def make_config(ranks: int, num_trajectories: int) -> PPOConfig:
    """Return the config ``RECIPE_NAME`` for other numbers of ranks and trajectories."""
    num_nodes = max(1, ranks // DEVICES_PER_NODE)
    group_size = balance.GROUP_SIZE
    overrides = [
        f"trainer.nnodes={num_nodes}",
        f"data.train_batch_size={num_trajectories // group_size}",
    ]
    overrides += [f"actor_rollout_ref.rollout.n={group_size}", f"env.rollout.n={group_size}"]
    return load_config(RECIPE_NAME, overrides)


def measure_sharding(rows: balance.RowSizes, ranks: int, seed: int) -> tuple[float, float, float]:
    """Shard ``rows`` for two forward passes and an update.

    Return the CPU seconds, the efficiency of the update, and the share of pairs of rank and
    mini-batch without a row.
    """
    start_cpu_s = time.process_time()
    for _ in range(2):
        partition_rows(rows.sizes, ranks)
    batches = make_mini_batches(rows.table, seed, num_steps=OPTIMIZER_STEPS)
    rows_by_rank = split_mini_batches(batches, rows.sizes, ranks)
    cpu_seconds = time.process_time() - start_cpu_s
    batch_by_row = {row: batch_index for batch_index, batch in enumerate(batches) for row in batch}
    num_busy_pairs = sum(
        len({batch_by_row[row] for row in rank_rows}) for rank_rows in rows_by_rank
    )
    idle_share = 1 - num_busy_pairs / (len(batches) * ranks)
    return cpu_seconds, balance.compute_efficiency(batches, rows_by_rank, rows.sizes), idle_share


def compute_link_bytes(cfg: PPOConfig, ranks: int, tokens: float) -> float:
    """Return the bytes over a device's link in one step, for ``tokens`` tokens per rank.

    Each of the two forward passes gathers the weights of the other ranks for every micro-batch. The
    update gathers them twice, forward and backward, and reduces gradients in float32.
    """
    num_weights = MODELS[str(cfg.actor_rollout_ref.model.path)].num_parameters
    gathered_bytes = num_weights * BYTES_PER_VALUE[cfg.actor_rollout_ref.actor.dtype]
    num_micro_batches = max(1.0, tokens / count_micro_batch_tokens(cfg))
    num_update_batches = max(OPTIMIZER_STEPS, num_micro_batches)
    bytes_per_device = 2 * num_micro_batches * gathered_bytes + num_update_batches * (
        2 * gathered_bytes + num_weights * FLOAT32_BYTES
    )
    return bytes_per_device * (ranks - 1) / ranks


def simulate_step(ranks: int, num_trajectories: int, model: DriverModel, seed: int = 0) -> StepLoad:
    """Estimate the load of a step with ``num_trajectories`` on ``ranks`` devices."""
    cfg = make_config(ranks, num_trajectories)
    rows = balance.sample_row_sizes(
        balance.BalanceCase(ranks, num_trajectories, OPTIMIZER_STEPS), seed
    )
    shard_s, efficiency, idle_share = measure_sharding(rows, ranks, seed)
    tokens = sum(rows.sizes)
    padded_tokens = num_trajectories * max(rows.sizes)
    num_nodes = max(1, ranks // DEVICES_PER_NODE)
    stored_bytes = (
        tokens * model.received_bytes_per_token + padded_tokens * model.moved_bytes_per_token
    )
    part_seconds = estimate_part_seconds(cfg, H100)
    link_bytes = compute_link_bytes(cfg, ranks, tokens / ranks)
    non_update_s = sum(value for part, value in part_seconds.items() if part != "update")
    return StepLoad(
        ranks=ranks,
        num_trajectories=num_trajectories,
        driver_s=num_trajectories * model.seconds_per_row
        + padded_tokens * model.seconds_per_token
        + ranks * model.seconds_per_rank,
        shard_s=shard_s,
        journal_s=tokens * model.journal_seconds_per_token,
        collector_s=tokens * model.collector_seconds_per_token / (num_nodes * COLLECTORS_PER_NODE),
        store_gb=stored_bytes / GIGA,
        driver_link_s=stored_bytes * (num_nodes - 1) / num_nodes / GIGA / DRIVER_LINK_GB_PER_S,
        device_link_gb=link_bytes / GIGA,
        device_link_s=link_bytes / GIGA / DEVICE_LINK_GB_PER_S,
        device_s=non_update_s + part_seconds["update"] / efficiency,
        efficiency=efficiency,
        idle_share=idle_share,
    )


def format_table(loads: Sequence[StepLoad]) -> Iterator[str]:
    """Yield the lines of a Markdown table with the load of one training step per line."""
    yield (
        "| ranks | trajectories | driver, s | sharding, s | journal, s | collector, s | store, GB "
        "| driver's link, s "
        "| device's link, GB | the same, s | devices, s | efficiency | idle | longest |"
    )
    yield f"|{'---|' * 14}"
    for load in loads:
        yield (
            f"| {load.ranks:,} | {load.num_trajectories:,} | {load.driver_s:.1f} "
            f"| {load.shard_s:.2f} | {load.journal_s:.1f} | {load.collector_s:.1f} "
            f"| {load.store_gb:.1f} | {load.driver_link_s:.2f} | {load.device_link_gb:.0f} "
            f"| {load.device_link_s:.1f} | {load.device_s:.1f} | {load.efficiency:.2f} "
            f"| {load.idle_share:.0%} | {load.slowest_part} |"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the driver's cost model and the table of loads."""
    parser = argparse.ArgumentParser(description="Simulated load of driver, links and devices.")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--trajectories", type=int, nargs="+", default=TRAJECTORIES)
    parser.add_argument("--rows", type=int, default=256, help="rows of the measured steps")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = fit_driver_model(args.rows)
    print(
        f"driver: {1e3 * model.seconds_per_row:.2f} ms a row, "
        f"{1e9 * model.seconds_per_token:.0f} ns a token of it, "
        f"{1e3 * model.seconds_per_rank:.2f} ms a rank; "
        f"journal: {1e9 * model.journal_seconds_per_token:.0f} ns a token; "
        f"collectors: {1e9 * model.collector_seconds_per_token:.0f} ns a token; "
        f"{model.received_bytes_per_token:.0f} bytes a token from collectors, "
        f"{model.moved_bytes_per_token:.0f} to ranks and back\n"
    )
    loads = [
        simulate_step(ranks, num_trajectories, model)
        for ranks in args.ranks
        for num_trajectories in args.trajectories
    ]
    print("\n".join(format_table(loads)))


if __name__ == "__main__":
    main()
