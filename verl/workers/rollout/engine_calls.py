"""Calls to all rollout workers of a run, from the driver or from a training rank."""

from collections.abc import Sequence
from typing import Any

from verl.single_controller.ray.calls import gather_results

SYNC_TIMEOUT_S = 600.0  # for loading an engine, a weight update, sleep or wake


def call_engines(workers: Sequence[Any], method: str, *args: Any) -> list[Any]:
    """Call ``method`` of every rollout worker at the same time and return the results in order."""
    return call_each(workers, method, [args] * len(workers))


def call_each(
    workers: Sequence[Any], method: str, arguments: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Call ``method`` of every rollout worker at the same time, each with its ``arguments``.

    Returns the results in order.
    """
    labels = [f"rollout worker {index}: {method}" for index in range(len(workers))]
    calls = zip(workers, arguments, strict=True)
    refs = [getattr(worker, method).remote(*args) for worker, args in calls]
    return gather_results(refs, SYNC_TIMEOUT_S, labels)
