"""Time and memory limits for the code that an environment runs before its first episode."""

import contextlib
import resource
from collections.abc import Iterator

from agent_system.environments.env_registry import build_missing_extra_error
from verl.utils.limits import TimeLimitError, limit_memory, time_limit

MAX_SECONDS = 90.0  # for listing all tasks
MAX_GIGABYTES = 8.0  # address space of this process during that time


class TimeOrMemoryLimitError(ValueError):
    """Listing the tasks of an environment took too much time or memory."""


@contextlib.contextmanager
def limit_time_and_memory(env_name: str, operation: str) -> Iterator[None]:
    """Limit the ``with`` block to ``MAX_SECONDS`` and ``MAX_GIGABYTES`` of address space.

    Raises ``TimeOrMemoryLimitError``, in which ``operation`` names the block. If a module is
    missing, the error names the extra that installs it.
    """
    old_limits = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(MAX_GIGABYTES)
    try:
        with time_limit(MAX_SECONDS, operation):
            yield
    except TimeLimitError as error:
        raise TimeOrMemoryLimitError(
            f"{error}; fix: set keys that make fewer or smaller tasks"
        ) from error
    except ModuleNotFoundError as error:
        raise build_missing_extra_error(env_name, error) from error
    except MemoryError as error:
        raise TimeOrMemoryLimitError(
            f"{operation} needs more than {MAX_GIGABYTES:g} GB of memory; fix: set keys that make "
            "fewer or smaller tasks"
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old_limits)
