"""The rollout worker on an engine made of paper: one token per step, no model, no Ray."""

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping

import numpy as np
import pytest
import torch

from tests.helpers.refusals import mentions
from verl.config.schema.actor import ActorRolloutRefConfig
from verl.utils.sampling import SamplingRequest, SamplingResult, StopReason
from verl.workers.rollout import EngineError, RolloutWorker
from verl.workers.rollout.base import Weights


class PaperEngine:
    """Gives token ``n`` in step ``n`` of a request and ends it after ``max_tokens``; fails or waits
    when told to.
    """

    gives_logprobs = True

    def __init__(self) -> None:
        self.policy_version = 0
        self.requests: dict[str, SamplingRequest] = {}
        self.progress: dict[str, int] = {}
        self.weights: Weights | None = None
        self.failures = 0  # steps that raise
        self.gate = threading.Event()  # steps wait for it
        self.gate.set()
        self.most = 0
        self.threads: set[int] = set()
        self.asleep: list[object] = []
        self.pieces: list[object] = []

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
            raise RuntimeError("the paper tore")
        self.most = max(self.most, len(self.requests))
        done = []
        for name in list(self.requests):
            self.progress[name] += 1
            count = self.progress[name]
            if count >= self.requests[name].max_tokens:
                del self.requests[name]
                ids = list(range(count))
                logprobs = [-1.0] * count
                done.append(
                    SamplingResult(name, ids, logprobs, StopReason.LENGTH, self.policy_version)
                )
        return done

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
        self.pieces.append(info)

    def begin_update(self) -> None:
        assert not self.requests
        self.pieces.append("begin")

    def receive(self, info: Mapping[str, object]) -> None:
        assert not self.requests
        self.pieces.append(info)

    def finish_update(self, version: int) -> dict[str, int]:
        if self.failures:
            raise EngineError("the paper is another one")
        self.policy_version = version
        return {"w": 7}

    def sleep(self, level: int = 1) -> None:
        self.asleep.append(level)

    def wake(self, part: str | None = None) -> None:
        self.asleep.append(part)

    def close(self) -> None:
        self.closed = True


def request(name, tokens=3, client="me", prompt=(1, 2)):
    return SamplingRequest(name, list(prompt), tokens, client=client)


async def collect(worker, count, client="me"):
    results = []
    while len(results) < count:
        results += await asyncio.wait_for(worker.poll(client), 10)
    return {result.request_id: result for result in results}


def with_worker(scenario, **options):
    """Run ``scenario(worker, engine)`` in a fresh loop and close the worker."""

    async def main():
        engine = PaperEngine()
        worker = RolloutWorker(None, "", engine=engine, **options)
        try:
            await asyncio.wait_for(worker.wait_until_ready(), 10)
            await asyncio.wait_for(scenario(worker, engine), 30)
        finally:
            engine.gate.set()
            await worker.close()

    asyncio.run(main())


def test_every_request_gets_one_result_at_its_own_client():
    async def scenario(worker, _engine):
        await worker.submit([request("a"), request("b", client="you"), request("c", 5)])
        mine, yours = await asyncio.gather(collect(worker, 2), collect(worker, 1, "you"))
        assert sorted(mine) == ["a", "c"] and sorted(yours) == ["b"]
        assert mine["c"].token_ids == [0, 1, 2, 3, 4]
        stats = await worker.get_stats()
        assert (stats["tokens"], stats["requests"], stats["prompt_tokens"], stats["running"]) == (
            11,
            3,
            6,
            0,
        )
        assert stats["busy_s"] > 0 and stats["idle_s"] >= 0

    with_worker(scenario)


def test_requests_join_while_others_run_and_one_thread_drives_the_engine():
    async def scenario(worker, engine):
        await worker.submit([request("long", 2000)])
        while not engine.progress.get("long"):
            await asyncio.sleep(0.01)
        await worker.submit([request("short", 2)])
        assert list(await collect(worker, 1)) == ["short"]
        assert engine.most == 2 and "long" in engine.requests
        assert len(engine.threads) == 1
        assert threading.get_ident() not in engine.threads

    with_worker(scenario)


def test_poll_gives_up_after_a_second_and_then_goes_on():
    async def scenario(worker, _engine):
        assert await worker.poll("me") == []
        polling = asyncio.create_task(collect(worker, 1))
        await asyncio.sleep(0)
        await worker.submit([request("a")])
        assert list(await polling) == ["a"]

    with_worker(scenario)


def test_weights_wait_for_running_requests_and_hold_new_ones_back():
    async def scenario(worker, engine):
        engine.gate.clear()
        await worker.submit([request("old")])
        update = asyncio.create_task(worker.update_weights([("w", np.ones(1))], 7))
        await asyncio.sleep(0.05)
        await worker.submit([request("new")])
        assert not update.done() and engine.weights is None
        engine.gate.set()
        await update
        results = await collect(worker, 2)
        assert (results["old"].policy_version, results["new"].policy_version) == (0, 7)
        assert engine.weights == [("w", np.ones(1))]
        assert (await worker.wait_until_ready())["policy_version"] == 7

    with_worker(scenario)


def test_an_update_that_never_gets_its_turn_is_refused_clearly():
    async def scenario(worker, _engine):
        await worker.submit([request("endless", 10**9)])
        worker._running["endless"] = (
            "me",
            time.monotonic() + 1000,
        )  # past every deadline of this test
        with pytest.raises(EngineError, check=mentions("update_weights", 1, "0.3 s")):
            await worker.update_weights([], 1)
        await worker.submit([request("next")])
        assert list(await collect(worker, 1)) == ["next"]

    with_worker(scenario, request_timeout_s=0.3)


def test_a_late_request_is_aborted_and_leaves_the_engine():
    async def scenario(worker, engine):
        await worker.submit([request("endless", 10**9)])
        result = (await collect(worker, 1))["endless"]
        assert result.stop_reason is StopReason.ABORT and "0.2 s" in result.info["error"]
        await worker.update_weights([], 1)
        assert not engine.requests

    with_worker(scenario, request_timeout_s=0.2)


def test_abort_drops_running_held_and_finished_requests_of_one_client_only():
    async def scenario(worker, engine):
        await worker.submit(
            [request("done", 1), request("endless", 10**9), request("yours", 500, client="you")]
        )
        while "done" in engine.requests or "endless" not in engine.requests:
            await asyncio.sleep(0.01)
        await worker.abort("me")
        assert list(await collect(worker, 1, "you")) == ["yours"]
        assert await worker.poll("me") == []
        assert not engine.requests
        await worker.update_weights([], 1)

    with_worker(scenario)


def test_what_the_engine_refuses_is_a_result():
    async def scenario(worker, _engine):
        await worker.submit([request("bad", prompt=()), request("good")])
        results = await collect(worker, 2)
        assert results["bad"].stop_reason is StopReason.ABORT
        assert results["bad"].info["error"] == "the prompt is empty"
        assert results["good"].stop_reason is StopReason.LENGTH

    with_worker(scenario)


def test_ids_have_to_be_unique():
    async def scenario(worker, _engine):
        with pytest.raises(ValueError, check=mentions("request ids")):
            await worker.submit([request("a"), request("a")])
        await worker.submit([request("b", 500)])
        with pytest.raises(ValueError, check=mentions("'b'")):
            await worker.submit([request("b")])

    with_worker(scenario)


def test_a_failing_step_aborts_what_ran_and_the_worker_lives_on():
    async def scenario(worker, engine):
        engine.failures = 1
        await worker.submit([request("a"), request("b")])
        results = await collect(worker, 2)
        assert all(result.stop_reason is StopReason.ABORT for result in results.values())
        assert "the paper tore" in results["a"].info["error"]
        await worker.submit([request("c")])
        assert (await collect(worker, 1))["c"].stop_reason is StopReason.LENGTH
        assert (await worker.get_stats())["aborted"] == 2

    with_worker(scenario)


def test_an_engine_that_keeps_failing_is_given_up_with_its_reason():
    async def scenario(worker, engine):
        engine.failures = 100
        for turn in range(3):
            await worker.submit([request(f"r{turn}")])
            await collect(worker, 1)
        with pytest.raises(EngineError, check=mentions(3, "the paper tore")):
            await worker.submit([request("more")])
        with pytest.raises(EngineError, match="the paper tore"):
            await worker.poll("me")
        with pytest.raises(EngineError, match="the paper tore"):
            await worker.update_weights([], 1)

    with_worker(scenario)


def test_a_hanging_engine_is_noticed_by_whoever_waits():
    async def scenario(worker, engine):
        engine.gate.clear()
        await worker.submit([request("stuck")])
        with pytest.raises(EngineError):
            for _ in range(5):
                await worker.poll("me")

    with_worker(scenario, request_timeout_s=0.2)


def test_sleep_and_wake_reach_the_engine():
    async def scenario(worker, engine):
        await worker.sleep()
        await worker.wake()
        await worker.sleep(2)
        await worker.wake("weights")
        await worker.wake("kv_cache")
        assert engine.asleep == [1, None, 2, "weights", "kv_cache"]

    with_worker(scenario)


def test_weights_that_come_in_pieces_meet_no_request():
    async def scenario(worker, engine):
        await worker.connect({"packed": True})
        await worker.begin_update()
        await worker.submit([request("later")])
        for piece in ({"names": ["a"]}, {"names": ["b"]}):
            await worker.receive(piece)
        assert await worker.poll("me") == [] and not engine.requests
        assert await worker.finish_update(6) == {"w": 7}
        (result,) = (await collect(worker, 1)).values()
        assert result.policy_version == 6
        assert engine.pieces == [{"packed": True}, "begin", {"names": ["a"]}, {"names": ["b"]}]

    with_worker(scenario)


def test_weights_that_did_not_arrive_are_said_and_the_worker_lives_on():
    async def scenario(worker, engine):
        await worker.begin_update()
        engine.failures = 1
        with pytest.raises(EngineError, match="another one"):
            await worker.finish_update(6)
        engine.failures = 0
        await worker.update_weights([("w", np.ones(1))], 7)
        assert engine.policy_version == 7

    with_worker(scenario)


def test_an_update_in_pieces_waits_for_requests_and_gives_up_like_any_other():
    async def scenario(worker, engine):
        await worker.submit([request("endless", 10**9)])
        worker._running["endless"] = ("me", time.monotonic() + 1000)
        with pytest.raises(EngineError, check=mentions("begin_update", 1, "0.3 s")):
            await worker.begin_update()
        assert engine.pieces == []
        await worker.submit([request("next")])
        assert list(await collect(worker, 1)) == ["next"]

    with_worker(scenario, request_timeout_s=0.3)


def test_an_engine_that_cannot_start_says_why():
    async def main():
        config = ActorRolloutRefConfig()
        config.rollout.name = "vlm"
        worker = RolloutWorker(config, "nowhere")
        with pytest.raises(ValueError, check=mentions("vlm")):
            await worker.wait_until_ready()
        with pytest.raises(ValueError, check=mentions("vlm")):
            await worker.submit([request("a")])
        await worker.close()

    asyncio.run(main())


def test_a_closed_worker_says_so():
    async def scenario(worker, _engine):
        await worker.close()
        with pytest.raises(EngineError):
            await worker.submit([request("a")])

    with_worker(scenario)
