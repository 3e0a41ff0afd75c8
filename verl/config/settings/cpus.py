"""Number of CPUs of this process."""

import os


def available_cpus() -> int:
    """CPUs this process may run on, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
