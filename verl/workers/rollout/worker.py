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

from verl.config.schema.actor_rollout_ref import ActorRolloutRefConfig
from verl.names import POLICY_MODEL
from verl.utils.sampling import SamplingRequest, SamplingResult, StopReason
from verl.utils.stacks import install_stack_dump_handler
from verl.workers.rollout.base import (
    AdapterEngine,
    DirectSyncEngine,
    EngineError,
    EnginePart,
    RolloutEngine,
    SleepLevel,
    Weights,
)
from verl.workers.rollout.engine_registry import start_engine

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

# Longest wait of ``poll`` for a result. With a longer wait, idle clients make fewer calls. With a
# shorter wait, a caller notices a stopped engine sooner.
POLL_S = 1.0
STEP_LOOP_LIMIT_S = 0.05  # the engine thread stops stepping after this time, to check deadlines
# Time without an engine step after which requests are aborted. Requests themselves have no time
# limit: their number of tokens is limited, and they wait in a queue.
REQUEST_TIMEOUT_S = 600.0
# Time limit for the clean-up of the engine. Ray kills the process afterwards.
CLOSE_TIMEOUT_S = 10.0
MAX_FAILURES = 3  # consecutive engine steps that raise an error before the worker stops


@dataclass
class _ClientResults:
    """Finished results of one client that it has not received yet."""

    results: list[SamplingResult] = field(default_factory=list)
    has_results: asyncio.Event = field(default_factory=asyncio.Event)


class RolloutWorker:
    """Asynchronous Ray actor that serves one rollout engine to any number of clients.

    ``config`` is the section ``actor_rollout_ref``. ``engine`` replaces the configured engine in
    tests. ``devices`` are the GPUs (as in ``CUDA_VISIBLE_DEVICES``) of an engine on several GPUs,
    because Ray assigns only one GPU to this process. The environment variables ``env`` are set
    before the libraries of the engine are loaded.

    Every request gives exactly one result unless its client aborts. A request ends as
    ``StopReason.ABORT`` with ``info["error"]`` if the engine refuses it, if a step raises an error
    while it runs, or if the engine makes no step for ``request_timeout_s``. After ``MAX_FAILURES``
    consecutive failed steps, or while a step hangs, calls raise ``EngineError``.
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
        install_stack_dump_handler(type(self).__name__)
        os.environ.update(env or {})
        self._timeout_s = request_timeout_s
        self._engine_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._engine_or_none = engine
        self._adapters_to_load = config.model.adapters if config else {}
        create_engine = partial(start_engine, config, model_path, seed, num_threads, devices)
        self._start_future = self._engine_thread.submit(self._start_engine, create_engine)
        # Calls that the engine thread makes before its next engine step.
        self._engine_commands: deque[Callable[[], list[SamplingResult]]] = deque()
        # Request id -> client of requests without a result, oldest first.
        self._unfinished_requests: dict[str, str] = {}
        # Time of the last engine step, or of the first request after idleness.
        self._last_progress_time = 0.0
        self._ids_in_engine: dict[str, None] = {}  # ids in order; used only by the engine thread
        self._delayed_requests: list[SamplingRequest] = []
        self._num_pauses = 0
        self._results_by_client: dict[str, _ClientResults] = defaultdict(_ClientResults)
        self._work_event = asyncio.Event()
        self._idle_event = asyncio.Event()
        self._idle_event.set()
        self._exclusive_lock = asyncio.Lock()
        self._serve_task: asyncio.Task[None] | None = None
        self._num_consecutive_failures = 0
        self._stop_cause = ""
        self._totals: dict[str, float] = dict.fromkeys(("tokens", "steps", "busy_s"), 0.0)

    @property
    def _started_engine(self) -> RolloutEngine:
        if self._engine_or_none is None:
            raise EngineError("the rollout engine has not started; call wait_until_ready() first")
        return self._engine_or_none

    async def wait_until_ready(self) -> None:
        """Wait until the engine runs, or raise the error of its start."""
        # shield() keeps a cancelled caller from cancelling the start, which other callers wait for.
        await asyncio.shield(asyncio.wrap_future(self._start_future))
        if self._serve_task is None:
            self._serve_task = asyncio.create_task(self._serve_requests())

    async def submit(self, requests: Sequence[SamplingRequest]) -> None:
        """Queue requests. ``poll`` returns their results to the client named in each request.

        Raises ``ValueError`` for an id that is in use, ``EngineError`` if the engine has stopped.
        """
        await self.wait_until_ready()
        self._check_alive()
        request_ids = [request.request_id for request in requests]
        used_ids = [
            request_id for request_id in request_ids if request_id in self._unfinished_requests
        ]
        if used_ids or len(set(request_ids)) < len(request_ids):
            ids_in_use = used_ids[:3] or "an id occurs twice in this call"
            raise ValueError(f"request ids must be unique; in use: {ids_in_use}")
        if not self._unfinished_requests:
            self._last_progress_time = time.monotonic()
        for request in requests:
            self._unfinished_requests[request.request_id] = request.client
        if self._num_pauses:
            self._delayed_requests.extend(requests)
        else:
            self._queue_requests(requests)

    async def poll(self, client: str) -> list[SamplingResult]:
        """Return the finished results of ``client``. Wait up to ``POLL_S`` seconds for the first.

        Returns [] if there is none. Raises ``EngineError`` if there is none and the engine has
        stopped.
        """
        client_results = self._results_by_client[client]
        if not client_results.results:
            self._check_alive()
            client_results.has_results.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client_results.has_results.wait(), POLL_S)
        results = client_results.results
        client_results.results = []
        if not results:
            self._check_alive()
        return results

    async def abort(self, client: str) -> None:
        """Discard all requests and results of ``client``."""
        client_request_ids = [
            request_id
            for request_id, request_client in self._unfinished_requests.items()
            if request_client == client
        ]
        self._remove_requests(client_request_ids)
        self._results_by_client[client].results = []

    async def get_stats(self) -> dict[str, float]:
        """Return totals since the start: sampled tokens, engine steps and busy time in seconds."""
        return dict(self._totals)

    async def close(self) -> None:
        """Stop serving and free the engine. Later calls raise ``EngineError``."""
        self._stop_cause = self._stop_cause or "it is closed"
        if self._serve_task is not None and not self._serve_task.cancelled():
            self._serve_task.cancel()
            await asyncio.wait([self._serve_task])
            with contextlib.suppress(TimeoutError):  # if a step hangs, do not wait longer
                await asyncio.wait_for(
                    self._call_in_engine_thread(self._started_engine.close), CLOSE_TIMEOUT_S
                )
        self._engine_thread.shutdown(wait=False)

    # ---- calls that need an idle engine. A call waits for running requests, and new requests wait
    # for the call. It raises ``EngineError`` if the engine makes no step for the request timeout.

    async def update_weights(self, weights: Weights, version: int) -> dict[str, int]:
        """Load new weights and return a checksum of each one that the engine received, by name.

        Raises ``EngineError`` if the engine does not hold the new weights afterwards.
        """
        # Imported here because it loads torch, and the engine must set environment variables first.
        from verl.workers.rollout.weight_receipt import load_and_verify_weights

        async with self._exclusive_access("update_weights"):
            return await self._call_in_engine_thread(
                load_and_verify_weights, self._started_engine, weights, version
            )

    async def load_adapter(self, weights: Weights, version: int) -> dict[str, int]:
        """Load the LoRA adapter of the policy and return the checksums of its tensors, by name.

        The first call also loads the adapters that are not trained. Raises ``EngineError`` if the
        engine does not hold an adapter afterwards.
        """
        from verl.models.adapters import read_adapter

        load_in_engine = cast(AdapterEngine, self._started_engine).load_adapter
        async with self._exclusive_access("load_adapter"):
            for name, directory in self._adapters_to_load.items():
                await self._call_in_engine_thread(
                    load_in_engine, name, read_adapter(directory).items()
                )
            self._adapters_to_load = {}
            return await self._call_in_engine_thread(load_in_engine, POLICY_MODEL, weights, version)

    async def connect(self, info: Mapping[str, object]) -> None:
        """Prepare the engine to receive weights directly from the devices of the training ranks."""
        async with self._exclusive_access("connect"):
            await self._call_in_engine_thread(self._direct_sync_engine.connect, info)

    async def begin_update(self) -> None:
        """Begin a weight update in chunks. New requests wait until ``finish_update`` is called."""
        await self._pause_requests("begin_update")
        try:
            await self._call_in_engine_thread(self._direct_sync_engine.begin_update)
        except BaseException:
            self._resume_requests()
            raise

    async def receive(self, info: Mapping[str, object]) -> None:
        """Load one chunk of new weights into the engine."""
        await self._call_in_engine_thread(self._direct_sync_engine.receive, info)

    async def finish_update(self, version: int) -> dict[str, int]:
        """Complete the weight update, serve requests again, and return each weight's checksum.

        Raises ``EngineError`` if the engine does not hold the received weights.
        """
        try:
            return await self._call_in_engine_thread(
                self._direct_sync_engine.finish_update, version
            )
        finally:
            self._resume_requests()

    async def sleep(self, level: SleepLevel = 1) -> None:
        """Wait until no request runs, then free the engine's accelerator memory until ``wake``.

        The weights are kept in host memory (``level`` 1) or discarded (2).
        """
        async with self._exclusive_access("sleep"):
            await self._call_in_engine_thread(self._started_engine.sleep, level)

    async def wake(self, part: EnginePart | None = None) -> None:
        """Allocate the engine's accelerator memory again after ``sleep``.

        ``part`` is ``weights`` or ``kv_cache``. None allocates both.
        """
        async with self._exclusive_access("wake"):
            await self._call_in_engine_thread(self._started_engine.wake, part)

    @contextlib.asynccontextmanager
    async def _exclusive_access(self, purpose: str) -> AsyncIterator[None]:
        await self._pause_requests(purpose)
        try:
            yield
        finally:
            self._resume_requests()

    @property
    def _direct_sync_engine(self) -> DirectSyncEngine:
        # The type is not checked: callers use this only if the engine is a DirectSyncEngine.
        return cast(DirectSyncEngine, self._started_engine)

    # ---- methods that run in the event loop

    def _queue_requests(self, requests: Sequence[SamplingRequest]) -> None:
        self._engine_commands.extend(partial(self._add_request, request) for request in requests)
        if requests:
            self._start_work()

    def _start_work(self) -> None:
        self._last_progress_time = time.monotonic()
        self._idle_event.clear()
        self._work_event.set()

    async def _pause_requests(self, purpose: str) -> None:
        """Delay new requests and wait until none runs. Calls are served one after the other."""
        await self.wait_until_ready()
        self._check_alive()
        self._num_pauses += 1
        try:
            await self._exclusive_lock.acquire()
        except BaseException:
            self._end_pause()
            raise
        try:
            await self._wait_until_idle(purpose)
        except BaseException:
            self._resume_requests()
            raise

    def _resume_requests(self) -> None:
        self._exclusive_lock.release()
        self._end_pause()

    def _end_pause(self) -> None:
        self._num_pauses -= 1
        if not self._num_pauses:
            delayed_requests = self._delayed_requests
            self._delayed_requests = []
            self._queue_requests(delayed_requests)

    async def _wait_until_idle(self, purpose: str) -> None:
        while not self._idle_event.is_set():
            remaining_s = self._last_progress_time + self._timeout_s - time.monotonic()
            if remaining_s <= 0:
                num_running_requests = len(self._unfinished_requests) - len(self._delayed_requests)
                raise EngineError(
                    f"{purpose} needs an idle engine, but {num_running_requests} requests still "
                    f"run and the engine has made no step for {self._timeout_s:g} s"
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle_event.wait(), remaining_s)
        self._check_alive()

    async def _call_in_engine_thread(
        self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        call = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._engine_thread, call)

    def _check_alive(self) -> None:
        if self._serve_task is not None and self._serve_task.done() and not self._stop_cause:
            self._stop_cause = f"its loop ended: {self._serve_task.exception()!r}"
        if self._stop_cause:
            raise EngineError(f"the rollout engine has stopped: {self._stop_cause}")
        idle_s = time.monotonic() - self._last_progress_time
        if self._unfinished_requests and idle_s > 2 * self._timeout_s:
            raise EngineError(
                f"the rollout engine hangs: it has requests, but has made no step for {idle_s:.0f} "
                "s"
            )

    async def _serve_requests(self) -> None:
        while True:
            await self._work_event.wait()
            self._deliver_results(await self._call_in_engine_thread(self._run_steps))
            self._abort_stalled_requests()
            if not self._engine_commands and not self._ids_in_engine:
                self._work_event.clear()
                self._idle_event.set()

    def _deliver_results(self, results: list[SamplingResult]) -> None:
        for result in results:
            client = self._unfinished_requests.pop(result.request_id, None)
            if client is None:  # the client or the worker aborted the request
                continue
            client_results = self._results_by_client[client]
            client_results.results.append(result)
            client_results.has_results.set()
            self._totals["tokens"] += len(result.token_ids)

    def _abort_stalled_requests(self) -> None:
        """Abort running requests if the engine made no step for the timeout.

        This happens if the engine has lost a request.
        """
        if time.monotonic() - self._last_progress_time < self._timeout_s:
            return
        delayed_ids = {request.request_id for request in self._delayed_requests}
        stalled_ids = [
            request_id for request_id in self._unfinished_requests if request_id not in delayed_ids
        ]
        if not stalled_ids:
            return
        message = f"the engine made no step for {self._timeout_s:g} s"
        logger.warning("%s: %d requests are aborted", message, len(stalled_ids))
        self._deliver_results(
            [self._make_aborted_result(request_id, message) for request_id in stalled_ids]
        )
        self._remove_requests(stalled_ids)

    def _remove_requests(self, request_ids: list[str]) -> None:
        removed_ids = set(request_ids)
        for request_id in request_ids:
            self._unfinished_requests.pop(request_id, None)
        self._delayed_requests = [
            request for request in self._delayed_requests if request.request_id not in removed_ids
        ]
        if request_ids:
            self._engine_commands.append(lambda: self._abort_in_engine(request_ids))
            self._start_work()

    def _make_aborted_result(self, request_id: str, error: str) -> SamplingResult:
        version = self._started_engine.policy_version
        return SamplingResult(request_id, [], [], StopReason.ABORT, version, {"error": error})

    # ---- methods that run in the engine thread

    def _start_engine(self, create_engine: Callable[[], RolloutEngine]) -> None:
        if self._engine_or_none is None:
            start_time = time.perf_counter()
            self._engine_or_none = create_engine()
            engine_name = type(self._engine_or_none).__name__
            logger.info(
                "rollout engine %s started in %.1f s", engine_name, time.perf_counter() - start_time
            )

    def _run_steps(self) -> list[SamplingResult]:
        """Run engine steps until a request finishes, for at most ``STEP_LOOP_LIMIT_S`` seconds."""
        start_time = time.perf_counter()
        results: list[SamplingResult] = []
        try:
            while not results and time.perf_counter() - start_time < STEP_LOOP_LIMIT_S:
                while self._engine_commands:
                    results += self._engine_commands.popleft()()
                if not self._started_engine.has_work():
                    break
                results += self._started_engine.step()
                self._last_progress_time = time.monotonic()
                self._totals["steps"] += 1
                self._num_consecutive_failures = 0
        except Exception as error:
            # Errors of the engine stop here: running requests end as aborted, the worker continues.
            results += self._abort_after_failure(error)
        for result in results:
            self._ids_in_engine.pop(result.request_id, None)
        self._totals["busy_s"] += time.perf_counter() - start_time
        return results

    def _add_request(self, request: SamplingRequest) -> list[SamplingResult]:
        self._ids_in_engine[request.request_id] = None
        try:
            self._started_engine.add(request)
        except ValueError as error:
            # Only the trajectory of this request ends, and the run continues.
            logger.warning("the engine refused request %s: %s", request.request_id, error)
            return [self._make_aborted_result(request.request_id, str(error))]
        return []

    def _abort_in_engine(self, request_ids: list[str]) -> list[SamplingResult]:
        self._started_engine.abort(
            [request_id for request_id in request_ids if request_id in self._ids_in_engine]
        )
        for request_id in request_ids:
            self._ids_in_engine.pop(request_id, None)
        return []

    def _abort_after_failure(self, error: Exception) -> list[SamplingResult]:
        running_ids = list(self._ids_in_engine)
        self._ids_in_engine = {}
        self._num_consecutive_failures += 1
        logger.error("the engine failed with %d requests running", len(running_ids), exc_info=error)
        try:
            self._started_engine.abort(running_ids)
        except Exception as abort_error:  # if even abort() fails, stop the worker
            self._stop_cause = f"{error!r}, and then {abort_error!r}"
        if self._num_consecutive_failures >= MAX_FAILURES:
            self._stop_cause = (
                self._stop_cause
                or f"{self._num_consecutive_failures} consecutive steps failed, the last: {error!r}"
            )
        return [self._make_aborted_result(request_id, repr(error)) for request_id in running_ids]
