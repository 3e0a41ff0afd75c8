"""Waiting for Ray results with a deadline, and with errors that name the actor and the call."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from verl.single_controller.base.worker_group import (
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from verl.utils.waits import waiting_for

logger = logging.getLogger(__name__)

# Time to wait for failures of other ranks after one rank fails. A rank that loses its peer in a
# collective often fails before Ray notices that the peer's process has ended, which is the cause.
_CAUSE_GRACE_S = 5.0
# Time to wait for further results after the first one. ray.wait checks all pending references, so
# one call per result would be quadratic in the number of ranks.
_FURTHER_RESULTS_S = 0.05


def ray_get(ref: ray.ObjectRef, timeout_s: float, label: str) -> Any:
    """Return the value of one reference; ``label`` names it in errors."""
    return gather_results([ref], timeout_s, [label])[0]


def gather_results(refs: Sequence[Any], timeout_s: float, labels: Sequence[str]) -> list[Any]:
    """Return the values of ``refs`` in order, or raise the first failure as soon as it occurs.

    Raises ``WorkerTimeoutError`` with the labels that are pending after ``timeout_s`` seconds, and
    ``WorkerDiedError`` if a process has ended. An exception of the remote method is raised with a
    note that names the label.
    """
    deadline = time.monotonic() + timeout_s
    label_of = dict(zip(refs, labels, strict=True))
    values: dict[Any, Any] = {}
    pending = list(label_of)
    with waiting_for(labels) as pending_labels:
        while pending:
            ready_refs, pending = _wait_for_some(pending, max(0.0, deadline - time.monotonic()))
            pending_labels[:] = [label_of[ref] for ref in pending]
            if not ready_refs:
                raise WorkerTimeoutError(
                    f"no answer after {timeout_s:g} s from: {', '.join(pending_labels)}"
                )
            _fetch_or_raise(ready_refs, pending, label_of, deadline, values)
    return [values[ref] for ref in refs]


def _fetch_or_raise(
    ready: list[Any],
    pending: list[Any],
    label_of: dict[Any, str],
    deadline: float,
    values: dict[Any, Any],
) -> None:
    """Put the values of the finished references into ``values``, or raise the first error."""
    for ref in ready:
        error = _fetch_value(ref, label_of[ref], max(0.0, deadline - time.monotonic()), values)
        if error is not None:
            raise _find_root_cause(error, pending, label_of)


def _wait_for_some(pending: list[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
    """Wait for at least one of ``pending`` or ``timeout_s``; return (finished, not finished)."""
    first_ready, unfinished = ray.wait(pending, num_returns=1, timeout=timeout_s)
    if not first_ready or not unfinished:
        return first_ready, unfinished
    more_ready, unfinished = ray.wait(
        unfinished, num_returns=len(unfinished), timeout=_FURTHER_RESULTS_S
    )
    return [*first_ready, *more_ready], unfinished


def _fetch_value(
    ref: ray.ObjectRef, label: str, timeout_s: float, values: dict[Any, Any]
) -> Exception | None:
    """Put the value of a finished reference into ``values``, or return its error."""
    try:
        # The value exists. Allow 5 s for its transfer even if the deadline has passed.
        values[ref] = ray.get(ref, timeout=max(5.0, timeout_s))
    except GetTimeoutError:
        return WorkerTimeoutError(
            f"the result could not be transferred in {timeout_s:g} s from: {label}"
        )
    except RayTaskError as error:
        error.add_note(f"raised in {label}")
        return error
    except (RayActorError, WorkerCrashedError, ObjectLostError) as error:
        return _chain_error(
            WorkerDiedError(f"the process is gone: {label}: {_join_first_lines(error)}"), error
        )
    except RayError as error:
        return _chain_error(
            WorkerError(f"{type(error).__name__} in {label}: {_join_first_lines(error)}"), error
        )
    return None


def _find_root_cause(error: Exception, pending: list[Any], label_of: dict[Any, str]) -> Exception:
    if isinstance(error, WorkerDiedError) or not pending:
        return error
    ready_refs, _ = ray.wait(pending, num_returns=len(pending), timeout=_CAUSE_GRACE_S)
    other_errors = [_fetch_value(ref, label_of[ref], 0.0, {}) for ref in ready_refs]
    return next((cause for cause in other_errors if isinstance(cause, WorkerDiedError)), error)


def _chain_error(error: WorkerError, cause: Exception) -> WorkerError:
    error.__cause__ = cause
    return error


def _join_first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:8])
