"""Update loop of actor and critic: epochs, mini-batches and micro-batches.

The gradient of a mini-batch does not depend on its split into micro-batches and ranks.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from verl.config.schema.actor import ActorConfig
from verl.config.schema.critic import CriticConfig
from verl.models.flops import ForwardSize, model_flops
from verl.protocol import DataProto
from verl.utils.seeds import derive_seed
from verl.workers.collectives import max_over_ranks, sum_over_ranks
from verl.workers.engine import StepReport, TrainEngine
from verl.workers.mini_batches import common_passes, cut_rows, mini_batches
from verl.workers.profiling import memory_metrics, speed_metrics
from verl.workers.rows import Rows, choose_limits

# Function from the row indices of a micro-batch to its part of the mini-batch loss and its metrics.
# Both are summed over micro-batches and ranks. An empty list gives a zero loss.
LossShare = Callable[[list[int]], tuple[torch.Tensor, dict[str, torch.Tensor]]]
# Metrics and report of one optimizer step.
StepOutcome = tuple[dict[str, float], StepReport]


def plan_mini_batches(
    data: DataProto, section: ActorConfig | CriticConfig, *seed: int | str
) -> Iterator[list[int]]:
    """Yield the rows of this rank for every optimizer step of an update, epoch by epoch.

    With ``section.shuffle`` every epoch has different mini-batches, otherwise all epochs of an
    update have the same ones.
    """
    for epoch in range(section.ppo_epochs):
        yield from epoch_mini_batches(data, section, epoch, *seed)


def epoch_mini_batches(
    data: DataProto, section: ActorConfig | CriticConfig, epoch: int, *seed: int | str
) -> list[list[int]]:
    """Return the rows of this rank for every optimizer step of one epoch.

    Without a process group, as on the driver, these are all rows.
    """
    epoch_seed = derive_seed(*seed, epoch if section.shuffle else 0)
    return mini_batches(data, epoch_seed, section.ppo_mini_batch_size, section.ppo_mini_batches)


def optimizer_step(
    engine: TrainEngine,
    rows: Rows,
    row_indices: Sequence[int],
    section: ActorConfig | CriticConfig,
    loss_share: LossShare,
    names: Sequence[str],
) -> StepOutcome:
    """Accumulate the gradient of the mini-batch in micro-batches and take one optimizer step.

    ``row_indices`` are the rows of the mini-batch on this rank.

    Returns the metrics ``names``, summed over micro-batches and ranks (zero if never measured), and
    the report of the step.
    """
    limits = choose_limits(
        section.use_dynamic_bsz,
        section.ppo_micro_batch_size_per_gpu,
        section.ppo_max_token_len_per_gpu,
    )
    micro_batch_rows = cut_rows(engine, [rows.lengths[row] for row in row_indices], limits)
    passes = common_passes(micro_batch_rows)
    sums = {name: torch.zeros(()) for name in names}
    # The number of passes is equal on every rank, because a pass contains collective calls.
    for pass_index in range(passes):
        batch_indices = micro_batch_rows[pass_index] if pass_index < len(micro_batch_rows) else []
        for owner in range(engine.sequence_ranks):
            measured: dict[str, torch.Tensor] = {}
            if engine.begin_pass(owner):
                loss, measured = loss_share([row_indices[i] for i in batch_indices])
            else:
                loss = engine.module.compute_zero_loss()
            engine.backward(
                loss,
                is_last_micro_batch=(pass_index, owner) == (passes - 1, engine.sequence_ranks - 1),
            )
            for name, value in measured.items():
                sums[name] = sums[name] + value.float().cpu()
    totals = sum_over_ranks([float(value) for value in sums.values()])
    return dict(zip(names, totals, strict=True)), engine.step()


def update_metrics(
    role: str,
    engine: TrainEngine,
    records: Sequence[StepOutcome],
    forward_size: ForwardSize,
    seconds: float,
) -> dict[str, float]:
    """Return the metrics of an update: means over optimizer steps, counts of steps, time and speed.

    ``forward_size`` is the size of all passes of this rank in all epochs, ``seconds`` the time of
    this rank. The result is equal on every rank. A collective call.
    """
    # the slowest rank determines the time of the update
    seconds = max_over_ranks([seconds])[0]
    metrics = {f"{role}/{name}": mean for name, mean in _mean_metrics(records).items()}
    reports = [report for _, report in records]
    grad_norms = [report.grad_norm for report in reports if not report.skipped]
    metrics |= {
        f"{role}/grad_norm": float(np.mean(grad_norms)) if grad_norms else 0.0,
        f"{role}/lr": reports[-1].lr if reports else 0.0,
        f"{role}/optimizer_steps": float(len(reports)),
        f"{role}/skipped_steps": float(sum(report.skipped for report in reports)),
        f"{role}/zero_steps": float(sum(report.zero for report in reports)),
        f"perf/update_{role}_tokens": sum_over_ranks([forward_size.tokens])[0],
        f"perf/update_{role}_seconds": seconds,
    }
    flops = model_flops(engine.module).update(forward_size)
    return metrics | speed_metrics(role, flops, seconds, engine.dtype) | memory_metrics(role)


def _mean_metrics(records: Sequence[StepOutcome]) -> dict[str, float]:
    """Return the mean of each metric over the optimizer steps that report it."""
    values: dict[str, list[float]] = {}
    for measured, _ in records:
        for name, value in measured.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(metric_values)) for name, metric_values in values.items()}
