"""Child process that kills the driver when its heartbeats stop, and reports its sudden end.

The watchdog is a thread of the driver. It cannot act if the driver is stopped (SIGSTOP), or if
native code holds the GIL. Therefore this separate process watches the driver.

    watchdog ──one byte per second──▶ guard: without a byte for timeout_s, send SIGUSR1 (the driver
                                      writes its stacks), then SIGKILL
    driver ends ──end of the pipe───▶ guard writes that the driver ended without cleanup, and ends

The driver cannot report its end if the kernel kills it. Ray's native code exits the driver with
status 1 if Ray's node process (raylet) has ended, for example after a SIGTERM to all processes.

The guard process imports none of this project's packages.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

POLL_S = 1.0  # maximum wait for one heartbeat
STACKS_WAIT_S = 2.0  # time in which the driver can write its stacks before it is killed


class DriverGuard:
    """Owner of a guard process, which kills this process after ``timeout_s`` without heartbeat."""

    def __init__(self, timeout_s: float) -> None:
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), f"{timeout_s:g}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        # Make the pipe non-blocking: a heartbeat must not wait for a guard that is stopped.
        os.set_blocking(self._pipe.fileno(), False)

    def send_heartbeat(self) -> None:
        """Send a heartbeat to the guard process. Do nothing if it has ended or is stopped."""
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._pipe.fileno(), b".")

    def close(self) -> None:
        """End the guard process. This process is not killed."""
        self._process.kill()  # before the pipe is closed, which the guard would report
        self._process.wait()
        self._pipe.close()


def watch_driver(driver_pid: int, timeout_s: float) -> None:
    """Read heartbeats from standard input. Kill ``driver_pid`` after ``timeout_s`` without any.

    If the driver ends before, write a message to standard error.
    """
    silence_s = 0.0  # seconds since the last heartbeat
    while silence_s < timeout_s:
        readable_files, _, _ = select.select([sys.stdin.fileno()], [], [], POLL_S)
        if readable_files and not os.read(sys.stdin.fileno(), 4096):
            with contextlib.suppress(OSError):  # a closed terminal
                sys.stderr.write(
                    f"the driver (process {driver_pid}) ended without cleanup, for example because "
                    "the kernel killed it for lack of memory, or because Ray's raylet or GCS "
                    "ended; the same command continues from the newest checkpoint if there is one\n"
                )
            return
        # Add the seconds of waiting instead of reading a clock: Ctrl-Z also stops this process, and
        # a clock would count the time for which driver and guard are stopped.
        silence_s = 0.0 if readable_files else silence_s + POLL_S
    # If the driver has ended, its process id may belong to another process. Do not kill that one.
    if os.getppid() != driver_pid:
        return
    sys.stderr.write(
        f"Stalled: the driver (process {driver_pid}) has sent no heartbeat for "
        f"{silence_s:.0f} s: it is stopped, or native code holds the GIL; it is killed\n"
    )
    sys.stderr.flush()
    os.kill(driver_pid, signal.SIGUSR1)
    time.sleep(STACKS_WAIT_S)
    os.kill(driver_pid, signal.SIGKILL)


if __name__ == "__main__":
    # Ignore Ctrl-C, the end of the terminal and SIGTERM of a scheduler: the driver handles them.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch_driver(int(sys.argv[1]), float(sys.argv[2]))
