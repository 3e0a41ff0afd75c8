"""RolloutWorker: one rollout engine behind asynchronous calls.

    submit(requests) ──▶ command queue ──▶ engine thread: add, step, add, step ...
                                               │
                poll(client) ◀── results of each client

The engine blocks, so a separate thread creates and runs it (OpenMP threads belong to the thread
that started them). New requests join between two engine steps. Weights change only while no request
runs. Requests that are submitted while an update waits are delayed and use the new weights.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar, cast

from verl.config.schema.actor import ActorRolloutRefConfig
from verl.utils.sampling import SamplingRequest, SamplingResult, StopReason
from verl.utils.stacks import answer_with_stacks
from verl.workers.rollout.base import (
    EngineError,
    EnginePart,
    ReceivingEngine,
    RolloutEngine,
    SleepLevel,
    Weights,
)
from verl.workers.rollout.engine_registry import start_engine

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# Longest wait of ``poll`` for a result. Long enough that idle clients cost little, short enough
# that a caller soon notices a stopped engine.
POLL_S = 1.0
BURST_S = 0.05  # longest time that the engine thread runs before the deadlines are checked
# Time limit for one request, from submit to result. The longest turn on a busy CPU takes less.
REQUEST_TIMEOUT_S = 600.0
# Time limit for the clean-up of the engine. Ray kills the process afterwards.
CLOSE_TIMEOUT_S = 10.0
MAX_FAILURES = 3  # consecutive engine steps that raise an error before the worker stops


@dataclass
class _ClientResults:
    """Finished results of one client that it has not received yet."""

    results: list[SamplingResult] = field(default_factory=list)
    filled: asyncio.Event = field(default_factory=asyncio.Event)


class RolloutWorker:
    """Asynchronous Ray actor that serves one rollout engine to any number of clients.

    ``config`` is the section ``actor_rollout_ref``. ``engine`` replaces the configured engine in
    tests. ``devices`` are the GPUs (as in ``CUDA_VISIBLE_DEVICES``) of an engine on several GPUs,
    because Ray assigns only one to this process. The environment variables ``env`` are set before
    the libraries of the engine are loaded.

    Every request gives exactly one result unless its client aborts. A request ends as
    ``StopReason.ABORT`` with ``info["error"]`` if the engine refuses it or raises while it runs, or
    after ``request_timeout_s``. After ``MAX_FAILURES`` consecutive failed steps, or while a step
    hangs, calls raise ``EngineError``.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig | None,
        model_path: str,
        seed: int = 0,
        num_threads: int | None = None,
        engine: RolloutEngine | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        devices: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        answer_with_stacks(type(self).__name__)
        os.environ.update(env or {})
        self._timeout_s = request_timeout_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._engine_or_none = engine
        create_engine = partial(start_engine, config, model_path, seed, num_threads, devices)
        self._started = self._thread.submit(self._start, create_engine)
        self._commands: deque[Callable[[], list[SamplingResult]]] = deque()  # for the engine thread
        # request -> client and deadline, oldest first
        self._running: dict[str, tuple[str, float]] = {}
        self._in_engine: dict[str, None] = {}  # used only by the engine thread
        self._delayed: list[SamplingRequest] = []
        self._pauses = 0
        self._results: dict[str, _ClientResults] = defaultdict(_ClientResults)
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._exclusive = asyncio.Lock()
        self._server: asyncio.Task[None] | None = None
        self._failures = 0
        self._stop_cause = ""
        count_names = ("tokens", "prompt_tokens", "requests", "aborted", "steps", "busy_s")
        self._counts = dict.fromkeys(count_names, 0.0)
        self._since = 0.0

    @property
    def _started_engine(self) -> RolloutEngine:
        if self._engine_or_none is None:
            raise EngineError("the rollout engine has not started; call wait_until_ready() first")
        return self._engine_or_none

    async def wait_until_ready(self) -> dict[str, str | int]:
        """Wait until the engine runs and return its name and policy version.

        Raises the error of a failed start.
        """
        # shielded: a cancelled caller must not cancel the start that others wait for
        await asyncio.shield(asyncio.wrap_future(self._started))
        if self._server is None:
            self._since = time.monotonic()
            self._server = asyncio.create_task(self._serve())
        engine = self._started_engine
        return {"engine": type(engine).__name__, "policy_version": engine.policy_version}

    async def submit(self, requests: Sequence[SamplingRequest]) -> None:
        """Queue requests. ``poll`` returns their results to the client named in each request.

        Raises ``ValueError`` for an id that is in use, ``EngineError`` if the engine has stopped.
        """
        await self.wait_until_ready()
        self._check_alive()
        names = [request.request_id for request in requests]
        used_ids = [name for name in names if name in self._running]
        if used_ids or len(set(names)) < len(names):
            in_use = used_ids[:3] or "an id occurs twice in this call"
            raise ValueError(f"request ids must be unique; in use: {in_use}")
        deadline = time.monotonic() + self._timeout_s
        for request in requests:
            self._running[request.request_id] = (request.client, deadline)
        if self._pauses:
            self._delayed.extend(requests)
        else:
            self._queue_requests(requests)

    async def poll(self, client: str) -> list[SamplingResult]:
        """Return the finished results of ``client``, waiting up to ``POLL_S`` for the first one.

        Returns [] if there are none after that time. Raises ``EngineError`` if there are none and
        the engine has stopped.
        """
        client_results = self._results[client]
        if not client_results.results:
            self._check_alive()
            client_results.filled.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client_results.filled.wait(), POLL_S)
        results = client_results.results
        client_results.results = []
        if not results:
            self._check_alive()
        return results

    async def abort(self, client: str) -> None:
        """Discard all requests and results of ``client``."""
        dropped = [name for name, (owner, _) in self._running.items() if owner == client]
        self._remove_requests(dropped)
        self._results[client].results = []

    async def get_stats(self) -> dict[str, float]:
        """Return totals since the start of the engine: tokens, requests, engine steps, busy and
        idle time in seconds.
        """
        alive = time.monotonic() - self._since if self._since else 0.0
        idle_s = max(0.0, alive - self._counts["busy_s"])
        return {**self._counts, "idle_s": idle_s, "running": float(len(self._running))}

    async def close(self) -> None:
        """Stop serving and free the engine. Later calls raise ``EngineError``."""
        self._stop_cause = self._stop_cause or "it is closed"
        if self._server is not None and not self._server.cancelled():
            self._server.cancel()
            await asyncio.wait([self._server])
            with contextlib.suppress(TimeoutError):  # a step may hang
                await asyncio.wait_for(self._in_thread(self._started_engine.close), CLOSE_TIMEOUT_S)
        self._thread.shutdown(wait=False)

    # ---- calls to an idle engine: they wait for running requests, and new requests wait for them.
    # They raise ``EngineError`` if requests still run after the request timeout.

    async def update_weights(self, weights: Weights, version: int) -> dict[str, int]:
        """Load new weights and return a checksum of each one that the engine received, by name.

        Raises ``EngineError`` if the engine does not hold the new weights afterwards.
        """
        # Imported here because it loads torch. The engine must set environment variables before.
        from verl.workers.rollout.weight_receipt import load_and_verify_weights

        async with self._exclusive_access("update_weights"):
            return await self._in_thread(
                load_and_verify_weights, self._started_engine, weights, version
            )

    async def connect(self, info: Mapping[str, object]) -> None:
        """Prepare a ``ReceivingEngine`` for weight transfers."""
        async with self._exclusive_access("connect"):
            await self._in_thread(self._receiving_engine.connect, info)

    async def begin_update(self) -> None:
        """Begin an update in chunks. New requests wait for ``finish_update``."""
        await self._pause_requests("begin_update")
        try:
            await self._in_thread(self._receiving_engine.begin_update)
        except BaseException:
            self._resume_requests()
            raise

    async def receive(self, info: Mapping[str, object]) -> None:
        """Load one chunk of the weights."""
        await self._in_thread(self._receiving_engine.receive, info)

    async def finish_update(self, version: int) -> dict[str, int]:
        """Complete the update in chunks; see ``ReceivingEngine.finish_update``."""
        try:
            return await self._in_thread(self._receiving_engine.finish_update, version)
        finally:
            self._resume_requests()

    async def sleep(self, level: SleepLevel = 1) -> None:
        """Free accelerator memory; see ``RolloutEngine.sleep``."""
        async with self._exclusive_access("sleep"):
            await self._in_thread(self._started_engine.sleep, level)

    async def wake(self, part: EnginePart | None = None) -> None:
        """Allocate accelerator memory again, for one part or for all."""
        async with self._exclusive_access("wake"):
            await self._in_thread(self._started_engine.wake, part)

    @contextlib.asynccontextmanager
    async def _exclusive_access(self, purpose: str) -> AsyncIterator[None]:
        await self._pause_requests(purpose)
        try:
            yield
        finally:
            self._resume_requests()

    @property
    def _receiving_engine(self) -> ReceivingEngine:
        # Not checked here: only callers whose engine is a ReceivingEngine may use it.
        return cast(ReceivingEngine, self._started_engine)

    # ---- in the event loop

    def _queue_requests(self, requests: Sequence[SamplingRequest]) -> None:
        self._commands.extend(partial(self._add, request) for request in requests)
        if requests:
            self._idle.clear()
            self._work.set()

    async def _pause_requests(self, purpose: str) -> None:
        """Delay new requests and wait until none runs.

        A second call waits until the first has called ``_resume_requests``.
        """
        await self.wait_until_ready()
        self._check_alive()
        self._pauses += 1
        try:
            await self._exclusive.acquire()
        except BaseException:
            self._queue_delayed()
            raise
        try:
            await self._wait_until_idle(purpose)
        except BaseException:
            self._resume_requests()
            raise

    def _resume_requests(self) -> None:
        self._exclusive.release()
        self._queue_delayed()

    def _queue_delayed(self) -> None:
        self._pauses -= 1
        if not self._pauses:
            delayed = self._delayed
            self._delayed = []
            self._queue_requests(delayed)

    async def _wait_until_idle(self, purpose: str) -> None:
        try:
            await asyncio.wait_for(self._idle.wait(), self._timeout_s)
        except TimeoutError:
            num_running = len(self._running) - len(self._delayed)
            raise EngineError(
                f"{purpose} needs an idle engine, but {num_running} requests still run after "
                f"{self._timeout_s:g} s"
            ) from None
        self._check_alive()

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _check_alive(self) -> None:
        if self._server is not None and self._server.done() and not self._stop_cause:
            self._stop_cause = f"its loop ended: {self._server.exception()!r}"
        if self._stop_cause:
            raise EngineError(f"the rollout engine has stopped: {self._stop_cause}")
        oldest = next(iter(self._running.values()), None)
        if oldest is not None and time.monotonic() > oldest[1] + self._timeout_s:
            raise EngineError(
                f"the rollout engine hangs: a request has run longer than {2 * self._timeout_s:g} "
                "s, twice its timeout"
            )

    async def _serve(self) -> None:
        while True:
            await self._work.wait()
            self._deliver_results(await self._in_thread(self._run_burst))
            self._abort_expired()
            if not self._commands and not self._in_engine:
                self._work.clear()
                self._idle.set()

    def _deliver_results(self, results: list[SamplingResult]) -> None:
        for result in results:
            client, _ = self._running.pop(result.request_id, (None, 0.0))
            if client is None:  # the client aborted or the request timed out
                continue
            client_results = self._results[client]
            client_results.results.append(result)
            client_results.filled.set()
            self._counts["tokens"] += len(result.token_ids)
            self._counts["requests"] += 1
            self._counts["aborted"] += result.stop_reason is StopReason.ABORT

    def _abort_expired(self) -> None:
        current_time = time.monotonic()
        expired_ids: list[str] = []
        for name, (_, deadline) in self._running.items():
            if deadline > current_time:  # requests are ordered by deadline
                break
            expired_ids.append(name)
        if not expired_ids:
            return
        logger.warning(
            "%d requests took more than %g s and are aborted", len(expired_ids), self._timeout_s
        )
        why = f"no result after {self._timeout_s:g} s"
        self._deliver_results([self._aborted_result(name, why) for name in expired_ids])
        self._remove_requests(expired_ids)

    def _remove_requests(self, names: list[str]) -> None:
        gone = set(names)
        for name in names:
            self._running.pop(name, None)
        self._delayed = [request for request in self._delayed if request.request_id not in gone]
        if names:
            self._commands.append(lambda: self._drop_requests(names))
            self._idle.clear()
            self._work.set()

    def _aborted_result(self, name: str, error: str) -> SamplingResult:
        version = self._started_engine.policy_version
        return SamplingResult(name, [], [], StopReason.ABORT, version, {"error": error})

    # ---- in the engine thread

    def _start(self, make: Callable[[], RolloutEngine]) -> None:
        if self._engine_or_none is None:
            began = time.perf_counter()
            self._engine_or_none = make()
            name = type(self._engine_or_none).__name__
            logger.info("rollout engine %s started in %.1f s", name, time.perf_counter() - began)

    def _run_burst(self) -> list[SamplingResult]:
        """Run engine steps until a request finishes or ``BURST_S`` seconds have passed."""
        began = time.perf_counter()
        results: list[SamplingResult] = []
        try:
            while not results and time.perf_counter() - began < BURST_S:
                while self._commands:
                    results += self._commands.popleft()()
                if not self._started_engine.has_work():
                    break
                results += self._started_engine.step()
                self._counts["steps"] += 1
                self._failures = 0
        except Exception as error:
            # boundary of the engine: running requests end as aborted, the worker continues
            results += self._handle_failure(error)
        for result in results:
            self._in_engine.pop(result.request_id, None)
        self._counts["busy_s"] += time.perf_counter() - began
        return results

    def _add(self, request: SamplingRequest) -> list[SamplingResult]:
        self._in_engine[request.request_id] = None
        try:
            self._started_engine.add(request)
        except ValueError as error:
            # only the trajectory of this request ends, the run continues
            logger.warning("the engine refused request %s: %s", request.request_id, error)
            return [self._aborted_result(request.request_id, str(error))]
        self._counts["prompt_tokens"] += len(request.prompt_ids)
        return []

    def _drop_requests(self, names: list[str]) -> list[SamplingResult]:
        self._started_engine.abort([name for name in names if name in self._in_engine])
        for name in names:
            self._in_engine.pop(name, None)
        return []

    def _handle_failure(self, error: Exception) -> list[SamplingResult]:
        running_ids = list(self._in_engine)
        self._in_engine = {}
        self._failures += 1
        logger.error("the engine failed with %d requests running", len(running_ids), exc_info=error)
        try:
            self._started_engine.abort(running_ids)
        except Exception as second:  # the engine cannot abort requests either: stop the worker
            self._stop_cause = f"{error!r}, and then {second!r}"
        if self._failures >= MAX_FAILURES:
            self._stop_cause = (
                self._stop_cause
                or f"{self._failures} consecutive steps failed, the last: {error!r}"
            )
        return [self._aborted_result(name, repr(error)) for name in running_ids]
