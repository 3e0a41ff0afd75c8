"""Whoever ends a driver that cannot end itself: one that is stopped, or whose native code keeps
Python's lock, has a watchdog that stands still with it.

    watchdog ──a byte at every look──▶ guard: silent for too long? SIGUSR1 for stacks, then SIGKILL
    driver ends ──end of the pipe────▶ guard ends

The guard is a process of its own that imports nothing of the packages.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

LOOK_S = 1.0
ANSWER_S = 2.0  # for the driver to write its stacks, where it can


class Guard:
    """Ends this process once ``beat`` was not called for ``silent_s``."""

    def __init__(self, silent_s: float) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), f"{silent_s:g}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        # Whoever beats must not wait for a guard that is stopped.
        os.set_blocking(self._pipe.fileno(), False)

    def beat(self) -> None:
        """All is well."""
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._pipe.fileno(), b".")

    def close(self) -> None:
        """End the guard; nobody is watched any more."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def watch(driver: int, silent_s: float) -> None:
    """Read beats of the process ``driver`` from standard input until its end, or end it."""
    silent = 0.0
    while silent < silent_s:
        ready, _, _ = select.select([sys.stdin.fileno()], [], [], LOOK_S)
        if ready and not os.read(sys.stdin.fileno(), 4096):
            return
        # Looks, not the clock: who was stopped together with the driver (Ctrl-Z) missed nothing.
        silent = 0.0 if ready else silent + LOOK_S
    # Another process may have its number by now.
    if os.getppid() != driver:
        return
    sys.stderr.write(
        f"Stalled: the driver (process {driver}) stands still, and its watchdog with it, since "
        f"{silent:.0f} s: stopped, or in native code that keeps Python's lock; it is killed\n"
    )
    sys.stderr.flush()
    os.kill(driver, signal.SIGUSR1)
    time.sleep(ANSWER_S)
    os.kill(driver, signal.SIGKILL)


if __name__ == "__main__":
    # The terminal's Ctrl-C and a scheduler's SIGTERM are the driver's to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch(int(sys.argv[1]), float(sys.argv[2]))
