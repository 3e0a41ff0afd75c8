"""Processes that must not outlive the one that started them. Imports nothing heavy."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
OWNER = "VERL_WORKER_TREE"  # environment variable that a worker's descendants inherit
ROUNDS = 20  # of looking for descendants: one may fork while others are killed


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux; elsewhere
    nothing happens).
    """
    if sys.platform == "linux":
        # SIGKILL cannot be ignored: a worker that is stuck in native code ends as well.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that they are found (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants(pid: int, owner: str) -> None:
    """Kill every process that descends from ``pid``, also in sessions of their own (Linux): those
    below it, and those whose environment holds ``owner`` after ``pid`` has died.
    """
    for _ in range(ROUNDS):
        found = set(_below(pid)) | set(_owned(owner))
        found -= {pid, os.getpid()}
        if not found:
            return
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def _processes() -> Iterator[tuple[int, int]]:
    """Number and parent of every process that is not a zombie."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = (
                (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            )
            if state != "Z":
                yield int(folder.name), int(parent)


def _below(pid: int) -> Iterator[int]:
    parents = dict(_processes())
    for process in parents:
        above = process
        while above in parents and above != pid:
            above = parents[above]
        if above == pid:
            yield process


def _owned(owner: str) -> Iterator[int]:
    mark = f"{OWNER}={owner}\0".encode()
    for process, _ in _processes():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{process}/environ").read_bytes():
                yield process
