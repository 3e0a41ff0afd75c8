"""Number of CPUs that this process may use."""

import os


def available_cpus() -> int:
    """Return the number of CPUs that this process may use, which a container can limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
