"""Engine client: batches the sampling requests of many coroutines into few messages.

    trajectories ──sample()──▶ queue of worker 0 ──one submit per few ms──▶ rollout worker 0
                 ◀──future──── poller of worker 0 ◀──one poll at a time─── rollout worker 0

Requests within ``BATCH_WINDOW_S`` seconds share one ``submit``. A trajectory always uses the same
worker (chosen by ``routing_key``), so that its prefix stays in that worker's cache.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Protocol

from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import RolloutSpec
from verl.names import POLICY_MODEL
from verl.utils.sampling import SamplingRequest, SamplingResult, StopReason
from verl.utils.seeds import derive_seed

# Seconds: less than the time to sample one token, enough to batch turns that end together.
BATCH_WINDOW_S = 0.002
REQUEST_TIMEOUT_S = 600.0  # time limit of a call of the worker, in seconds


class RolloutWorkerFailed(RuntimeError):
    """Failure of a whole rollout worker. The run cannot continue."""


class EngineAbortedError(Exception):
    """Failure of one request: the engine aborted it, so its trajectory is aborted."""


class TokenSource(Protocol):
    """Source of sampled tokens for a collector worker, with the methods of ``EngineClient``."""

    async def sample(
        self, prompt_ids: list[int], *, routing_key: int, **parameters: Any
    ) -> SamplingResult: ...

    async def close(self) -> None: ...


# Ray actor handle, whose methods are created at run time, or an object with the asynchronous
# methods submit(requests), poll(client) and abort(client). One protocol cannot describe both.
RolloutWorkerHandle = Any


def call_worker_method(worker: RolloutWorkerHandle, method: str, *args: object) -> Awaitable[Any]:
    """Call an asynchronous method of a Ray actor handle, or of a plain object in this process."""
    bound_method = getattr(worker, method)
    # Only the methods of an actor handle have ``remote``, and they cannot be called directly.
    remote_method = getattr(bound_method, "remote", None)
    return bound_method(*args) if remote_method is None else remote_method(*args)


class _WorkerConnection:
    """Connection to one rollout worker: queue of requests, and futures of the expected results."""

    def __init__(self, worker: RolloutWorkerHandle, client_name: str) -> None:
        self._worker = worker
        self._client_name = client_name
        self._queued_requests: list[SamplingRequest] = []
        # Futures of requests that were sent and have no result yet.
        self._pending_requests: dict[str, asyncio.Future[SamplingResult]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_polling = False

    def add_request(self, request: SamplingRequest) -> asyncio.Future[SamplingResult]:
        loop = asyncio.get_running_loop()
        result_future: asyncio.Future[SamplingResult] = loop.create_future()
        self._pending_requests[request.request_id] = result_future
        # The first request of a batch starts the timer of the batch.
        if not self._queued_requests:
            loop.call_later(BATCH_WINDOW_S, self._submit_queued_requests)
        self._queued_requests.append(request)
        return result_future

    def _submit_queued_requests(self) -> None:
        requests, self._queued_requests = self._queued_requests, []
        self._start_task(self._submit(requests))
        if not self._is_polling:
            self._is_polling = True
            self._start_task(self._poll())

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        # Keep a reference: asyncio has only weak ones, and the task could be garbage collected.
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _submit(self, requests: list[SamplingRequest]) -> None:
        try:
            submit_call = call_worker_method(self._worker, "submit", requests)
            await asyncio.wait_for(submit_call, REQUEST_TIMEOUT_S)
        except Exception as error:  # engine boundary: any error fails all pending requests
            self._fail_pending(error)

    async def _poll(self) -> None:
        try:
            while self._pending_requests:
                poll_call = call_worker_method(self._worker, "poll", self._client_name)
                for result in await asyncio.wait_for(poll_call, REQUEST_TIMEOUT_S):
                    self._deliver_result(result)
        except Exception as error:  # engine boundary: a failed poll fails all requests
            self._fail_pending(error)
        finally:
            self._is_polling = False

    def _deliver_result(self, result: SamplingResult) -> None:
        result_future = self._pending_requests.pop(result.request_id, None)
        if result_future is None or result_future.done():  # the request was cancelled
            return
        if result.stop_reason is StopReason.ABORT:
            reason = result.info.get("error", "no reason given")
            result_future.set_exception(
                EngineAbortedError(f"the engine aborted request {result.request_id}: {reason}")
            )
        else:
            result_future.set_result(result)

    def _fail_pending(self, error: Exception) -> None:
        failed_requests, self._pending_requests = self._pending_requests, {}
        reason = f"a rollout worker failed: {type(error).__name__}: {error}"
        for result_future in failed_requests.values():
            if not result_future.done():
                result_future.set_exception(RolloutWorkerFailed(reason))

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._pending_requests:
            self._pending_requests.clear()
            # Abort the open requests: the worker would continue sampling for a closed client.
            abort_call = call_worker_method(self._worker, "abort", self._client_name)
            await asyncio.wait_for(abort_call, REQUEST_TIMEOUT_S)


class EngineClient:
    """Client that samples from ``workers`` as ``client_name``, within one asyncio loop."""

    def __init__(self, workers: Sequence[RolloutWorkerHandle], client_name: str) -> None:
        self._connections = [_WorkerConnection(worker, client_name) for worker in workers]
        self._client_name = client_name
        self._request_numbers = itertools.count()

    async def sample(
        self, prompt_ids: list[int], *, routing_key: int = 0, **parameters: Any
    ) -> SamplingResult:
        """Sample one continuation of ``prompt_ids``.

        ``parameters`` are fields of ``SamplingRequest``, such as temperature and seed. Requests of
        one ``routing_key`` go to the same worker. Raises ``EngineAbortedError`` if this request
        failed, and ``RolloutWorkerFailed`` if the worker failed.
        """
        request = SamplingRequest(
            request_id=f"{self._client_name}-{next(self._request_numbers)}",
            prompt_ids=list(prompt_ids),
            client=self._client_name,
            **parameters,
        )
        # Choose the worker by key, not by load: the worker with the cached prefix is the fastest.
        return await self._connections[routing_key % len(self._connections)].add_request(request)

    async def close(self) -> None:
        """Stop polling and abort all pending requests."""
        await asyncio.gather(*(connection.close() for connection in self._connections))


class PolicySampler:
    """Sampler of turns and thoughts from ``engine`` with the parameters of ``settings``."""

    def __init__(self, engine: TokenSource, settings: RolloutSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._sampling_parameters = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k,
        }

    async def sample_turn(
        self,
        prompt_ids: list[int],
        spec: RolloutSpec,
        turn_number: int,
        max_tokens: int,
        stop: tuple[str, ...] = (),
        model: str = POLICY_MODEL,
    ) -> SamplingResult:
        """Sample turn ``turn_number`` of trajectory ``spec`` from the policy, or from ``model``.

        ``stop`` strings end the turn, in addition to those of the settings.
        """
        seed_label = "turn" if model == POLICY_MODEL else model
        return await self._engine.sample(
            prompt_ids,
            max_tokens=max_tokens,
            stop=(*self._settings.stop, *stop),
            routing_key=spec.index,
            # Derive the seed from the trajectory, not from its group: members of a group have
            # equal prompts, and only the seed makes them differ.
            seed=derive_seed(self._settings.seed, seed_label, spec.traj_uid, turn_number),
            model=model,
            **self._sampling_parameters,
        )

    async def sample_summary(
        self, prompt_ids: list[int], spec: RolloutSpec, summary_number: int, max_tokens: int
    ) -> SamplingResult:
        """Sample summary ``summary_number`` of trajectory ``spec``; stop strings do not end it."""
        return await self._engine.sample(
            prompt_ids,
            max_tokens=max_tokens,
            stop=(),
            routing_key=spec.index,
            seed=derive_seed(self._settings.seed, "summary", spec.traj_uid, summary_number),
            **self._sampling_parameters,
        )

    async def sample_thought(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        stop: tuple[str, ...],
        routing_key: int,
        seed: int,
    ) -> SamplingResult | None:
        """Sample an alternative thought. Return None if the engine aborted the request."""
        try:
            return await self._engine.sample(
                prompt_ids,
                max_tokens=max_tokens,
                stop=stop,
                routing_key=routing_key,
                seed=seed,
                **self._sampling_parameters,
            )
        # A turn can be trained on without an alternative thought, so the failure is not raised.
        except EngineAbortedError:
            return None
