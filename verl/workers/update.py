"""The update loop that actor and critic share: epochs x mini-batches x micro-batches, exact under
any split.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto
from verl.utils.seeds import derive_seed
from verl.workers.collectives import max_over_ranks, sum_over_ranks
from verl.workers.engine import StepReport, TrainEngine
from verl.workers.mini_batches import mini_batches
from verl.workers.rows import Rows, micro_batches

# index of rows -> this micro-batch's share of the mini-batch loss, and metrics to be summed; [] ->
# zero loss
Share = Callable[[list[int]], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def plan_mini_batches(data: DataProto, section: Any, *seed: int | str) -> Iterator[list[int]]:
    """This rank's rows of every optimizer step of an update, epoch by epoch.

    ``section`` has ``ppo_epochs, shuffle, ppo_mini_batches`` and ``ppo_mini_batch_size``. With
    ``shuffle`` every epoch cuts the trajectories anew; without it all epochs of an update take the
    same mini-batches.
    """
    for epoch in range(section.ppo_epochs or 1):
        number = derive_seed(*seed, epoch if section.shuffle else 0)
        yield from mini_batches(data, number, section.ppo_mini_batch_size, section.ppo_mini_batches)


def optimizer_step(
    engine: TrainEngine,
    rows: Rows,
    part: Sequence[int],
    section: Any,
    share: Share,
    names: Sequence[str],
) -> tuple[dict[str, float], StepReport]:
    """Accumulate the gradient of the mini-batch ``part`` in micro-batches and take one step.

    Returns the metrics ``names``, summed over micro-batches and ranks (zero where none was
    measured), and the report.
    """
    limits = {"max_rows": section.ppo_micro_batch_size_per_gpu}
    if section.use_dynamic_bsz:
        limits = {"max_tokens": section.ppo_max_token_len_per_gpu}
    cuts = [
        [part[i] for i in cut]
        for cut in micro_batches([rows.lengths[row] for row in part], **limits)
    ]
    # all ranks run equally many passes, for each of them is a collective operation
    passes = int(max_over_ranks([len(cuts)])[0])
    sums = {name: torch.zeros(()) for name in names}
    for number in range(passes):
        loss, measured = share(cuts[number] if number < len(cuts) else [])
        engine.backward(loss, last=number == passes - 1)
        for name, value in measured.items():
            sums[name] = sums[name] + value.float().cpu()
    totals = sum_over_ranks([float(value) for value in sums.values()])
    return dict(zip(names, totals, strict=True)), engine.step()


def update_metrics(
    role: str, records: list[tuple[dict[str, float], StepReport]], tokens: int, seconds: float
) -> dict[str, float]:
    """Means over the optimizer steps that measured something, counts of steps left out, and what an
    update cost.

    ``tokens`` real tokens of this rank, all epochs counted; ``seconds`` of this rank. Equal on
    every rank.
    """
    measured, reports = [m for m, _ in records], [r for _, r in records]
    names = dict.fromkeys(name for found in measured for name in found)
    metrics = {
        f"{role}/{name}": float(np.mean([m[name] for m in measured if name in m])) for name in names
    }
    kept = [r.grad_norm for r in reports if not r.skipped]
    metrics |= {
        f"{role}/grad_norm": float(np.mean(kept)) if kept else 0.0,
        f"{role}/lr": reports[-1].lr if reports else 0.0,
        f"{role}/optimizer_steps": float(len(reports)),
        f"{role}/skipped_steps": float(sum(r.skipped for r in reports)),
        f"{role}/zero_steps": float(sum(r.zero for r in reports)),
        f"perf/update_{role}_tokens": sum_over_ranks([tokens])[0],
        f"perf/update_{role}_seconds": max_over_ranks([seconds])[0],
    }
    if torch.cuda.is_available():
        used = torch.cuda.max_memory_allocated() / 2**30
        metrics["perf/max_memory_allocated_gb"] = max_over_ranks([used])[0]
    return metrics
