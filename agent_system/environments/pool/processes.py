"""Worker processes seen from the pool: start one, call it with a deadline, kill it with everything
it started.
"""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_system.environments.pool import wire as wire
from agent_system.environments.pool.failure import EnvFailure, FailureKind, WorkerStartError
from verl.utils.processes import OWNER, kill_descendants

logger = logging.getLogger(__name__)
ROOT = str(Path(__file__).resolve().parents[3])
# Seconds that a killed process may take to be gone.
REAP_S = 5.0
# Seconds that a worker may take to close its environments when asked to exit.
EXIT_S = 2.0
PRINTS = 2**20  # bytes that are kept of what a worker prints, about


@dataclass(slots=True)
class _Call:
    future: asyncio.Future[dict[str, Any]]
    timeout_s: float
    what: str
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class ProcessSlot:
    """One environment of one worker process."""

    worker: "WorkerProcess"
    index: int
    seconds: float = field(default=0.0)  # spent inside the environment by the last call

    @property
    def alive(self) -> bool:
        """Whether the slot can take calls."""
        return self.worker.alive

    @property
    def load(self) -> int:
        """Sessions on the slot's worker."""
        return self.worker.busy

    def plays(self, group: str | None) -> bool:
        """Whether a session of ``group`` is on the slot's worker."""
        return group is not None and group in self.worker.groups

    def lend(self, group: str | None, by: int) -> None:
        """Count a session of ``group`` that begins (1) or ends (-1)."""
        self.worker.busy += by
        groups = self.worker.groups
        groups[group] += by
        if not groups[group]:
            # Else the counter would keep every group that was ever played.
            del groups[group]

    async def call(self, op: str, args: dict[str, Any], timeout_s: float) -> Any:
        """Make one call; returns the unpacked result. Raises ``EnvFailure``."""
        reply = await self.worker.call({"op": op, "slot": self.index, **args}, timeout_s)
        if "error" in reply:
            raise EnvFailure(reply["error"], reply["detail"])
        self.seconds = reply["seconds"]
        if op == "reset":
            return wire.unpack_observation(reply["ok"])
        observation, reward, done, info = reply["ok"]
        return wire.unpack_observation(observation), reward, done, info


class WorkerProcess(asyncio.Protocol):
    """One worker process and its socket.

    Calls to a worker whose environments block are answered in the order they were made, so the
    deadline of a call runs from the moment it is the oldest one unanswered: nobody pays for the
    neighbour before him. ``on_death`` is called once, when the process has died, hung or talked
    garbage; by then every waiting call has failed.
    """

    def __init__(
        self, target: str, section: dict[str, Any], on_death: Callable[["WorkerProcess", str], None]
    ) -> None:
        self.target = target
        self.section = section
        self.on_death = on_death
        self.alive = False
        self.closing = False
        self.asynchronous = False
        self._owner = uuid.uuid4().hex
        self.busy = 0  # sessions that hold a slot
        self.groups: Counter[str | None] = Counter()  # and those of each group
        self.start_s = 0.0
        self._calls: dict[int, _Call] = {}
        self._next_id = 0
        self._buffer = bytearray()
        self._hello: asyncio.Future[dict[str, Any]] | None = None
        self._gone = asyncio.Event()
        self._process: subprocess.Popen | None = None
        self._transport: asyncio.Transport | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the worker
        # Where it is emptied the next print is to be at its new end.
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)

    @property
    def pid(self) -> int | None:
        """The process id, once started."""
        return self._process.pid if self._process else None

    async def start(self, timeout_s: float) -> "WorkerProcess":
        """Spawn the process and wait until its first environment is made.

        Raises ``WorkerStartError``.
        """
        loop = asyncio.get_running_loop()
        began = time.perf_counter()
        answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._hello = answer
        channel = self._popen()
        first = {"target": self.target, "section": self.section, "sys_path": sys.path}
        try:
            self._transport, _ = await loop.create_connection(lambda: self, sock=channel)
            self._transport.write(wire.encode(first))
            hello = await asyncio.wait_for(answer, timeout_s)
            if "hello" not in hello:
                raise WorkerStartError(f"{hello['failed']}{self._said()}", hello.get("missing"))
        except TimeoutError:
            raise WorkerStartError(
                f"environment worker not ready after {timeout_s:g} s{self._said()}"
            ) from None
        finally:
            if answer.cancelled() or not answer.done() or "hello" not in answer.result():
                self._die("dead", "it did not start")
        self.alive = True
        self.asynchronous = bool(hello["asynchronous"])
        self.start_s = time.perf_counter() - began
        return self

    def _popen(self) -> socket.socket:
        """Start the process; returns our end of its socket."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        # The worker must find this package wherever it is started from.
        paths = [ROOT, os.environ.get("PYTHONPATH")]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        # Many workers share the cores: threads of numpy in each would only get in their way.
        environ.setdefault("OMP_NUM_THREADS", "1")
        # Libraries draw from sets of texts: with a hash seed of its own every worker would play
        # another game.
        environ.setdefault("PYTHONHASHSEED", "0")
        environ[OWNER] = self._owner
        module = f"{__package__}.worker"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                env=environ,
                start_new_session=True,  # its own group: what it starts is killed with it
            )
        return ours

    async def call(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send ``message`` and await its reply.

        Raises ``EnvFailure`` when the worker is or becomes unusable.
        """
        if not self.alive or self._transport is None:
            raise EnvFailure("dead", "the environment worker of this session is gone")
        self._forget_prints()
        self._next_id += 1
        line = wire.encode({**message, "id": self._next_id})
        call = _Call(asyncio.get_running_loop().create_future(), timeout_s, message["op"])
        self._calls[self._next_id] = call
        self._transport.write(line)
        self._arm()
        return await call.future

    async def close(self) -> None:
        """Ask the process to exit, then make sure that it and its children are gone."""
        self.closing = True
        self.alive = False
        if self._transport is not None and not self._gone.is_set():
            self._transport.write(wire.encode({"op": "exit"}))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gone.wait(), EXIT_S)
        self._die("dead", "the pool is closed")
        await self.reap()

    async def reap(self) -> None:
        """Wait until the killed process has left the process table."""
        deadline = time.monotonic() + REAP_S
        while self._process is not None and self._process.poll() is None:
            if time.monotonic() > deadline:
                logger.error("environment worker %s does not go away", self.pid)
                return
            await asyncio.sleep(0.005)
        self._stderr.close()

    # ---- asyncio.Protocol ----

    def data_received(self, data: bytes) -> None:
        """Split what arrived into lines and hand each to whoever waits for it."""
        self._buffer += data
        # What comes last is an unfinished line, or nothing.
        *lines, rest = self._buffer.split(b"\n")
        self._buffer = bytearray(rest)
        try:
            if len(rest) > wire.MAX_LINE:
                raise wire.GarbageReturn(f"a line longer than {wire.MAX_LINE} bytes")
            for line in lines:
                self._received(wire.decode(bytes(line)))
        except (wire.GarbageReturn, KeyError, TypeError, ValueError) as error:
            self._die("garbage", f"the environment worker sent {error}")

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  of asyncio.Protocol
        """The other end is closed: the process exited, was killed, or closed its socket."""
        self._gone.set()
        self._die("dead", f"the environment worker {self.pid} died")

    def _received(self, message: dict[str, Any]) -> None:
        if self._hello is not None and not self._hello.done():
            self._hello.set_result(message)
            return
        # A reply to no call raises ``KeyError``, and the worker is taken for broken.
        call = self._calls.pop(message["id"])
        if "error" not in message:
            float(message["seconds"])  # raises where it is no number: garbage
        elif not isinstance(message["detail"], str) or message["error"] not in ("error", "garbage"):
            raise wire.GarbageReturn(f"an error reply {message!r}")
        if call.timer is not None:
            call.timer.cancel()
        if not call.future.done():
            call.future.set_result(message)
        self._arm()

    def _arm(self) -> None:
        """Start the clock of every call the worker can be working on: all, or the oldest one."""
        for number, call in self._calls.items():
            if call.timer is None:
                loop = asyncio.get_running_loop()
                call.timer = loop.call_later(call.timeout_s, self._expired, number, call)
            # The oldest comes first: a dict keeps the order in which calls were made.
            if not self.asynchronous:
                return

    def _expired(self, number: int, call: _Call) -> None:
        if number not in self._calls:
            return
        late = EnvFailure("timeout", f"{call.what} took over {call.timeout_s:g} s")
        self._fail(self._calls.pop(number), late)
        self._die("timeout", f"the environment worker was killed: {call.what} of a neighbour hung")

    def _die(self, kind: FailureKind, detail: str) -> None:
        """Kill the process group, fail what waits, tell the pool; only the first call has an effect
        on each.
        """
        was_alive = self.alive
        self.alive = False
        if self._process is not None and self._process.returncode is None:
            # Before it dies: descendants in sessions of their own are found below it.
            os.kill(self._process.pid, signal.SIGSTOP)
            kill_descendants(self._process.pid, self._owner)
            # Not reaped yet, so the group's id cannot be another's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if self._transport is not None:
            self._transport.abort()
        if self._hello is not None and not self._hello.done():
            self._hello.set_result({"failed": detail})
        calls, self._calls = self._calls, {}
        # Who waited beside the call that hung is not late himself; garbage cannot be told apart.
        felt: FailureKind = "garbage" if kind == "garbage" else "dead"
        for call in calls.values():
            self._fail(call, EnvFailure(felt, detail + self._said()))
        if was_alive and not self.closing:
            self.on_death(self, detail)

    @staticmethod
    def _fail(call: _Call, error: EnvFailure) -> None:
        if call.timer is not None:
            call.timer.cancel()
        if not call.future.done():
            call.future.set_exception(error)

    def _forget_prints(self) -> None:
        """Empty the file of prints where it is large: an environment may print for days."""
        if os.fstat(self._stderr.fileno()).st_size > PRINTS:
            os.ftruncate(self._stderr.fileno(), 0)

    def _said(self) -> str:
        """The last words of the process, for error messages."""
        if self._stderr.closed:
            return ""
        size = os.fstat(self._stderr.fileno()).st_size
        # The child shares the offset, so this must not seek.
        tail = os.pread(self._stderr.fileno(), 2000, max(0, size - 2000))
        text = tail.decode(errors="replace").strip()
        return f"\nlast output of the worker:\n{text}" if text else ""
