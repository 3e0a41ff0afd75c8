"""Separate process for vLLM, because vLLM changes torch and the environment of its process.

The functions below run in that process: submit them to the pool of ``one_process``. An engine that
``start`` made stays until the next ``start``. A second engine starts quickly, because vLLM is
imported once.
"""

import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.helpers.engine_cases import rollout_section, run_requests
from verl.utils.sampling import SamplingRequest, SamplingResult
from verl.workers.rollout import RolloutEngine, RolloutWorker, create_engine

_engine: RolloutEngine | None = None


def one_process() -> ProcessPoolExecutor:
    """Return a pool of one new process."""
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))


def start(directory: str, dtype: str, enforce_eager: bool | None = None) -> None:
    """Start an engine on the policy in ``directory``, and close the previous one."""
    global _engine
    stop()
    section = rollout_section(name="vllm", dtype=dtype, enforce_eager=enforce_eager)
    _engine = create_engine("vllm", section, directory, seed=3, num_threads=1)


def stop() -> None:
    """Close the engine."""
    global _engine
    if _engine is not None:
        _engine.close()
        _engine = None


def running() -> RolloutEngine:
    """Return the engine that ``start`` made."""
    assert _engine is not None, "start() comes first"
    return _engine


def serve(requests: list[SamplingRequest]) -> dict[str, SamplingResult]:
    """Run ``requests`` to the end."""
    return run_requests(running(), requests)


def serve_staggered(requests: list[SamplingRequest]) -> dict[str, SamplingResult]:
    """Run ``requests``, with one more request at every engine step."""
    engine = running()
    waiting = list(requests)
    results: dict[str, SamplingResult] = {}
    while waiting or engine.has_work():
        if waiting:
            engine.add(waiting.pop())
        for result in engine.step():
            results[result.request_id] = result
    return results


def serve_and_abort(
    requests: list[SamplingRequest], aborted_ids: list[str]
) -> dict[str, SamplingResult]:
    """Run ``requests`` and abort those in ``aborted_ids`` after two steps."""
    engine = running()
    for request in requests:
        engine.add(request)
    results = [*engine.step(), *engine.step()]
    engine.abort(aborted_ids)
    while engine.has_work():
        results += engine.step()
    return {result.request_id: result for result in results}


def update(weights: list, version: int) -> None:
    """Load weights."""
    running().update_weights(weights, version)


def lost_update(weights: list, is_read: bool) -> tuple[int, str]:
    """Send weights through a worker to an engine that drops them; return the number read and the
    error.

    If ``is_read``, the engine reads the weights before it drops them.
    """
    engine: Any = running()

    def drop(_method: str, kwargs: dict) -> None:
        if is_read:
            list(kwargs["weights_iterator"])

    async def main() -> tuple[int, str]:
        worker = RolloutWorker(None, "", engine=engine)
        try:
            return len(await worker.update_weights(weights, 5)), ""
        except RuntimeError as error:
            return 0, str(error)

    real, version = engine._engine.collective_rpc, engine.policy_version
    engine._engine.collective_rpc = drop
    try:
        return asyncio.run(main())
    finally:
        engine._engine.collective_rpc = real
        engine.policy_version = version  # other tests use the same engine


def refusal(method: str, *args) -> str:
    """Return the message with which the engine refuses a call."""
    try:
        getattr(running(), method)(*args)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def start_refusal(directory: str) -> str:
    """Return the message with which an engine on the policy in ``directory`` refuses to start."""
    try:
        create_engine(
            "vllm", rollout_section(name="vllm"), directory, seed=3, num_threads=1
        ).close()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def through_worker(
    first: list[SamplingRequest], second: list[SamplingRequest], weights: list
) -> list[SamplingResult]:
    """Submit ``first``, then ``second`` while it runs, update the weights, and submit ``second``
    again.

    Returns all results.
    """

    async def collect(worker: RolloutWorker, count: int) -> list[SamplingResult]:
        results = []
        while len(results) < count:
            results += await asyncio.wait_for(worker.poll("default"), 60)
        return results

    async def main() -> list[SamplingResult]:
        worker = RolloutWorker(None, "", engine=running())
        await worker.submit(first)
        await asyncio.sleep(0.05)
        await worker.submit(second)
        results = await collect(worker, len(first) + len(second))
        assert sorted(await worker.update_weights(weights, 9)) == sorted(dict(weights))
        await worker.submit(second)
        results += await collect(worker, len(second))
        await worker.close()
        return results

    global _engine
    results = asyncio.run(main())
    _engine = None
    return results
