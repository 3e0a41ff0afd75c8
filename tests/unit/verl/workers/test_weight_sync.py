"""Tests of the checks of each weight sync. Weights that were lost or did not change end the run."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.engine_cases import rollout_section
from tests.helpers.model_families import ROW_WISE, SCALED, build_family
from tests.helpers.policy_rows import policy_config, random_rows
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from tests.helpers.trainer_fakes import LocalActorGroup, LocalHandle
from verl.names import EngineDtype
from verl.trainer.ppo import resources
from verl.trainer.ppo.resources import WeightSyncError, has_updated_weights
from verl.utils import weight_arrays
from verl.utils.weight_arrays import as_array, as_tensor, compute_fingerprint
from verl.workers import actor as actor_module
from verl.workers import weight_transfer
from verl.workers.actor import ActorWorker
from verl.workers.rollout import EngineError, RolloutWorker, create_engine
from verl.workers.rollout.hf import HFEngine
from verl.workers.rollout.weight_receipt import WeightReceipt


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1)


# ---------------------------------------------------------------- fingerprints


def test_fingerprint_depends_on_bits_and_positions():
    torch.manual_seed(0)
    values = torch.randn(20, 30)
    expected = compute_fingerprint(values)
    assert compute_fingerprint(values.numpy()) == compute_fingerprint(values.clone()) == expected
    assert (
        compute_fingerprint(values.T) != expected
        and compute_fingerprint(values.flip(0)) != expected
    )
    nudged = values.clone()
    nudged[7, 3] = torch.nextafter(nudged[7, 3], torch.tensor(10.0))
    assert compute_fingerprint(nudged) != expected
    assert compute_fingerprint(nudged, torch.bfloat16) == compute_fingerprint(values.bfloat16())
    assert compute_fingerprint(torch.zeros(0)) == 0


def test_large_tensor_is_sampled_in_every_column(monkeypatch):
    monkeypatch.setattr(weight_arrays, "MAX_VALUES_READ", 64)
    values = torch.zeros(64, 16)
    detected = 0
    for column in range(16):
        values.zero_()[:, column] = 1.0
        detected += compute_fingerprint(values) != 0
    assert detected == 16
    values.zero_().view(-1)[1] = 1.0  # between two values that are read
    assert compute_fingerprint(values) == 0


def test_read_only_arrays_have_a_fingerprint():
    values = np.ones(5, dtype=np.float32)
    values.flags.writeable = False
    assert compute_fingerprint(values) == compute_fingerprint(torch.ones(5)) != 0


# ---------------------------------------------------------------- engines and workers


class DroppingEngine(HFEngine):
    """Reads new weights and keeps the old ones."""

    reads_weights = True

    def update_weights(self, weights, version):
        if self.reads_weights:
            list(weights)


class IgnoringEngine(DroppingEngine):
    """Never reads the new weights."""

    reads_weights = False


@pytest.fixture(autouse=True)
def gather_here(monkeypatch):
    """Replace ``gather_results`` by a version without Ray: a reference is the call itself, (worker,
    method, arguments), also among arguments.
    """
    loop = asyncio.new_event_loop()
    workers: list[RolloutWorker] = []

    def value(ref: Any) -> Any:
        if not isinstance(ref, tuple):
            return ref
        worker, method, args = ref
        result = getattr(worker, method)(*map(value, args))
        if not asyncio.iscoroutine(result):
            return result
        workers.append(worker)
        return loop.run_until_complete(result)

    for module in (resources, weight_transfer):
        monkeypatch.setattr(module, "gather_results", lambda refs, *_: [value(ref) for ref in refs])
    yield
    for worker in workers:
        loop.run_until_complete(worker.close())
    loop.close()


def make_engine(policy, cls: type[HFEngine] = HFEngine, dtype: str = "float32") -> HFEngine:
    return cls(rollout_section(dtype=dtype), str(policy))


def start_workers(
    policy, *engines: HFEngine, dtype: EngineDtype = "float32", lr: float = 1e-2, **model: Any
) -> resources.TrainingWorkers:
    config = policy_config(policy)
    config.rollout.dtype = dtype
    config.actor.optim.lr = lr
    for key, value in model.items():
        setattr(config.model, key, value)
    worker = ActorWorker(config, device="cpu")
    worker.init_model()
    handles = [LocalHandle(RolloutWorker(None, "", engine=engine)) for engine in engines]
    return resources.TrainingWorkers(LocalActorGroup(worker), handles)


def update_policy(workers: resources.TrainingWorkers) -> bool:
    """Update the policy once and return True if it moved."""
    group: Any = workers.actor_group
    return has_updated_weights(group.worker.update_actor(random_rows(rows=4)).meta_info["metrics"])


@pytest.mark.parametrize("lora", [0, 4])
def test_weights_reach_engines_of_both_precisions(policy, lora):
    engines = [make_engine(policy, dtype=dtype) for dtype in ("float32", "bfloat16")]
    workers = start_workers(policy, *engines, lora_rank=lora)
    workers.sync_weights(0)
    moved = update_policy(workers)
    assert moved
    before = engines[0].held_weights()["model.layers.0.mlp.up_proj.weight"].clone()
    workers.sync_weights(1, moved)
    assert [engine.policy_version for engine in engines] == [1, 1]
    assert not torch.equal(engines[0].held_weights()["model.layers.0.mlp.up_proj.weight"], before)


def test_experts_with_other_names_in_the_files_reach_the_engine(tmp_path):
    """The files have one matrix per expert. The models of trainer and engine have one per layer."""
    build_family(SCALED["deepseek-v3"]()).save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    workers = start_workers(tmp_path, engine)
    group: Any = workers.actor_group
    workers.sync_weights(0)
    moved = update_policy(workers)
    workers.sync_weights(1, moved)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    trained = actor_module.gather_full_weights(group.worker.train_engine)[f"lm.{name}"]
    assert torch.equal(engine._loaded_model.get_parameter(name), trained)
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    sent = dict(group.worker.export_weights())[expert]
    assert torch.equal(as_tensor(sent), trained[2, trained.shape[1] // 2 :])
    assert torch.equal(engine.held_weights()[expert], as_tensor(sent))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("family", "buffer"),
    [("qwen4-exp", "layer_multipliers"), ("deepseek-v3", "e_score_correction_bias")],
)
def test_sync_of_unchanged_weights_keeps_the_buffers_of_the_engine(tmp_path, family, buffer, dtype):
    model = build_family((ROW_WISE | SCALED)[family]())
    for tensor in model.buffers():
        if tensor.shape == (4,) and tensor.is_floating_point():  # biases of the experts
            tensor.copy_(8.0 + torch.arange(4) / 256)
    model.save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    engine = make_engine(tmp_path, dtype=dtype)
    workers = start_workers(tmp_path, engine, dtype=dtype)
    workers.sync_weights(0)
    held, expected = engine.held_weights(), dict(model.named_buffers())
    names = [name for name in expected if name in held]
    assert any(buffer in name for name in names)
    assert all(torch.equal(held[name], expected[name]) for name in names)


def test_changed_integers_are_detected():
    """The second value is larger than 2**53, so that it would not fit a float64."""
    sent, held = torch.tensor([7, 2**60 + 1]), torch.tensor([7, 2**60 + 1])
    receipt = WeightReceipt({"multipliers": held})
    list(receipt.record_weights([("multipliers", as_array(sent, torch.bfloat16))]))
    assert receipt.verify_weights({"multipliers": held}) == 1
    with pytest.raises(EngineError, check=mentions("multipliers")):
        receipt.verify_weights({"multipliers": held - 1})


def test_weights_are_sent_in_the_precision_of_the_engines(policy):
    engine = make_engine(policy, dtype="bfloat16")
    workers = start_workers(policy, engine, dtype="bfloat16")
    group: Any = workers.actor_group
    sent = dict(group.worker.export_weights())
    assert {array.dtype for array in sent.values()} == {np.dtype(np.uint16)}
    workers.sync_weights(0)
    moved = update_policy(workers)
    workers.sync_weights(1, moved)
    held = engine.held_weights()
    masters = actor_module.gather_full_weights(group.worker.train_engine)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(held[name], masters[f"{actor_module.LM_PREFIX}{name}"].bfloat16())


def test_update_below_bfloat16_precision_passes_the_check(policy):
    engine = make_engine(policy, dtype="bfloat16")
    workers = start_workers(policy, engine, dtype="bfloat16", lr=1e-9)
    group: Any = workers.actor_group
    workers.sync_weights(0)
    before = group.worker.get_sent_fingerprints()
    moved = update_policy(workers)
    assert moved
    workers.sync_weights(1, moved)
    after = group.worker.get_sent_fingerprints()
    name = "model.layers.0.mlp.up_proj.weight"
    assert before.master_weights[name] != after.master_weights[name]
    assert before.sent_weights[name] == after.sent_weights[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_array_round_trip_keeps_the_tensor(dtype):
    tensor = torch.randn(3, 5)
    array = as_array(tensor, dtype)
    array.flags.writeable = False
    restored = as_tensor(array)
    assert restored.dtype is dtype and torch.equal(restored, tensor.to(dtype))
    assert (
        compute_fingerprint(array)
        == compute_fingerprint(restored)
        == compute_fingerprint(tensor, dtype)
    )
    assert as_tensor(tensor) is tensor


@pytest.mark.parametrize("lora", [0, 4])
def test_engine_that_drops_a_sync_ends_the_run_in_that_step(policy, lora):
    workers = start_workers(
        policy, make_engine(policy), make_engine(policy, DroppingEngine), lora_rank=lora
    )
    workers.sync_weights(0)  # the engine already holds these weights from disk
    moved = update_policy(workers)
    with pytest.raises(EngineError, check=mentions("model")):
        workers.sync_weights(1, moved)


def test_engine_that_ignores_weights_ends_the_run_at_first_sync(policy):
    workers = start_workers(policy, make_engine(policy), make_engine(policy, IgnoringEngine))
    with pytest.raises(WeightSyncError, check=mentions("worker 1", "version 0")) as raised:
        workers.sync_weights(0)
    assert "model.embed_tokens" in str(raised.value)


def test_weights_changed_in_transit_are_detected(policy, monkeypatch):
    workers = start_workers(policy, make_engine(policy))
    group: Any = workers.actor_group
    export_weights = group.worker.export_weights

    def export_changed_weights() -> list[tuple[str, np.ndarray]]:
        (name, first), *others = export_weights()
        return [(name, np.nextafter(first, np.float32(9.0))), *others]

    monkeypatch.setattr(group.worker, "export_weights", export_changed_weights)
    with pytest.raises(WeightSyncError, check=mentions("1 of")):
        workers.sync_weights(0)


def test_user_provided_engine_without_held_weights_is_accepted(policy):
    class OpaqueEngine:
        policy_version = 0

        def update_weights(self, weights, _version):
            self.policy_version = len(list(weights))

        def close(self):
            pass

    engine: Any = OpaqueEngine()
    start_workers(policy, engine).sync_weights(0)
    assert engine.policy_version == len(make_engine(policy).held_weights()) - 1  # a tied head


def test_fused_repacked_and_quantised_weights_are_not_verified():
    sent = [(name, torch.ones(2, 2)) for name in ("same", "fused", "fp8", "elsewhere", "stale")]
    held = {
        "same": torch.ones(2, 2).bfloat16(),
        "fused": torch.zeros(6, 2),
        "fp8": torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
        "stale": torch.zeros(2, 2),
    }
    receipt = WeightReceipt(held)
    assert len(list(receipt.record_weights(sent))) == len(receipt.received_checksums) == 5
    with pytest.raises(EngineError, check=mentions(1, 2, "stale")):
        receipt.verify_weights(held)
    held["stale"] = torch.ones(2, 2)
    assert receipt.verify_weights(held) == 2


# ---------------------------------------------------------------- changes of the weights


@pytest.mark.parametrize("lora", [0, 4])
def test_weights_that_do_not_follow_the_gradient_end_the_run(policy, monkeypatch, lora):
    """This happens if adapters are missing in the exported weights, or the optimizer holds
    copies.
    """
    workers = start_workers(policy, make_engine(policy), lora_rank=lora)
    first = actor_module.gather_full_weights(workers.actor_group.worker.train_engine)  # pyright: ignore
    monkeypatch.setattr(actor_module, "gather_full_weights", lambda _: first)
    workers.sync_weights(0)
    moved = update_policy(workers)
    assert moved
    with pytest.raises(WeightSyncError):
        workers.sync_weights(1, moved)
    workers.sync_weights(1)  # without an update there is nothing to check


def test_skipped_step_updates_no_weights():
    metrics = {"actor/optimizer_steps": 4.0, "actor/lr": 1e-6}
    assert has_updated_weights(metrics) and has_updated_weights(metrics | {"actor/zero_steps": 3.0})
    assert not has_updated_weights(metrics | {"actor/zero_steps": 3.0, "actor/skipped_steps": 1.0})
    assert not has_updated_weights(metrics | {"actor/lr": 0.0}) and not has_updated_weights({})


def test_registered_engine_has_held_weights(policy):
    engine = create_engine("hf", rollout_section(), str(policy))
    assert "model.embed_tokens.weight" in engine.held_weights()
