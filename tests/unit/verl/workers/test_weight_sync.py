"""Every hand-over of weights proves itself: what was dropped on the way, or did not change, ends
the run at once.
"""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.engine_cases import rollout_section
from tests.helpers.policy_rows import policy_config, random_rows
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_policy
from tests.helpers.trainer_fakes import LocalActorGroup, LocalHandle
from verl.names import EngineDtype
from verl.trainer.ppo import resources
from verl.trainer.ppo.resources import WeightSyncError, has_updated_weights
from verl.utils import fingerprint as fingerprints
from verl.utils.fingerprint import compute_fingerprint
from verl.utils.tensor_arrays import as_array, as_tensor
from verl.workers import actor as actor_module
from verl.workers.actor import ActorWorker
from verl.workers.rollout import EngineError, RolloutWorker, create_engine, engine_calls
from verl.workers.rollout.hf import HFEngine
from verl.workers.rollout.weight_receipt import WeightReceipt


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1)


# ---------------------------------------------------------------- fingerprints


def test_a_fingerprint_is_of_bits_and_places():
    torch.manual_seed(0)
    values = torch.randn(20, 30)
    same = compute_fingerprint(values)
    assert compute_fingerprint(values.numpy()) == compute_fingerprint(values.clone()) == same
    assert compute_fingerprint(values.T) != same and compute_fingerprint(values.flip(0)) != same
    nudged = values.clone()
    nudged[7, 3] = torch.nextafter(nudged[7, 3], torch.tensor(10.0))
    assert compute_fingerprint(nudged) != same
    assert compute_fingerprint(nudged, torch.bfloat16) == compute_fingerprint(values.bfloat16())
    assert compute_fingerprint(torch.zeros(0)) == 0


def test_a_large_tensor_is_read_in_part_and_in_every_column(monkeypatch):
    monkeypatch.setattr(fingerprints, "MAX_VALUES_READ", 64)
    values = torch.zeros(64, 16)
    read = 0
    for column in range(16):
        values.zero_()[:, column] = 1.0
        read += compute_fingerprint(values) != 0
    assert read == 16
    values.zero_().view(-1)[1] = 1.0  # between two of those that are read
    assert compute_fingerprint(values) == 0


def test_read_only_arrays_are_taken():
    values = np.ones(5, dtype=np.float32)
    values.flags.writeable = False
    assert compute_fingerprint(values) == compute_fingerprint(torch.ones(5)) != 0


# ---------------------------------------------------------------- engines and workers


class Dropping(HFEngine):
    """Takes new weights and goes on with the old ones."""

    taken = True

    def update_weights(self, weights, version):
        if self.taken:
            list(weights)


class Deaf(Dropping):
    """Does not look at new weights at all."""

    taken = False


@pytest.fixture(autouse=True)
def gather_here(monkeypatch):
    """``gather`` without Ray: a reference is the call itself, one among its arguments too."""
    loop = asyncio.new_event_loop()
    workers: list[RolloutWorker] = []

    def value(ref: Any) -> Any:
        if not isinstance(ref, tuple):
            return ref
        worker, method, args = ref
        answer = getattr(worker, method)(*map(value, args))
        if not asyncio.iscoroutine(answer):
            return answer
        workers.append(worker)
        return loop.run_until_complete(answer)

    for module in (resources, engine_calls):
        monkeypatch.setattr(module, "gather_results", lambda refs, *_: [value(ref) for ref in refs])
    yield
    for worker in workers:
        loop.run_until_complete(worker.close())
    loop.close()


def engine_of(policy, cls: type[HFEngine] = HFEngine, dtype: str = "float32") -> HFEngine:
    return cls(rollout_section(dtype=dtype), str(policy))


def start(
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


def update(workers: resources.TrainingWorkers) -> bool:
    """One update of the policy; whether it moved."""
    group: Any = workers.actor_group
    return has_updated_weights(group.worker.update_actor(random_rows(rows=4)).meta_info["metrics"])


@pytest.mark.parametrize("lora", [0, 4])
def test_weights_arrive_in_engines_of_both_precisions(policy, lora):
    engines = [engine_of(policy, dtype=dtype) for dtype in ("float32", "bfloat16")]
    workers = start(policy, *engines, lora_rank=lora)
    workers.sync_weights(0)
    moved = update(workers)
    assert moved
    before = engines[0].held_weights()["model.layers.0.mlp.up_proj.weight"].clone()
    workers.sync_weights(1, moved)
    assert [engine.policy_version for engine in engines] == [1, 1]
    assert not torch.equal(engines[0].held_weights()["model.layers.0.mlp.up_proj.weight"], before)


def test_weights_travel_in_the_precision_of_the_engines(policy):
    engine = engine_of(policy, dtype="bfloat16")
    workers = start(policy, engine, dtype="bfloat16")
    group: Any = workers.actor_group
    shipped = dict(group.worker.export_weights())
    assert {array.dtype for array in shipped.values()} == {np.dtype(np.uint16)}
    workers.sync_weights(0)
    moved = update(workers)
    workers.sync_weights(1, moved)
    held = engine.held_weights()
    masters = actor_module.full_weights(group.worker.train_engine)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(held[name], masters[f"{actor_module.PREFIX}{name}"].bfloat16())


def test_a_step_too_small_for_the_precision_of_the_engines_is_none_that_was_lost(policy):
    engine = engine_of(policy, dtype="bfloat16")
    workers = start(policy, engine, dtype="bfloat16", lr=1e-9)
    group: Any = workers.actor_group
    workers.sync_weights(0)
    before = group.worker.weight_fingerprints()
    moved = update(workers)
    assert moved
    workers.sync_weights(1, moved)
    after = group.worker.weight_fingerprints()
    name = "model.layers.0.mlp.up_proj.weight"
    assert before.master_weights[name] != after.master_weights[name]
    assert before.sent_weights[name] == after.sent_weights[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_array_is_the_tensor_again(dtype):
    tensor = torch.randn(3, 5)
    array = as_array(tensor, dtype)
    array.flags.writeable = False
    found = as_tensor(array)
    assert found.dtype is dtype and torch.equal(found, tensor.to(dtype))
    assert (
        compute_fingerprint(array)
        == compute_fingerprint(found)
        == compute_fingerprint(tensor, dtype)
    )
    assert as_tensor(tensor) is tensor


@pytest.mark.parametrize("lora", [0, 4])
def test_an_engine_that_drops_a_sync_ends_the_run_in_the_same_step(policy, lora):
    workers = start(policy, engine_of(policy), engine_of(policy, Dropping), lora_rank=lora)
    workers.sync_weights(0)  # the weights it has from disk are those that are sent
    moved = update(workers)
    with pytest.raises(EngineError, check=mentions("model")):
        workers.sync_weights(1, moved)


def test_an_engine_that_hears_nothing_ends_the_run_at_the_first_sync(policy):
    workers = start(policy, engine_of(policy), engine_of(policy, Deaf))
    with pytest.raises(WeightSyncError, check=mentions("worker 1", "version 0")) as raised:
        workers.sync_weights(0)
    assert "model.embed_tokens" in str(raised.value)


def test_weights_that_are_changed_on_the_way_are_noticed(policy, monkeypatch):
    workers = start(policy, engine_of(policy))
    group: Any = workers.actor_group
    real = group.worker.export_weights

    def torn() -> list[tuple[str, np.ndarray]]:
        (name, first), *others = real()
        return [(name, np.nextafter(first, np.float32(9.0))), *others]

    monkeypatch.setattr(group.worker, "export_weights", torn)
    with pytest.raises(WeightSyncError, check=mentions("1 of")):
        workers.sync_weights(0)


def test_an_engine_of_somebody_elses_that_shows_no_weights_is_believed(policy):
    class Closed:
        policy_version = 0

        def update_weights(self, weights, _version):
            self.policy_version = len(list(weights))

        def close(self):
            pass

    engine: Any = Closed()
    start(policy, engine).sync_weights(0)
    assert engine.policy_version == len(engine_of(policy).held_weights()) - 1  # a tied head


def test_what_is_fused_repacked_or_quantised_is_not_read_back():
    sent = [(name, torch.ones(2, 2)) for name in ("same", "fused", "fp8", "elsewhere", "stale")]
    held = {
        "same": torch.ones(2, 2).bfloat16(),
        "fused": torch.zeros(6, 2),
        "fp8": torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
        "stale": torch.zeros(2, 2),
    }
    arrival = WeightReceipt(held)
    assert len(list(arrival.record_weights(sent))) == len(arrival.received) == 5
    with pytest.raises(EngineError, check=mentions("1 of the 2", "stale")):
        arrival.verify_held(held)
    held["stale"] = torch.ones(2, 2)
    assert arrival.verify_held(held) == 2


# ---------------------------------------------------------------- movement


@pytest.mark.parametrize("lora", [0, 4])
def test_weights_that_do_not_move_with_the_gradient_end_the_run(policy, monkeypatch, lora):
    """As when adapters do not reach what is handed out, or the optimizer holds other tensors."""
    workers = start(policy, engine_of(policy), lora_rank=lora)
    first = actor_module.full_weights(workers.actor_group.worker.train_engine)  # pyright: ignore
    monkeypatch.setattr(actor_module, "full_weights", lambda _: first)
    workers.sync_weights(0)
    moved = update(workers)
    assert moved
    with pytest.raises(WeightSyncError):
        workers.sync_weights(1, moved)
    workers.sync_weights(1)  # without a step there is nothing to be seen


def test_a_step_that_was_left_out_moves_nothing():
    taken = {"actor/optimizer_steps": 4.0, "actor/lr": 1e-6}
    assert has_updated_weights(taken) and has_updated_weights(taken | {"actor/zero_steps": 3.0})
    assert not has_updated_weights(taken | {"actor/zero_steps": 3.0, "actor/skipped_steps": 1.0})
    assert not has_updated_weights(taken | {"actor/lr": 0.0}) and not has_updated_weights({})


def test_engines_by_name_show_their_weights(policy):
    engine = create_engine("hf", rollout_section(), str(policy))
    assert "model.embed_tokens.weight" in engine.held_weights()
