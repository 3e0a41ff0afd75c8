"""What a call cost: operations per second, memory, and on demand a trace of all it did."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from verl.records import ProfileOrder
from verl.utils.peaks import peak_tflops
from verl.workers.collectives import max_over_ranks, rank, sum_over_ranks, world_size


def speed_metrics(role: str, flops: float, seconds: float, dtype: str | None) -> dict[str, float]:
    """``perf/tflops/<role>``, 10^12 operations per second and device, and ``perf/mfu/<role>``,
    their share of the device's peak where that is known: on a GPU of the table, in bfloat16.

    ``flops`` of this rank, ``seconds`` of the slowest. A collective call.
    """
    per_device = sum_over_ranks([flops])[0] / world_size() / max(seconds, 1e-9) / 1e12
    found = {f"perf/tflops/{role}": per_device}
    if torch.cuda.is_available() and dtype == "bfloat16":
        peak = peak_tflops(torch.cuda.get_device_name())
        if peak is not None:
            found[f"perf/mfu/{role}"] = per_device / peak
    return found


def memory_metrics(role: str) -> dict[str, float]:
    """The largest amounts of any rank of ``role`` so far, GiB: of its process in host memory, and
    what its tensors took on its GPU and was reserved for them. A collective call.

    Names are those of the field for the actor and end in the role for others.
    """
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = {"perf/cpu_memory_used_gb": 1024.0 * peak_kib}
    if torch.cuda.is_available():
        used["perf/max_memory_allocated_gb"] = float(torch.cuda.max_memory_allocated())
        used["perf/max_memory_reserved_gb"] = float(torch.cuda.max_memory_reserved())
    largest = max_over_ranks([amount / 2**30 for amount in used.values()])
    tail = "" if role == "actor" else f"/{role}"
    return {f"{name}{tail}": value for name, value in zip(used, largest, strict=True)}


@contextlib.contextmanager
def profiled(order: ProfileOrder | None, call: str) -> Iterator[None]:
    """Trace the block where ``order`` names this rank; the file is
    ``<directory>/step<n>-<call>-rank<r>.json.gz``, which ui.perfetto.dev and chrome://tracing show.
    """
    if order is None or rank() not in order.ranks:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as trace:
        yield
    directory = Path(order.directory)
    directory.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(directory / f"step{order.step}-{call}-rank{rank()}.json.gz"))
