"""Calling all rollout workers of a run, from the driver or from a rank that trains."""

from collections.abc import Sequence
from typing import Any

from verl.single_controller.ray.calls import gather

SYNC_TIMEOUT_S = 600.0  # for an engine to load, to take new weights, to sleep or to wake


def call_engines(workers: Sequence[Any], method: str, *args: Any) -> list[Any]:
    """Call ``method`` of every rollout worker and wait for the answers, in order."""
    labels = [f"rollout worker {index}: {method}" for index in range(len(workers))]
    return gather(
        [getattr(worker, method).remote(*args) for worker in workers], SYNC_TIMEOUT_S, labels
    )
