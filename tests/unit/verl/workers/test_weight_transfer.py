"""What goes from the ranks to the engines on their devices is what would go through the store."""

from typing import Any

import pytest
import torch

from tests.helpers.policy_rows import policy_config, random_rows
from tests.helpers.ranks import run_two_ranks
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_policy
from verl.models.lora import adapted_module
from verl.utils.tensor_arrays import as_tensor
from verl.workers import weight_transfer
from verl.workers.actor import PREFIX, ActorWorker
from verl.workers.rollout import EngineError, engine_calls
from verl.workers.rollout.weight_receipt import WeightReceipt, finish_recording
from verl.workers.weight_transfer import WeightStream, WeightSyncClient


@pytest.fixture(scope="module", params=[0, 4], ids=["plain", "lora"])
def actor(request, tmp_path_factory):
    policy = make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=2)
    config = policy_config(policy)
    config.rollout.dtype = "bfloat16"
    config.model.lora_rank = request.param
    worker = ActorWorker(config, device="cpu")
    worker.init_model()
    worker.update_actor(random_rows(rows=4))  # adapters begin at zero
    return worker


def test_the_stream_is_what_the_store_would_get_weight_by_weight(actor):
    stored = {name: as_tensor(array) for name, array in actor.export_weights()}
    sketch = actor.weight_fingerprints()
    stream = WeightStream(actor.train_engine, torch.bfloat16, PREFIX, actor.scales, actor.tied)
    for _ in range(2):  # every hand-over begins anew
        streamed = dict(stream)
        assert list(streamed) == list(stored)
        assert all(torch.equal(streamed[name], stored[name]) for name in stored)
        assert stream.fingerprints == sketch
    assert stream.largest_bytes() == max(tensor.nbytes for tensor in stored.values())


def test_what_will_come_is_known_before_anything_is_gathered(actor, monkeypatch):
    pytest.importorskip("vllm")
    stream = WeightStream(actor.train_engine, torch.bfloat16, PREFIX, actor.scales, actor.tied)
    streamed = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stream]

    def gathered(_tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a weight was gathered")

    monkeypatch.setattr(weight_transfer, "gather_tensor", gathered)
    assert [(meta.name, meta.dtype, meta.shape) for meta in stream.metadata()] == streamed


def stream_on_rank(number, policy, directory):
    """One of two ranks: what it streams, what it would store, and its sketch."""
    config = policy_config(policy)
    config.rollout.dtype = "bfloat16"
    config.model.lora_rank = 4
    worker = ActorWorker(config, device="cpu")
    worker.init_model()
    stored = {name: as_tensor(array) for name, array in worker.export_weights()}
    stream = WeightStream(worker.train_engine, torch.bfloat16, PREFIX, worker.scales, worker.tied)
    streamed = dict(stream)
    sketch = stream.fingerprints == worker.weight_fingerprints()
    torch.save(
        (stored, streamed, sketch, len(stream.fingerprints.sent_weights)),
        directory / f"{number}.pt",
    )


def test_every_rank_has_every_weight_whole_and_rank_0_knows_what_it_was(tmp_path):
    policy = make_tiny_policy(tmp_path / "policy", hidden=32, layers=1)
    run_two_ranks(stream_on_rank, policy, tmp_path)
    (stored, first, same, sent), (nothing, second, empty, unknown) = (
        torch.load(tmp_path / f"{number}.pt") for number in range(2)
    )
    assert nothing == {} and unknown == 0 and sent == len(stored) == len(first)
    assert same and empty, "the store would hand out the same"
    for streamed in (first, second):
        assert list(streamed) == list(stored)
        assert all(torch.equal(streamed[name], stored[name]) for name in stored)


def test_a_module_is_gathered_with_its_adapters():
    names = ("m.q.base_layer.weight", "m.q.base_layer.bias", "m.q.lora_A.default.weight", "m.n.w")
    assert [adapted_module(name) for name in names] == ["m.q", "m.q", "m.q", "m.n.w"]


class Handle:
    """A rollout worker as its Ray handle looks, that notes what it is asked."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.asked: list[tuple] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*args: object) -> object:
            self.asked.append((name, *args))
            return {"w": self.number} if name == "finish_update" else None

        return type("Method", (), {"remote": staticmethod(remote)})


def test_every_engine_hears_every_step_and_says_what_it_took(monkeypatch):
    monkeypatch.setattr(engine_calls, "gather_results", lambda refs, *_: list(refs))
    engines = [Handle(0), Handle(1)]
    client = WeightSyncClient(engines, devices=1)
    client.init_weight_transfer_engine({"packed": True})
    client.version = 8
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.finish_weight_update()
    steps = [
        ("connect", {"packed": True}),
        ("begin_update",),
        ("receive", {"names": ["w"]}),
        ("finish_update", 8),
    ]
    assert [engine.asked for engine in engines] == [steps, steps]
    assert client.received == [{"w": 0}, {"w": 1}]


def test_devices_that_join_a_group_have_ranks_of_their_own(monkeypatch):
    monkeypatch.setattr(engine_calls, "gather_results", lambda refs, *_: list(refs))
    engines = [Handle(0), Handle(1), Handle(2)]
    given = {"world_size": 7, "rank_offset": 1}
    WeightSyncClient(engines, devices=2).init_weight_transfer_engine(given)
    assert [engine.asked for engine in engines] == [
        [("connect", {"world_size": 7, "rank_offset": offset})] for offset in (1, 3, 5)
    ]
    assert given["rank_offset"] == 1


def test_who_waits_for_an_engine_that_failed_is_told_to_give_up(monkeypatch):
    def lost(_refs: list, *_: object) -> list:
        raise EngineError("out of memory")

    heard: list[str] = []
    client = WeightSyncClient([Handle(0)], devices=1)
    client.abort_transfer = lambda: heard.append("gave up")
    monkeypatch.setattr(engine_calls, "gather_results", lambda refs, *_: list(refs))
    client.update_weights({"names": ["w"]})
    assert heard == []
    monkeypatch.setattr(engine_calls, "gather_results", lost)
    with pytest.raises(EngineError, match="out of memory"):
        client.update_weights({"names": ["w"]})
    assert heard == ["gave up"]


# ---------------------------------------------------------------- shares of weights


def test_a_share_of_the_columns_is_read_back_and_what_is_cut_otherwise_is_not():
    whole = torch.arange(32.0).reshape(4, 8)
    held = {
        "whole": torch.zeros(4, 8),
        "columns": torch.zeros(4, 4),
        "rows": torch.zeros(2, 8),
        "bias": torch.zeros(4),
    }
    arrival = WeightReceipt(held, share=1, shares=2)
    sent = [("whole", whole), ("columns", whole), ("rows", whole), ("bias", torch.ones(8))]
    assert sorted(dict(arrival.record_weights(sent))) == sorted(held)
    held["whole"] = whole
    held["columns"] = whole[:, 4:].clone()
    assert arrival.verify_held(held) == 2
    held["columns"] = whole[:, :4].clone()  # what the other device should have
    with pytest.raises(EngineError, check=mentions("1 of the 2", "columns")):
        arrival.verify_held(held)


def test_arrays_are_cut_like_tensors():
    whole = torch.arange(8.0).reshape(2, 4)
    arrival = WeightReceipt({"w": torch.zeros(2, 2)}, share=0, shares=2)
    list(arrival.record_weights([("w", whole.numpy())]))
    assert arrival.verify_held({"w": whole[:, :2]}) == 1


def test_weights_that_nobody_watched_are_no_proof():
    worker: Any = type("Worker", (), {"get_model": lambda _: torch.nn.Linear(1, 1)})()
    with pytest.raises(EngineError):
        finish_recording(worker)
