"""Update loop of actor and critic: epochs, mini-batches, micro-batches, and metrics of an update.

The gradient of a mini-batch does not depend on its split into micro-batches and ranks.
"""

import re
import resource
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from verl.config.schema.actor_rollout_ref import ActorConfig
from verl.config.schema.critic import CriticConfig
from verl.models.flops import ForwardSize, count_model_weights
from verl.protocol import DataProto
from verl.utils.seeds import derive_seed
from verl.workers.collectives import max_over_ranks, sum_over_ranks, world_size
from verl.workers.engine import StepReport, TrainEngine
from verl.workers.mini_batches import (
    count_max_passes_of_ranks,
    make_mini_batches,
    split_into_micro_batches,
)
from verl.workers.rows import Rows, choose_micro_batch_limits

# Function of the row indices of a micro-batch. It returns the micro-batch's part of the mini-batch
# loss, and metrics. Both are summed over micro-batches and ranks. Without rows the loss is zero.
MicroBatchLoss = Callable[[list[int]], tuple[torch.Tensor, dict[str, torch.Tensor]]]
# Metrics of one optimizer step, and its report (gradient norm, skipped or not).
StepOutcome = tuple[dict[str, float], StepReport]
# Peak of dense bfloat16 products with float32 accumulation, in TFLOP/s. The entry of a device is
# the first one whose key occurs as a word in the device name.
PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "GH200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A10": 125.0,
    "A10G": 70.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
    "MI300X": 1307.0,
}


def plan_mini_batches(
    data: DataProto, section: ActorConfig | CriticConfig, *seed: int | str
) -> Iterator[list[int]]:
    """Yield the rows of this rank for every optimizer step of an update, epoch by epoch."""
    for epoch in range(section.ppo_epochs):
        yield from epoch_mini_batches(data, section, epoch, *seed)


def epoch_mini_batches(
    data: DataProto, section: ActorConfig | CriticConfig, epoch: int, *seed: int | str
) -> list[list[int]]:
    """Return the rows of this rank for every optimizer step of one epoch.

    Without ``section.shuffle`` all epochs have the same mini-batches.
    """
    epoch_seed = derive_seed(*seed, epoch if section.shuffle else 0)
    return make_mini_batches(
        data, epoch_seed, section.ppo_mini_batch_size, section.ppo_mini_batches
    )


def optimizer_step(
    engine: TrainEngine,
    rows: Rows,
    row_indices: Sequence[int],
    section: ActorConfig | CriticConfig,
    compute_loss: MicroBatchLoss,
    metric_names: Sequence[str],
) -> StepOutcome:
    """Accumulate the gradient of the mini-batch in micro-batches and take one optimizer step.

    Returns the metrics ``metric_names``, summed over micro-batches and ranks (zero if never
    measured), and the report of the step.
    """
    limits = choose_micro_batch_limits(
        section.use_dynamic_bsz,
        section.ppo_micro_batch_size_per_gpu,
        section.ppo_max_token_len_per_gpu,
    )
    lengths = [rows.lengths[row] for row in row_indices]
    tokens = [rows.tokens[row] for row in row_indices]
    micro_batch_rows, rows.prefix_tree = split_into_micro_batches(engine, lengths, limits, tokens)
    num_passes = count_max_passes_of_ranks(micro_batch_rows)
    metric_sums = {name: torch.zeros(()) for name in metric_names}
    # The number of passes is equal on every rank, because a pass contains collective calls.
    for pass_index in range(num_passes):
        positions_in_mini_batch = (
            micro_batch_rows[pass_index] if pass_index < len(micro_batch_rows) else []
        )
        for owner_rank in range(engine.sequence_ranks):
            micro_batch_metrics: dict[str, torch.Tensor] = {}
            if engine.begin_pass_for_rank(owner_rank):
                loss, micro_batch_metrics = compute_loss(
                    [row_indices[i] for i in positions_in_mini_batch]
                )
            else:
                loss = engine.module.compute_zero_loss()
            engine.backward(
                loss,
                is_last_micro_batch=(pass_index, owner_rank)
                == (num_passes - 1, engine.sequence_ranks - 1),
            )
            for name, value in micro_batch_metrics.items():
                metric_sums[name] = metric_sums[name] + value.float().cpu()
    metric_totals = sum_over_ranks([float(value) for value in metric_sums.values()])
    return dict(zip(metric_names, metric_totals, strict=True)), engine.step()


def compute_update_metrics(
    role: str,
    engine: TrainEngine,
    outcomes: Sequence[StepOutcome],
    forward_size: ForwardSize,
    seconds: float,
) -> dict[str, float]:
    """Return the metrics of an update: means over optimizer steps, counts of steps, time and speed.

    ``forward_size`` and ``seconds`` are those of this rank. A collective call.
    """
    # The slowest rank determines the time of the update.
    seconds = max_over_ranks([seconds])[0]
    metrics = {f"{role}/{name}": mean for name, mean in _mean_metrics(outcomes).items()}
    reports = [report for _, report in outcomes]
    grad_norms = [report.grad_norm for report in reports if not report.is_skipped]
    metrics |= {
        f"{role}/grad_norm": float(np.mean(grad_norms)) if grad_norms else 0.0,
        f"{role}/lr": reports[-1].lr if reports else 0.0,
        f"{role}/optimizer_steps": float(len(reports)),
        f"{role}/skipped_steps": float(sum(report.is_skipped for report in reports)),
        f"{role}/zero_steps": float(sum(report.has_zero_gradient for report in reports)),
        f"perf/update_{role}_tokens": sum_over_ranks([forward_size.sequence_tokens])[0],
        f"perf/update_{role}_seconds": seconds,
    }
    metrics |= prefix_tree_metrics(role, forward_size)
    flops = count_model_weights(engine.module).compute_update_flops(forward_size)
    return metrics | speed_metrics(role, flops, seconds, engine.dtype) | memory_metrics(role)


def prefix_tree_metrics(role: str, forward_size: ForwardSize) -> dict[str, float]:
    """Return ``perf/tree_token_ratio``: tokens of all sequences over computed tokens.

    It is above 1 if sequences share prefixes. The result is empty without passes. A collective
    call.
    """
    num_sequence_tokens, num_computed_tokens = sum_over_ranks(
        [forward_size.sequence_tokens, forward_size.tokens]
    )
    name_suffix = "" if role == "actor" else f"/{role}"
    return (
        {f"perf/tree_token_ratio{name_suffix}": num_sequence_tokens / num_computed_tokens}
        if num_computed_tokens
        else {}
    )


def speed_metrics(role: str, flops: float, seconds: float, dtype: str | None) -> dict[str, float]:
    """Return ``perf/tflops/<role>`` and, if the peak of the device is known, ``perf/mfu/<role>``.

    The first is in 10^12 operations per second and device, the second is this value divided by the
    peak. ``flops`` are those of this rank, ``seconds`` the time of the slowest rank. A collective
    call.
    """
    tflops_per_device = sum_over_ranks([flops])[0] / world_size() / max(seconds, 1e-9) / 1e12
    metrics = {f"perf/tflops/{role}": tflops_per_device}
    if torch.cuda.is_available() and dtype == "bfloat16":
        peak_tflops = find_peak_tflops(torch.cuda.get_device_name())
        if peak_tflops is not None:
            metrics[f"perf/mfu/{role}"] = tflops_per_device / peak_tflops
    return metrics


def memory_metrics(role: str) -> dict[str, float]:
    """Return the peak memory of any rank of ``role`` so far, in GiB. A collective call."""
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = {"perf/cpu_memory_used_gb": 1024.0 * peak_kib}
    if torch.cuda.is_available():
        peak_bytes["perf/max_memory_allocated_gb"] = float(torch.cuda.max_memory_allocated())
        peak_bytes["perf/max_memory_reserved_gb"] = float(torch.cuda.max_memory_reserved())
    max_gib = max_over_ranks([num_bytes / 2**30 for num_bytes in peak_bytes.values()])
    name_suffix = "" if role == "actor" else f"/{role}"
    return {f"{name}{name_suffix}": value for name, value in zip(peak_bytes, max_gib, strict=True)}


def find_peak_tflops(device: str) -> float | None:
    """Return the peak in TFLOP/s of the device name ``device``; None if it is not listed."""
    peaks = (peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device))
    return next(peaks, None)


def _mean_metrics(outcomes: Sequence[StepOutcome]) -> dict[str, float]:
    """Return the mean of each metric over the optimizer steps that report it."""
    values_by_metric: dict[str, list[float]] = {}
    for step_metrics, _ in outcomes:
        for name, value in step_metrics.items():
            values_by_metric.setdefault(name, []).append(value)
    return {name: float(np.mean(metric_values)) for name, metric_values in values_by_metric.items()}
