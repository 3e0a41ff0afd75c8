"""Tests of the rollout worker with a fake engine: one token per step, no model, no Ray."""

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping

import numpy as np
import pytest
import torch

from tests.helpers.refusals import has_problem, mentions
from verl.config.schema.actor_rollout_ref import ActorRolloutRefConfig
from verl.config.settings.errors import UserError
from verl.utils.sampling import SamplingRequest, SamplingResult, StopReason
from verl.workers.rollout import EngineError, RolloutWorker
from verl.workers.rollout.base import Weights


class FakeEngine:
    """Gives token ``n`` in step ``n`` of a request and ends it after ``max_tokens``. It can fail or
    block.
    """

    gives_logprobs = True

    def __init__(self) -> None:
        self.policy_version = 0
        self.requests: dict[str, SamplingRequest] = {}
        self.progress: dict[str, int] = {}
        self.weights: Weights | None = None
        self.failures = 0  # number of next steps that raise
        self.gate = threading.Event()  # steps wait until it is set
        self.gate.set()
        self.most_requests = 0
        self.threads: set[int] = set()
        self.sleep_calls: list[object] = []
        self.update_calls: list[object] = []

    def add(self, request: SamplingRequest) -> None:
        if not request.prompt_ids:
            raise ValueError("the prompt is empty")
        self.requests[request.request_id] = request
        self.progress[request.request_id] = 0

    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[SamplingResult]:
        self.threads.add(threading.get_ident())
        assert self.gate.wait(20)
        time.sleep(0.001)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("injected fault")
        self.most_requests = max(self.most_requests, len(self.requests))
        results = []
        for name in list(self.requests):
            self.progress[name] += 1
            count = self.progress[name]
            if count >= self.requests[name].max_tokens:
                del self.requests[name]
                ids = list(range(count))
                logprobs = [-1.0] * count
                results.append(
                    SamplingResult(name, ids, logprobs, StopReason.LENGTH, self.policy_version)
                )
        return results

    def abort(self, request_ids: Iterable[str]) -> None:
        for name in request_ids:
            self.requests.pop(name, None)

    def update_weights(self, weights: Weights, version: int) -> None:
        assert not self.requests
        self.weights = list(weights)
        self.policy_version = version

    def held_weights(self) -> dict[str, torch.Tensor]:
        return {}

    def connect(self, info: Mapping[str, object]) -> None:
        self.update_calls.append(info)

    def begin_update(self) -> None:
        assert not self.requests
        self.update_calls.append("begin")

    def receive(self, info: Mapping[str, object]) -> None:
        assert not self.requests
        self.update_calls.append(info)

    def finish_update(self, version: int) -> dict[str, int]:
        if self.failures:
            raise EngineError("other weights were received")
        self.policy_version = version
        return {"w": 7}

    def sleep(self, level: int = 1) -> None:
        self.sleep_calls.append(level)

    def wake(self, part: str | None = None) -> None:
        self.sleep_calls.append(part)

    def close(self) -> None:
        self.closed = True


def make_request(name, tokens=3, client="me", prompt=(1, 2)):
    return SamplingRequest(name, list(prompt), tokens, client=client)


async def collect_results(worker, count, client="me"):
    results = []
    while len(results) < count:
        results += await asyncio.wait_for(worker.poll(client), 10)
    return {result.request_id: result for result in results}


def run_with_worker(scenario, **options):
    """Run ``scenario(worker, engine)`` in a new event loop and close the worker."""

    async def main():
        engine = FakeEngine()
        worker = RolloutWorker(None, "", engine=engine, **options)
        try:
            await asyncio.wait_for(worker.wait_until_ready(), 10)
            await asyncio.wait_for(scenario(worker, engine), 30)
        finally:
            engine.gate.set()
            await worker.close()

    asyncio.run(main())


def test_every_request_gets_one_result_at_its_client():
    async def scenario(worker, _engine):
        await worker.submit(
            [make_request("a"), make_request("b", client="you"), make_request("c", 5)]
        )
        my_results, your_results = await asyncio.gather(
            collect_results(worker, 2), collect_results(worker, 1, "you")
        )
        assert sorted(my_results) == ["a", "c"] and sorted(your_results) == ["b"]
        assert my_results["c"].token_ids == [0, 1, 2, 3, 4]
        stats = await worker.get_stats()
        assert stats["tokens"] == 11 and stats["busy_s"] > 0

    run_with_worker(scenario)


def test_requests_join_while_others_run():
    async def scenario(worker, engine):
        await worker.submit([make_request("long", 2000)])
        while not engine.progress.get("long"):
            await asyncio.sleep(0.01)
        await worker.submit([make_request("short", 2)])
        assert list(await collect_results(worker, 1)) == ["short"]
        assert engine.most_requests == 2 and "long" in engine.requests
        assert len(engine.threads) == 1
        assert threading.get_ident() not in engine.threads

    run_with_worker(scenario)


def test_poll_returns_after_a_second_and_can_be_repeated():
    async def scenario(worker, _engine):
        assert await worker.poll("me") == []
        polling = asyncio.create_task(collect_results(worker, 1))
        await asyncio.sleep(0)
        await worker.submit([make_request("a")])
        assert list(await polling) == ["a"]

    run_with_worker(scenario)


def test_weights_wait_for_running_requests_and_delay_new_ones():
    async def scenario(worker, engine):
        engine.gate.clear()
        await worker.submit([make_request("old")])
        update = asyncio.create_task(worker.update_weights([("w", np.ones(1))], 7))
        await asyncio.sleep(0.05)
        await worker.submit([make_request("new")])
        assert not update.done() and engine.weights is None
        engine.gate.set()
        await update
        results = await collect_results(worker, 2)
        assert (results["old"].policy_version, results["new"].policy_version) == (0, 7)
        assert engine.weights == [("w", np.ones(1))]
        assert engine.policy_version == 7

    run_with_worker(scenario)


def test_update_behind_a_hanging_step_is_refused():
    async def scenario(worker, engine):
        await submit_to_blocked_engine(worker, engine)
        with pytest.raises(EngineError, check=mentions("update_weights", 1, "0.3 s")):
            await worker.update_weights([], 1)
        engine.gate.set()
        await worker.submit([make_request("next")])
        assert list(await collect_results(worker, 1)) == ["next"]

    run_with_worker(scenario, request_timeout_s=0.3)


async def submit_to_blocked_engine(worker, engine):
    """Submit an endless request to ``engine``, and wait until a step of it does not end."""
    await worker.submit([make_request("endless", 10**9)])
    while not engine.threads:
        await asyncio.sleep(0.01)
    engine.gate.clear()
    await asyncio.sleep(0.1)


def test_request_that_the_engine_loses_is_aborted():
    async def scenario(worker, engine):
        await worker.submit([make_request("lost", 10**9)])
        while not engine.threads:
            await asyncio.sleep(0.01)
        engine.requests.clear()
        result = (await collect_results(worker, 1))["lost"]
        assert result.stop_reason is StopReason.ABORT and "0.2 s" in result.info["error"]
        await worker.update_weights([], 1)
        assert worker._unfinished_requests == {}

    run_with_worker(scenario, request_timeout_s=0.2)


def test_request_and_update_may_wait_longer_than_the_timeout_of_a_step():
    async def scenario(worker, engine):
        start_time = time.monotonic()
        await worker.submit([make_request("long", 1500)])
        await worker.update_weights([], 1)  # waits for the request
        assert time.monotonic() - start_time > 1.0
        result = (await collect_results(worker, 1))["long"]
        assert (result.stop_reason, len(result.token_ids)) == (StopReason.LENGTH, 1500)

    run_with_worker(scenario, request_timeout_s=1.0)


def test_abort_affects_the_requests_of_one_client_only():
    async def scenario(worker, engine):
        await worker.submit(
            [
                make_request("done", 1),
                make_request("endless", 10**9),
                make_request("yours", 500, client="you"),
            ]
        )
        while "done" in engine.requests or "endless" not in engine.requests:
            await asyncio.sleep(0.01)
        await worker.abort("me")
        assert list(await collect_results(worker, 1, "you")) == ["yours"]
        assert await worker.poll("me") == []
        assert not engine.requests
        await worker.update_weights([], 1)

    run_with_worker(scenario)


def test_request_that_the_engine_refuses_has_a_result():
    async def scenario(worker, _engine):
        await worker.submit([make_request("bad", prompt=()), make_request("good")])
        results = await collect_results(worker, 2)
        assert results["bad"].stop_reason is StopReason.ABORT
        assert "prompt" in results["bad"].info["error"]
        assert results["good"].stop_reason is StopReason.LENGTH

    run_with_worker(scenario)


def test_request_ids_have_to_be_unique():
    async def scenario(worker, _engine):
        with pytest.raises(ValueError):
            await worker.submit([make_request("a"), make_request("a")])
        await worker.submit([make_request("b", 500)])
        with pytest.raises(ValueError, check=mentions("'b'")):
            await worker.submit([make_request("b")])

    run_with_worker(scenario)


def test_failing_step_aborts_its_requests_only():
    async def scenario(worker, engine):
        engine.failures = 1
        await worker.submit([make_request("a"), make_request("b")])
        results = await collect_results(worker, 2)
        assert all(result.stop_reason is StopReason.ABORT for result in results.values())
        assert "injected fault" in results["a"].info["error"]
        await worker.submit([make_request("c")])
        assert (await collect_results(worker, 1))["c"].stop_reason is StopReason.LENGTH

    run_with_worker(scenario)


def test_engine_that_keeps_failing_ends_the_worker():
    async def scenario(worker, engine):
        engine.failures = 100
        for turn in range(3):
            await worker.submit([make_request(f"r{turn}")])
            await collect_results(worker, 1)
        with pytest.raises(EngineError, check=mentions(3, "injected fault")):
            await worker.submit([make_request("more")])
        with pytest.raises(EngineError, match="injected fault"):
            await worker.poll("me")
        with pytest.raises(EngineError, match="injected fault"):
            await worker.update_weights([], 1)

    run_with_worker(scenario)


def test_hanging_engine_is_reported_to_callers():
    async def scenario(worker, engine):
        engine.gate.clear()
        await worker.submit([make_request("stuck")])
        with pytest.raises(EngineError):
            for _ in range(5):
                await worker.poll("me")

    run_with_worker(scenario, request_timeout_s=0.2)


def test_sleep_and_wake_reach_the_engine():
    async def scenario(worker, engine):
        await worker.sleep()
        await worker.wake()
        await worker.sleep(2)
        await worker.wake("weights")
        await worker.wake("kv_cache")
        assert engine.sleep_calls == [1, None, 2, "weights", "kv_cache"]

    run_with_worker(scenario)


def test_requests_wait_for_an_update_in_pieces():
    async def scenario(worker, engine):
        await worker.connect({"packed": True})
        await worker.begin_update()
        await worker.submit([make_request("later")])
        for piece in ({"names": ["a"]}, {"names": ["b"]}):
            await worker.receive(piece)
        assert await worker.poll("me") == [] and not engine.requests
        assert await worker.finish_update(6) == {"w": 7}
        (result,) = (await collect_results(worker, 1)).values()
        assert result.policy_version == 6
        expected = [{"packed": True}, "begin", {"names": ["a"]}, {"names": ["b"]}]
        assert engine.update_calls == expected

    run_with_worker(scenario)


def test_weights_that_did_not_arrive_are_reported():
    async def scenario(worker, engine):
        await worker.begin_update()
        engine.failures = 1
        with pytest.raises(EngineError):
            await worker.finish_update(6)
        engine.failures = 0
        await worker.update_weights([("w", np.ones(1))], 7)
        assert engine.policy_version == 7

    run_with_worker(scenario)


def test_update_in_pieces_times_out_behind_a_hanging_step():
    async def scenario(worker, engine):
        await submit_to_blocked_engine(worker, engine)
        with pytest.raises(EngineError, check=mentions("begin_update", 1, "0.3 s")):
            await worker.begin_update()
        assert engine.update_calls == []
        engine.gate.set()
        await worker.submit([make_request("next")])
        assert list(await collect_results(worker, 1)) == ["next"]

    run_with_worker(scenario, request_timeout_s=0.3)


def test_engine_that_cannot_start_gives_the_reason():
    async def main():
        config = ActorRolloutRefConfig()
        config.rollout.name = "vlm"
        worker = RolloutWorker(config, "nowhere")
        refused = has_problem("unknown_name", "actor_rollout_ref.rollout.name", "vlm")
        with pytest.raises(UserError, check=refused):
            await worker.wait_until_ready()
        with pytest.raises(UserError, check=refused):
            await worker.submit([make_request("a")])
        await worker.close()

    asyncio.run(main())


def test_closed_worker_refuses_requests():
    async def scenario(worker, _engine):
        await worker.close()
        with pytest.raises(EngineError):
            await worker.submit([make_request("a")])

    run_with_worker(scenario)
