"""Calling all rollout workers of a run, from the driver or from a rank that trains."""

from collections.abc import Sequence
from typing import Any

from verl.single_controller.ray.calls import gather

SYNC_TIMEOUT_S = 600.0  # for an engine to load, to take new weights, to sleep or to wake


def call_engines(workers: Sequence[Any], method: str, *args: Any) -> list[Any]:
    """Call ``method`` of every rollout worker and wait for the answers, in order."""
    return call_each(workers, method, [args] * len(workers))


def call_each(
    workers: Sequence[Any], method: str, arguments: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """The same with ``arguments`` of its own for every worker; all are called at the same time."""
    labels = [f"rollout worker {index}: {method}" for index in range(len(workers))]
    calls = zip(workers, arguments, strict=True)
    refs = [getattr(worker, method).remote(*args) for worker, args in calls]
    return gather(refs, SYNC_TIMEOUT_S, labels)
