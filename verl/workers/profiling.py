"""Metrics of speed and memory, and profiler traces of single calls."""

import contextlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from verl.records import ProfileRequest
from verl.workers.collectives import get_rank, max_over_ranks, sum_over_ranks, world_size


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


@contextlib.contextmanager
def trace_call(profile_request: ProfileRequest | None, call: str) -> Iterator[None]:
    """Trace the ``with`` block by the PyTorch profiler if ``profile_request`` lists this rank.

    The file is ``<directory>/step<n>-<call>-rank<r>.json.gz``, for ui.perfetto.dev or
    chrome://tracing.
    """
    if profile_request is None or get_rank() not in profile_request.ranks:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as trace:
        yield
    directory = Path(profile_request.directory)
    directory.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(
        str(directory / f"step{profile_request.step}-{call}-rank{get_rank()}.json.gz")
    )


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


def find_peak_tflops(device: str) -> float | None:
    """Return the peak in TFLOP/s of the device name ``device``; None if it is not listed."""
    peaks = (peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device))
    return next(peaks, None)
