"""Functions that end child processes when their parent ends, and settings of threads.

This module imports no torch.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable

import psutil

from verl.config.settings.cpus import available_cpus

MEMORY_ARENAS = 2  # memory pools of glibc's malloc in a process
ARENAS_VARIABLE = "MALLOC_ARENA_MAX"  # environment variable that glibc reads at the start
M_ARENA_MAX = -8  # parameter of glibc's mallopt
PR_SET_PDEATHSIG = 1  # options of the system call prctl
PR_SET_CHILD_SUBREAPER = 36
OWNER_VARIABLE = "VERL_WORKER_TREE"  # environment variable that a worker's descendants inherit
# Maximum number of searches for descendants. They are repeated, because a process may fork while
# other processes are killed.
MAX_SEARCHES = 20
POLL_S = 0.05  # seconds between two checks if processes have ended


def die_with_parent(signal_number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel for a signal when the thread that started this process ends (Linux only).

    The default, SIGKILL, also ends a process that hangs in native code.
    """
    _call_prctl(PR_SET_PDEATHSIG, signal_number)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process (Linux only).

    ``kill_descendants`` can then find them.
    """
    _call_prctl(PR_SET_CHILD_SUBREAPER, 1)


def _call_prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def kill_descendants(pid: int, owner: str) -> None:
    """Kill every descendant of the process ``pid``, also in other sessions (Linux only).

    If ``pid`` has already ended, its descendants are found by the environment variable
    ``VERL_WORKER_TREE=<owner>``, which they have inherited.
    """
    for _ in range(MAX_SEARCHES):
        descendants = _find_descendants(pid, owner)
        if not descendants:
            return
        for process in descendants:
            with contextlib.suppress(psutil.Error):
                process.kill()


def wait_and_kill(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until ``processes`` have ended. After ``timeout_s``, kill and return those that run."""
    running_processes = list(processes)
    deadline = time.monotonic() + timeout_s
    while running_processes := [process for process in running_processes if is_running(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    for process in running_processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return running_processes


def is_running(process: psutil.Process) -> bool:
    """Return False if ``process`` has ended, even if its parent has not read its exit status."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def find_processes_by_variable(name: str, value: str) -> list[psutil.Process]:
    """Return all other processes that were started with the environment variable ``name=value``."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            if process.pid != os.getpid() and process.environ().get(name) == value:
                processes.append(process)
    return processes


def _find_descendants(pid: int, owner: str) -> list[psutil.Process]:
    descendants = set(find_processes_by_variable(OWNER_VARIABLE, owner))
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants.update(psutil.Process(pid).children(recursive=True))
    # A killed child remains a zombie while its parent is stopped.
    excluded_pids = (pid, os.getpid())
    return [
        process
        for process in descendants
        if process.pid not in excluded_pids and is_running(process)
    ]


# ---- threads of a process ----------------------------------------------------------------------


def make_openmp_threads_sleep() -> None:
    """Make OpenMP threads sleep while they wait for each other, instead of spinning.

    It must be called before torch is imported. A spinning thread occupies a core that another
    thread needs. Example: on two cores with one other busy process, an update ran at 1,500 tokens/s
    with spinning and at 10,800 with sleeping. An existing ``OMP_WAIT_POLICY`` is kept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def limit_memory_arenas() -> None:
    """Make all threads of this process and of its children share two memory arenas (glibc only).

    glibc gives each new thread a separate arena, and memory freed there stays in the process. Each
    checkpoint is written by a new thread. Example: 31 checkpoints of 0.4 million parameters took 19
    MiB, and 2 MiB with two arenas. An existing ``MALLOC_ARENA_MAX`` is kept.
    """
    if ARENAS_VARIABLE not in os.environ:
        os.environ[ARENAS_VARIABLE] = str(MEMORY_ARENAS)
        with contextlib.suppress(AttributeError, OSError):  # another C library
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, MEMORY_ARENAS)


def count_threads_per_process(num_processes: int) -> int:
    """Return the number of threads per process if ``num_processes`` share the CPUs; at least 1."""
    return max(1, available_cpus() // num_processes)
