"""Processes that must not outlive the one that started them. Imports nothing heavy."""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux; elsewhere
    nothing happens).
    """
    if sys.platform == "linux":
        # SIGKILL cannot be ignored: a worker that is stuck in native code ends as well.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
