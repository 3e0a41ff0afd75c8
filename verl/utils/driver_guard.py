"""Child process that kills the driver when its heartbeats stop.

The watchdog is a thread of the driver. It stops as well if the driver is stopped (SIGSTOP), or if
native code holds the GIL.

    watchdog ──one byte per second──▶ guard: no byte for silent_s? SIGUSR1 for stacks, then SIGKILL
    driver ends ──end of the pipe───▶ guard ends

The guard process imports none of this project's packages.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

POLL_S = 1.0
STACKS_WAIT_S = 2.0  # time for the driver to write its stacks


class DriverGuard:
    """Handle of a guard process, which kills this process after ``silent_s`` without heartbeat."""

    def __init__(self, silent_s: float) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), f"{silent_s:g}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        # Non-blocking: a heartbeat must not wait for a guard that is stopped.
        os.set_blocking(self._pipe.fileno(), False)

    def send_heartbeat(self) -> None:
        """Send a heartbeat to the guard process. Does nothing if it has ended or is stopped."""
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._pipe.fileno(), b".")

    def close(self) -> None:
        """End the guard process, without any effect on this process."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def watch_driver(driver: int, silent_s: float) -> None:
    """Read heartbeats of the process ``driver`` from standard input, and kill it when they stop."""
    silent = 0.0
    while silent < silent_s:
        readable_files, _, _ = select.select([sys.stdin.fileno()], [], [], POLL_S)
        if readable_files and not os.read(sys.stdin.fileno(), 4096):
            return
        # Count seconds of waiting instead of reading a clock: Ctrl-Z stops this process as well.
        silent = 0.0 if readable_files else silent + POLL_S
    # If the driver has ended, another process may have its number.
    if os.getppid() != driver:
        return
    sys.stderr.write(
        f"Stalled: the driver (process {driver}) has sent no heartbeat for {silent:.0f} s: it is "
        "stopped, or native code holds the GIL; it is killed\n"
    )
    sys.stderr.flush()
    os.kill(driver, signal.SIGUSR1)
    time.sleep(STACKS_WAIT_S)
    os.kill(driver, signal.SIGKILL)


if __name__ == "__main__":
    # Only the driver handles Ctrl-C of the terminal and SIGTERM of a scheduler.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch_driver(int(sys.argv[1]), float(sys.argv[2]))
