"""Functions that wait for Ray results with a deadline. Their errors name the actor and the call."""

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
from verl.utils.waits import mark_as_awaited

logger = logging.getLogger(__name__)

# Seconds to wait for failures of other ranks after one rank fails. If a process dies, the other
# ranks of its collective often fail before Ray reports the death, which is the root cause. The
# report is late on a loaded machine.
_ROOT_CAUSE_WAIT_S = 10.0
# Seconds to wait for further results after the first one. ray.wait checks all pending references,
# so a call of ray.wait per result would take quadratic time in the number of ranks.
_FURTHER_RESULTS_WAIT_S = 0.05


def ray_get(ref: ray.ObjectRef, timeout_s: float, label: str) -> Any:
    """Return the value of the Ray reference ``ref``, or raise the errors of ``gather_results``."""
    return gather_results([ref], timeout_s, [label])[0]


def gather_results(refs: Sequence[Any], timeout_s: float, labels: Sequence[str]) -> list[Any]:
    """Return the values of ``refs`` in order, or raise the first failure as soon as it occurs.

    ``labels`` name the references in errors. Raises ``WorkerTimeoutError`` if results are missing
    after ``timeout_s`` seconds, and ``WorkerDiedError`` if a process has ended. An exception of the
    remote method is raised with a note that contains the label.
    """
    deadline = time.monotonic() + timeout_s
    label_by_ref = dict(zip(refs, labels, strict=True))
    value_by_ref: dict[Any, Any] = {}
    pending_refs = list(label_by_ref)
    with mark_as_awaited(labels) as pending_labels:
        while pending_refs:
            finished_refs, pending_refs = _wait_for_some(
                pending_refs, max(0.0, deadline - time.monotonic())
            )
            pending_labels[:] = [label_by_ref[ref] for ref in pending_refs]
            if not finished_refs:
                raise WorkerTimeoutError(
                    f"no answer after {timeout_s:g} s from: {', '.join(pending_labels)}"
                )
            _fetch_or_raise(finished_refs, pending_refs, label_by_ref, deadline, value_by_ref)
    return [value_by_ref[ref] for ref in refs]


def _fetch_or_raise(
    finished_refs: list[Any],
    pending_refs: list[Any],
    label_by_ref: dict[Any, str],
    deadline: float,
    value_by_ref: dict[Any, Any],
) -> None:
    """Put the values of the finished references into ``value_by_ref``, or raise the first error."""
    for index, ref in enumerate(finished_refs):
        error = _fetch_value(
            ref, label_by_ref[ref], max(0.0, deadline - time.monotonic()), value_by_ref
        )
        if error is not None:
            other_refs = [*finished_refs[index + 1 :], *pending_refs]
            raise _find_root_cause(error, other_refs, label_by_ref)


def _wait_for_some(pending_refs: list[Any], timeout_s: float) -> tuple[list[Any], list[Any]]:
    """Wait until a reference is finished, and return the finished references and the others."""
    first_finished_refs, unfinished_refs = ray.wait(pending_refs, num_returns=1, timeout=timeout_s)
    if not first_finished_refs or not unfinished_refs:
        return first_finished_refs, unfinished_refs
    further_finished_refs, unfinished_refs = ray.wait(
        unfinished_refs, num_returns=len(unfinished_refs), timeout=_FURTHER_RESULTS_WAIT_S
    )
    return [*first_finished_refs, *further_finished_refs], unfinished_refs


def _fetch_value(
    ref: ray.ObjectRef, label: str, timeout_s: float, value_by_ref: dict[Any, Any]
) -> Exception | None:
    """Put the value of a finished reference into ``value_by_ref``, or return its error."""
    try:
        # The value has been computed. Allow 5 s for its transfer even if the deadline has passed.
        value_by_ref[ref] = ray.get(ref, timeout=max(5.0, timeout_s))
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


def _find_root_cause(
    error: Exception, other_refs: list[Any], label_by_ref: dict[Any, str]
) -> Exception:
    """Return the ``WorkerDiedError`` among the errors of ``other_refs``, else ``error``."""
    deadline = time.monotonic() + _ROOT_CAUSE_WAIT_S
    while other_refs and not isinstance(error, WorkerDiedError):
        finished_refs, other_refs = _wait_for_some(
            other_refs, max(0.0, deadline - time.monotonic())
        )
        if not finished_refs:
            break
        other_errors = [_fetch_value(ref, label_by_ref[ref], 0.0, {}) for ref in finished_refs]
        error = next(
            (candidate for candidate in other_errors if isinstance(candidate, WorkerDiedError)),
            error,
        )
    return error


def _chain_error(error: WorkerError, cause: Exception) -> WorkerError:
    error.__cause__ = cause
    return error


def _join_first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:8])
