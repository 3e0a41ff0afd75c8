"""Bounds of what an environment may take before its first episode."""

import contextlib
import resource
from collections.abc import Iterator

from verl.utils.limits import TimeLimit, limit_memory, time_limit

SECONDS = 90.0
GIGABYTES = 8.0


class OutOfLimits(ValueError):
    """An environment took too long, or too much memory, to say what its tasks are."""


@contextlib.contextmanager
def within_limits(what: str) -> Iterator[None]:
    """Bound the time and the address space of the block. Raises ``OutOfLimits``."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(GIGABYTES)
    try:
        with time_limit(SECONDS, what):
            yield
    except TimeLimit as error:
        raise OutOfLimits(f"{error}; fix: keys that make fewer or smaller tasks") from error
    except MemoryError as error:
        raise OutOfLimits(
            f"{what} asked for more than {GIGABYTES:g} GB; fix: keys that make fewer or smaller "
            "tasks"
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
