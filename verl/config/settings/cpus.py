"""Number of CPUs of this process."""

import os


def available_cpus() -> int:
    """Return the number of CPUs of this process; in a container fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
