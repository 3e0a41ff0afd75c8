"""Tests that weights streamed to the engines equal those that go through the object store."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.helpers.model_families import ROW_WISE, SCALED, build_family
from tests.helpers.policy_rows import policy_config, random_rows
from tests.helpers.ranks import run_two_ranks
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_policy
from verl.models.lora import get_adapted_module_name
from verl.models.policy import LM_PREFIX, PolicyModel
from verl.utils.weight_arrays import as_tensor
from verl.workers import weight_transfer
from verl.workers.actor import ActorWorker
from verl.workers.engine import TrainEngine
from verl.workers.rollout import EngineError
from verl.workers.rollout.weight_receipt import WeightReceipt, finish_recording
from verl.workers.weight_transfer import WeightStream, WeightSyncClient


def make_policy(kind: str, directory: Path) -> Path:
    """Write a tiny policy whose weights have other names in its files if ``kind`` is ``moe``."""
    if kind == "moe":
        build_family(SCALED["deepseek-v3"]()).save_pretrained(directory)
        return directory
    return make_tiny_policy(directory, hidden=32, layers=2)


def make_stream(actor: ActorWorker) -> WeightStream:
    arguments = (torch.bfloat16, LM_PREFIX, actor.lora_scales, actor.tied_names)
    return WeightStream(actor.train_engine, actor.lm, *arguments)


@pytest.fixture(
    scope="module",
    params=[("dense", 0), ("dense", 4), ("moe", 4)],
    ids=["plain", "lora", "moe-lora"],
)
def actor(request, tmp_path_factory):
    kind, lora_rank = request.param
    config = policy_config(make_policy(kind, tmp_path_factory.mktemp("policy")))
    config.rollout.dtype = "bfloat16"
    config.model.lora_rank = lora_rank
    config.model.target_modules = ["o_proj"] if kind == "moe" else "all-linear"
    worker = ActorWorker(config, device="cpu")
    worker.init_model()
    worker.update_actor(random_rows(rows=4))  # adapters start at zero
    return worker


def test_stream_equals_the_stored_weights(actor):
    stored = {name: as_tensor(array) for name, array in actor.export_weights()}
    fingerprints = actor.get_sent_fingerprints()
    stream = make_stream(actor)
    for _ in range(2):  # every transfer starts from the first weight
        streamed = dict(stream)
        assert streamed.keys() == stored.keys()
        assert all(torch.equal(streamed[name], stored[name]) for name in stored)
        assert stream.fingerprints == fingerprints
    assert stream.compute_max_weight_bytes() == max(tensor.nbytes for tensor in stored.values())


def test_metadata_is_known_before_weights_are_gathered(actor, monkeypatch):
    pytest.importorskip("vllm")
    stream = make_stream(actor)
    streamed = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stream]

    def refuse_gather(_tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a weight was gathered")

    monkeypatch.setattr(weight_transfer, "gather_tensor", refuse_gather)
    assert [(meta.name, meta.dtype, meta.shape) for meta in stream.metadata()] == streamed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_buffers_keep_dtype_and_values(tmp_path, dtype):
    """Hash factors are larger than 2**53. Biases of the router differ by less than bfloat16 can."""
    model = build_family(ROW_WISE["qwen4-exp"]())
    multipliers = "model.layers.0.ple.ple_embedding.layer_multipliers"
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    model.get_submodule("model.layers.0.mlp.gate").register_buffer(
        "e_score_correction_bias", 8.0 + torch.arange(4) / 256
    )
    engine = TrainEngine(PolicyModel(model), device="cpu")
    stream = WeightStream(engine, model, dtype, LM_PREFIX, {}, set())
    streamed = dict(stream)
    assert {tensor.dtype for tensor in streamed.values()} == {dtype, torch.float32, torch.int64}
    assert streamed["lm_head.weight"].dtype == dtype
    expected = dict(model.named_buffers())
    for name in (multipliers, bias):
        assert streamed[name].dtype == expected[name].dtype
        assert torch.equal(streamed[name], expected[name])
    assert {name: tensor.dtype for name, tensor in streamed.items()} == stream.get_dtypes()
    # Each tensor starts at a multiple of its item size, as vLLM requires.
    offset = 0
    for tensor in streamed.values():
        assert offset % tensor.itemsize == 0
        offset += tensor.nbytes


def stream_on_rank(number, policy, directory):
    """Save the streamed weights and the stored weights of one of two ranks, and compare
    fingerprints.
    """
    config = policy_config(policy)
    config.rollout.dtype = "bfloat16"
    config.model.lora_rank = 4
    config.model.target_modules = ["o_proj"]
    worker = ActorWorker(config, device="cpu")
    worker.init_model()
    stored = {name: as_tensor(array) for name, array in worker.export_weights()}
    stream = make_stream(worker)
    streamed = dict(stream)
    has_same_fingerprints = stream.fingerprints == worker.get_sent_fingerprints()
    torch.save(
        (stored, streamed, has_same_fingerprints, len(stream.fingerprints.sent_weights)),
        directory / f"{number}.pt",
    )


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_every_rank_streams_whole_weights_and_rank_0_knows_them(tmp_path, kind):
    policy = make_policy(kind, tmp_path / "policy")
    run_two_ranks(stream_on_rank, policy, tmp_path)
    (stored, first, first_agrees, sent), (second_stored, second, second_agrees, second_sent) = (
        torch.load(tmp_path / f"{number}.pt") for number in range(2)
    )
    assert second_stored == {} and second_sent == 0 and sent == len(stored) == len(first)
    with safe_open(policy / "model.safetensors", "pt") as file:
        assert stored.keys() == set(file.keys()), "engines know only the names in the files"
    assert first_agrees and second_agrees, "streamed and stored weights have other fingerprints"
    for streamed in (first, second):
        assert streamed.keys() == stored.keys()
        assert all(torch.equal(streamed[name], stored[name]) for name in stored)


def test_module_is_gathered_with_its_adapters():
    names = ("m.q.base_layer.weight", "m.q.base_layer.bias", "m.q.lora_A.default.weight", "m.n.w")
    assert [get_adapted_module_name(name) for name in names] == ["m.q", "m.q", "m.q", "m.n.w"]


class RecordingHandle:
    """Imitates the Ray handle of a rollout worker and records its calls."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[tuple] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*args: object) -> object:
            self.calls.append((name, *args))
            return {"w": self.number} if name == "finish_update" else None

        return type("Method", (), {"remote": staticmethod(remote)})


def test_every_engine_gets_every_call_and_reports_its_weights(monkeypatch):
    monkeypatch.setattr(weight_transfer, "gather_results", lambda refs, *_: list(refs))
    engines = [RecordingHandle(0), RecordingHandle(1)]
    client = WeightSyncClient(engines, devices_per_engine=1)
    client.init_weight_transfer_engine({"packed": True})
    client.version = 8
    client.start_weight_update()
    client.update_weights({"names": ["w"]})
    client.finish_weight_update()
    calls = [
        ("connect", {"packed": True}),
        ("begin_update",),
        ("receive", {"names": ["w"]}),
        ("finish_update", 8),
    ]
    assert [engine.calls for engine in engines] == [calls, calls]
    assert client.received_checksums == [{"w": 0}, {"w": 1}]


def test_devices_in_one_group_get_distinct_ranks(monkeypatch):
    monkeypatch.setattr(weight_transfer, "gather_results", lambda refs, *_: list(refs))
    engines = [RecordingHandle(0), RecordingHandle(1), RecordingHandle(2)]
    given = {"world_size": 7, "rank_offset": 1}
    WeightSyncClient(engines, devices_per_engine=2).init_weight_transfer_engine(given)
    assert [engine.calls for engine in engines] == [
        [("connect", {"world_size": 7, "rank_offset": offset})] for offset in (1, 3, 5)
    ]
    assert given["rank_offset"] == 1


def test_failed_engine_aborts_the_transfer(monkeypatch):
    def raise_engine_error(_refs: list, *_: object) -> list:
        raise EngineError("out of memory")

    aborts: list[str] = []
    client = WeightSyncClient([RecordingHandle(0)], devices_per_engine=1)
    client.abort_transfer = lambda: aborts.append("aborted")
    monkeypatch.setattr(weight_transfer, "gather_results", lambda refs, *_: list(refs))
    client.update_weights({"names": ["w"]})
    assert aborts == []
    monkeypatch.setattr(weight_transfer, "gather_results", raise_engine_error)
    with pytest.raises(EngineError, match="out of memory"):
        client.update_weights({"names": ["w"]})
    assert aborts == ["aborted"]


# ---------------------------------------------------------------- shards of weights


def test_column_shards_are_verified_and_other_shards_are_not():
    whole = torch.arange(32.0).reshape(4, 8)
    held = {
        "whole": torch.zeros(4, 8),
        "columns": torch.zeros(4, 4),
        "rows": torch.zeros(2, 8),
        "bias": torch.zeros(4),
    }
    receipt = WeightReceipt(held, device_index=1, num_devices=2)
    sent = [("whole", whole), ("columns", whole), ("rows", whole), ("bias", torch.ones(8))]
    assert sorted(dict(receipt.record_weights(sent))) == sorted(held)
    held["whole"] = whole
    held["columns"] = whole[:, 4:].clone()
    assert receipt.verify_weights(held) == 2
    held["columns"] = whole[:, :4].clone()  # the shard of the other device
    with pytest.raises(EngineError, check=mentions(1, 2, "columns")):
        receipt.verify_weights(held)


def test_arrays_are_sharded_like_tensors():
    whole = torch.arange(8.0).reshape(2, 4)
    receipt = WeightReceipt({"w": torch.zeros(2, 2)}, device_index=0, num_devices=2)
    list(receipt.record_weights([("w", whole.numpy())]))
    assert receipt.verify_weights({"w": whole[:, :2]}) == 1


def test_unrecorded_update_is_refused():
    worker: Any = type("Worker", (), {"get_model": lambda _: torch.nn.Linear(1, 1)})()
    with pytest.raises(EngineError):
        finish_recording(worker)
