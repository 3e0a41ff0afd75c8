"""Measure the weight sync to the engine in seconds per GiB, and compare it with a plain copy.

    python -m scripts.dev.bench.sync

A run starts as in ``main_ppo``, with a random policy of each size, and syncs its weights
``--repeats`` times. Nothing is generated or trained. Sizes are those of the weights in the dtype of
the engine. The training rank has float32 weights.

    whole   ``sync_weights``: gather and cast on the rank, transfer through Ray's object store (or
            between devices: ``weight_transfer``), load into the engine, verify bit by bit
    export  gather and cast on the training rank, until the weights are in the object store
    copy    copy of as many bytes between two arrays in this process: the lower bound

The table shows medians without the first repeat.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from tests.helpers.tiny_model import make_tiny_policy
from verl.single_controller.ray import ray_get
from verl.trainer.launch.extensions import load_config
from verl.trainer.launch.ppo import open_run
from verl.trainer.ppo.resources import TrainingWorkers
from verl.utils.logging import setup_logging

GIB = 1 << 30
HIDDEN_SIZE = 1024  # of the random policies, which differ in their number of layers
# Number of weights of a layer, without its norms.
LAYER_WEIGHTS = 3 * HIDDEN_SIZE * HIDDEN_SIZE + 3 * HIDDEN_SIZE * 3 * HIDDEN_SIZE
BYTES_PER_WEIGHT = {"bfloat16": 2, "float32": 4}
EXPORT_TIMEOUT_S = 600.0  # seconds for the training rank to export its weights


@dataclass
class SyncCost:
    """Seconds for ``num_bytes`` bytes: complete sync, export by the rank, and plain copy."""

    num_bytes: int
    sync_s: float
    export_s: float
    copy_s: float


def build_overrides(policy: Path, run_dir: Path, engine: str, dtype: str) -> list[str]:
    """Return the config overrides of the run whose weight sync is measured."""
    return [
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.model.path={policy}",
        f"actor_rollout_ref.rollout.name={engine}",
        f"actor_rollout_ref.rollout.dtype={dtype}",
        "actor_rollout_ref.rollout.max_num_seqs=8",
        "actor_rollout_ref.rollout.kv_cache_gb=1",
        "data.train_batch_size=1",
        "data.max_prompt_length=640",
        "data.max_response_length=384",
        "env.env_name=number_line",
        "env.history=append",
        "env.max_steps=2",
        "env.max_turn_tokens=16",
        "env.rollout.n=2",
        "env.val_tasks=2",
        "trainer.total_training_steps=1",
        f"trainer.default_local_dir={run_dir}",
    ]


def measure_median_s(repeats: int, call: Callable[[int], object]) -> float:
    """Return the median seconds of ``call(1)`` to ``call(repeats)``. ``call(0)`` is a warm-up."""
    seconds = []
    for call_index in range(repeats + 1):
        start_time_s = time.perf_counter()
        call(call_index)
        seconds.append(time.perf_counter() - start_time_s)
    return statistics.median(seconds[1:])


def measure_sync(gib: float, engine: str, dtype: str, repeats: int, scratch: Path) -> SyncCost:
    """Measure the sync of about ``gib`` GiB of weights from the training rank to the engine."""
    num_layers = max(1, round(gib * GIB / (LAYER_WEIGHTS * BYTES_PER_WEIGHT[dtype])))
    policy = make_tiny_policy(
        scratch / f"policy-{num_layers}", hidden=HIDDEN_SIZE, layers=num_layers
    )
    run_dir = scratch / f"run-{engine}-{num_layers}"
    with open_run(
        load_config("ppo_trainer", build_overrides(policy, run_dir, engine, dtype))
    ) as run:
        workers = run.trainer.workers
        sync_s = measure_median_s(repeats, workers.sync_weights)
        export_s = measure_median_s(repeats, lambda _: export_weights_to_store(workers))
        weights = ray_get(
            export_weights_to_store(workers), EXPORT_TIMEOUT_S, "export of the weights"
        )
        num_bytes = sum(array.nbytes for _, array in weights)
    source, copy_target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    return SyncCost(
        num_bytes,
        sync_s,
        export_s,
        measure_median_s(repeats, lambda _: np.copyto(copy_target, source)),
    )


def export_weights_to_store(workers: TrainingWorkers) -> ray.ObjectRef:
    """Export the weights of rank 0, and return a reference when they are in the object store."""
    ref = workers.actor_group.call_for_refs("export_weights")[0]
    if not ray.wait([ref], timeout=EXPORT_TIMEOUT_S, fetch_local=False)[0]:
        raise TimeoutError(f"the rank has not exported its weights within {EXPORT_TIMEOUT_S:g} s")
    return ref


def format_table(costs: Sequence[SyncCost]) -> str:
    """Return a Markdown table of seconds per GiB, with a line for every size of the weights."""
    lines = [
        "| GiB | whole, s per GiB | export, s per GiB | copy, s per GiB | whole / copy |",
        "|---|---|---|---|---|",
    ]
    for cost in costs:
        gib = cost.num_bytes / GIB
        cost_cells = " | ".join(
            f"{seconds / gib:.2f}" for seconds in (cost.sync_s, cost.export_s, cost.copy_s)
        )
        lines.append(f"| {gib:.2f} | {cost_cells} | {cost.sync_s / cost.copy_s:.1f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark with the command-line options and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, nargs="+", default=[0.125, 0.5, 1.0])
    parser.add_argument("--engines", nargs="+", default=["vllm", "hf"])
    parser.add_argument("--dtype", choices=sorted(BYTES_PER_WEIGHT), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    setup_logging()
    for engine in args.engines:
        with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
            costs = [
                measure_sync(gib, engine, args.dtype, args.repeats, Path(scratch))
                for gib in args.gib
            ]
        print(f"\nengine {engine}, {args.dtype}\n\n{format_table(costs)}")


if __name__ == "__main__":
    main()
