"""Worker processes of the pool: start one, call it with a deadline, kill it with its children."""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_system.environments.env import EnvFailure, FailureKind, Observation, WorkerStartError
from agent_system.environments.pool import wire as wire
from verl.utils.processes import OWNER_VARIABLE, kill_descendants

logger = logging.getLogger(__name__)
REPOSITORY_ROOT = str(Path(__file__).resolve().parents[3])
ERROR_KINDS = ("error", "garbage", "timeout")  # kinds of errors that a worker reports
# Seconds to wait until a killed process has exited and was reaped.
REAP_TIMEOUT_S = 5.0
# Seconds that a worker may take to close its environments after the exit message.
EXIT_TIMEOUT_S = 2.0
MAX_OUTPUT_BYTES = 2**20  # bytes: a larger output file of a worker is emptied before the next call


@dataclass(slots=True)
class _PendingCall:
    future: asyncio.Future[dict[str, Any]]
    timeout_s: float
    method: str
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class ProcessSlot:
    """Slot of the pool: one environment of a worker process."""

    worker: "WorkerProcess"
    index: int  # number of the environment in the worker

    @property
    def is_alive(self) -> bool:
        return self.worker.is_alive

    @property
    def open_sessions(self) -> Counter[str | None]:
        """Number of open sessions of the worker by group (uid of repeated tasks)."""
        return self.worker.open_sessions

    async def call(self, method: str, args: dict[str, Any], timeout_s: float) -> Any:
        """Call ``reset`` or ``step`` and return the unpacked result. Raises ``EnvFailure``."""
        reply = await self.worker.call({"op": method, "slot": self.index, **args}, timeout_s)
        if "error" in reply:
            raise EnvFailure(reply["error"], reply["detail"])
        if method == "reset":
            return Observation(*reply["ok"])
        observation, reward, done, info = reply["ok"]
        return Observation(*observation), reward, done, info


class WorkerProcess(asyncio.Protocol):
    """One worker process and its socket.

    A worker with blocking environments answers calls in order. The deadline of a call therefore
    starts when the call becomes the oldest unanswered one. ``on_death`` is called once if the
    process dies, hangs or sends an invalid message, after all pending calls have failed.
    """

    def __init__(
        self,
        env_import_path: str,
        section: dict[str, Any],
        on_death: Callable[["WorkerProcess", str], None],
    ) -> None:
        self.env_import_path = env_import_path
        self.section = section
        self.on_death = on_death
        self.is_alive = False
        self.is_closing = False
        self.is_async = False
        self._process_tree_id = uuid.uuid4().hex
        self.open_sessions: Counter[str | None] = Counter()  # by group
        self.start_duration_s = 0.0
        self._pending_calls: dict[int, _PendingCall] = {}
        self._last_call_id = 0
        self._unparsed_bytes = bytearray()
        self._hello_future: asyncio.Future[dict[str, Any]] | None = None
        self._connection_closed = asyncio.Event()
        self._process: subprocess.Popen | None = None
        self._transport: asyncio.Transport | None = None
        self._output_file = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the worker
        # Append mode: after the file is emptied, the process writes at its new end.
        fcntl.fcntl(self._output_file, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)

    @property
    def process_id(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, timeout_s: float) -> "WorkerProcess":
        """Start the process and its first environment. Raises ``WorkerStartError``."""
        loop = asyncio.get_running_loop()
        start_s = time.perf_counter()
        hello_future: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._hello_future = hello_future
        parent_socket = self._start_process()
        start_message = {
            "target": self.env_import_path,
            "section": self.section,
            "sys_path": sys.path,
        }
        try:
            self._transport, _ = await loop.create_connection(lambda: self, sock=parent_socket)
            self._transport.write(wire.encode(start_message))
            first_message = await asyncio.wait_for(hello_future, timeout_s)
            if "hello" not in first_message:
                raise WorkerStartError(
                    f"{first_message['failed']}{self._read_last_output()}",
                    first_message.get("missing"),
                )
        except TimeoutError:
            raise WorkerStartError(
                f"the environment worker was not ready after {timeout_s:g} s"
                f"{self._read_last_output()}"
            ) from None
        finally:
            has_answered = hello_future.done() and not hello_future.cancelled()
            if not has_answered or "hello" not in hello_future.result():
                self._kill("dead", "it did not start")
        self.is_alive = True
        self.is_async = bool(first_message["asynchronous"])
        self.start_duration_s = time.perf_counter() - start_s
        return self

    def _start_process(self) -> socket.socket:
        """Start the process and return this process's end of the socket."""
        parent_socket, worker_socket = socket.socketpair()
        parent_socket.setblocking(False)
        # Make this package importable in every working directory.
        paths = [REPOSITORY_ROOT, os.environ.get("PYTHONPATH")]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # Many workers share the cores, so each numpy gets one thread.
        environ.setdefault("OMP_NUM_THREADS", "1")
        # Some libraries draw from sets of strings. A common hash seed gives equal draws in all
        # workers.
        environ.setdefault("PYTHONHASHSEED", "0")
        environ[OWNER_VARIABLE] = self._process_tree_id
        module = f"{__package__}.worker"
        with worker_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(worker_socket.fileno()), str(os.getpid())],
                pass_fds=[worker_socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output_file,
                stderr=self._output_file,
                env=environ,
                start_new_session=True,  # a process group, so that child processes can be killed
            )
        return parent_socket

    async def call(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send ``message`` and await its reply. Raises ``EnvFailure`` if the worker fails."""
        if not self.is_alive or self._transport is None:
            raise EnvFailure("dead", "the environment worker of this session is gone")
        self._truncate_output()
        self._last_call_id += 1
        line = wire.encode({**message, "id": self._last_call_id})
        call = _PendingCall(asyncio.get_running_loop().create_future(), timeout_s, message["op"])
        self._pending_calls[self._last_call_id] = call
        self._transport.write(line)
        self._start_timers()
        return await call.future

    async def close(self) -> None:
        """Send the exit message, then kill the process and its children if they still run."""
        self.is_closing = True
        self.is_alive = False
        if self._transport is not None and not self._connection_closed.is_set():
            self._transport.write(wire.encode({"op": "exit"}))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._connection_closed.wait(), EXIT_TIMEOUT_S)
        self._kill("dead", "the pool is closed")
        await self.wait_for_exit()

    async def wait_for_exit(self) -> None:
        """Wait until the killed process has left the process table."""
        deadline = time.monotonic() + REAP_TIMEOUT_S
        while self._process is not None and self._process.poll() is None:
            if time.monotonic() > deadline:
                logger.error(
                    "environment worker %s did not exit within %g s",
                    self.process_id,
                    REAP_TIMEOUT_S,
                )
                return
            await asyncio.sleep(0.005)
        self._output_file.close()

    # ---- asyncio.Protocol ----

    def data_received(self, data: bytes) -> None:
        """Split ``data`` into lines and complete the pending call of each reply."""
        self._unparsed_bytes += data
        if b"\n" not in data and len(self._unparsed_bytes) <= wire.MAX_LINE_BYTES:
            return  # wait for the end of the line, because each split copies all bytes
        # The last part is an unfinished line or empty.
        *lines, unfinished_line = self._unparsed_bytes.split(b"\n")
        self._unparsed_bytes = bytearray(unfinished_line)
        try:
            if len(unfinished_line) > wire.MAX_LINE_BYTES:
                raise wire.InvalidEnvReplyError(f"a line of more than {wire.MAX_LINE_BYTES} bytes")
            for line in lines:
                self._resolve_reply(wire.decode(bytes(line)))
        except (wire.InvalidEnvReplyError, KeyError, TypeError, ValueError) as error:
            self._kill("garbage", f"the environment worker sent {error}")

    def connection_lost(self, exc: Exception | None) -> None:  # of asyncio.Protocol
        """Handle the closed socket: the process exited, was killed, or closed it."""
        self._connection_closed.set()
        self._kill("dead", f"the environment worker {self.process_id} died")

    def _resolve_reply(self, message: dict[str, Any]) -> None:
        if self._hello_future is not None and not self._hello_future.done():
            self._hello_future.set_result(message)
            return
        # A reply without a call raises ``KeyError``, which the caller treats as an invalid message.
        call = self._pending_calls.pop(message["id"])
        if "error" in message:
            is_valid = isinstance(message["detail"], str) and message["error"] in ERROR_KINDS
        else:
            is_valid = "ok" in message
        if not is_valid:
            raise wire.InvalidEnvReplyError(f"an invalid reply: {message!r}")
        if call.timer is not None:
            call.timer.cancel()
        if not call.future.done():
            call.future.set_result(message)
        self._start_timers()

    def _start_timers(self) -> None:
        """Start the deadline timer of every call that the worker may be executing.

        A worker with asynchronous environments executes all its calls concurrently, any other
        worker only the oldest one.
        """
        for call_id, call in self._pending_calls.items():
            if call.timer is None:
                loop = asyncio.get_running_loop()
                call.timer = loop.call_later(call.timeout_s, self._handle_timeout, call_id, call)
            # The dict is in order of the calls, so the first one is the oldest.
            if not self.is_async:
                return

    def _handle_timeout(self, call_id: int, call: _PendingCall) -> None:
        if call_id not in self._pending_calls:
            return
        timeout_error = EnvFailure("timeout", f"{call.method} took over {call.timeout_s:g} s")
        self._fail_call(self._pending_calls.pop(call_id), timeout_error)
        reason = f"the environment worker was killed: {call.method} of another session hung"
        self._kill("timeout", reason)

    def _kill(self, kind: FailureKind, detail: str) -> None:
        """Kill the process group, fail the pending calls, and notify the pool once."""
        was_alive = self.is_alive
        self.is_alive = False
        if self._process is not None and self._process.returncode is None:
            # Kill descendants while the process exists: those in other Unix sessions are known only
            # as its children.
            os.kill(self._process.pid, signal.SIGSTOP)
            kill_descendants(self._process.pid, self._process_tree_id)
            # The process has not been reaped, so no other group can have its id.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._transport is not None:
            self._transport.abort()
        if self._hello_future is not None and not self._hello_future.done():
            self._hello_future.set_result({"failed": detail})
        pending_calls, self._pending_calls = self._pending_calls, {}
        # After a timeout of one call, all other pending calls fail as ``dead``. After an invalid
        # message all fail as ``garbage``, because the message cannot be assigned to one call.
        pending_failure_kind: FailureKind = "garbage" if kind == "garbage" else "dead"
        for call in pending_calls.values():
            self._fail_call(
                call, EnvFailure(pending_failure_kind, detail + self._read_last_output())
            )
        if was_alive and not self.is_closing:
            self.on_death(self, detail)

    @staticmethod
    def _fail_call(call: _PendingCall, error: EnvFailure) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if not call.future.done():
            call.future.set_exception(error)

    def _truncate_output(self) -> None:
        """Empty the output file if it is large: an environment may print for days."""
        if os.fstat(self._output_file.fileno()).st_size > MAX_OUTPUT_BYTES:
            os.ftruncate(self._output_file.fileno(), 0)

    def _read_last_output(self) -> str:
        """Return the last 2000 bytes that the process printed, for error messages."""
        if self._output_file.closed:
            return ""
        output_size = os.fstat(self._output_file.fileno()).st_size
        # Use ``pread``: the child shares the file offset, so seeking would move it.
        last_bytes = os.pread(self._output_file.fileno(), 2000, max(0, output_size - 2000))
        text = last_bytes.decode(errors="replace").strip()
        return f"\nlast output of the worker:\n{text}" if text else ""
