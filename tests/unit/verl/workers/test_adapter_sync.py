"""Tests of LoRA with engine ``hf``: the sync sends adapters, and requests name them."""

import pytest
import torch
from transformers import Qwen2MoeConfig

from tests.helpers.adapter_run import AdapterRun, save_random_adapter
from tests.helpers.engine_cases import ask, load
from tests.helpers.model_families import build_family
from tests.helpers.policy_rows import critic_config, policy_config, random_rows, wait_for_files
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.schema.sft import NewPolicyConfig
from verl.models.adapters import AdapterShape, read_adapter
from verl.models.export import save_adapters
from verl.models.lora import lora_scales
from verl.models.new_policy import build_policy
from verl.models.policy import LM_PREFIX
from verl.trainer.ppo import resources
from verl.trainer.ppo.resources import WeightSyncError
from verl.utils.weight_arrays import as_tensor
from verl.workers import actor as actor_module
from verl.workers import weight_transfer
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker
from verl.workers.engine_state import gather_full_weights
from verl.workers.rollout import EngineError, hf
from verl.workers.rollout.hf_adapters import HFAdapters


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=2, std=0.1)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Write a policy with linear attention (Qwen3.5), whose passes are row by row."""
    return build_policy(
        tmp_path_factory.mktemp("hybrid"),
        [" ".join(sorted(dir(torch))), " ".join(sorted(dir(torch.nn)))],
        NewPolicyConfig(
            architecture="qwen3_5",
            hidden_size=32,
            num_attention_heads=2,
            head_dim=32,
            intermediate_size=64,
        ),
        vocab_size=400,
    )


@pytest.fixture
def start(monkeypatch):
    """Return a function that starts an ``AdapterRun`` with engine ``hf``."""
    runs: list[AdapterRun] = []

    def start_run(directory, adapters=None, **model):
        run = AdapterRun("hf", directory, adapters, **model)
        for module in (resources, weight_transfer):
            monkeypatch.setattr(module, "gather_results", run.gather)
        runs.append(run)
        return run

    yield start_run
    for run in runs:
        run.close()


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "layers.1.mlp.up_proj"]])
def test_engine_samples_from_the_policy_with_its_adapter(policy, start, tmp_path, targets):
    run = start(policy, target_modules=targets)
    first = run.sync(0)["perf/weight_sync_bytes"]
    for version in (1, 2):
        assert run.update(version)
        sent = run.sync(version, is_updated=True)["perf/weight_sync_bytes"]
        gaps = run.measure_gaps({"policy": run.export_policy(tmp_path / str(version))})
        assert gaps["policy"] < 1e-5
    assert run.measure_gaps({"policy": load(policy)})["policy"] > 1e-3
    adapter = gather_full_weights(run.actor.train_engine, ".lora_")
    assert sent == sum(tensor.nbytes for tensor in adapter.values())
    base_bytes = sum(weight.nbytes for weight in load(policy).parameters())
    assert first == base_bytes + sent
    assert run.engine.policy_version == 2


def test_hybrid_gets_its_adapter_and_is_its_own_reference(hybrid, start, tmp_path):
    run = start(hybrid)
    assert any("in_proj_qkv.lora_A" in name for name, _ in run.actor.export_adapter())
    run.sync(0)
    data = random_rows(rows=4)
    plain = run.actor.compute_log_prob(data).batch["old_log_probs"]
    assert run.update()
    run.sync(1, is_updated=True)
    models = {"policy": run.export_policy(tmp_path / "merged"), "base": load(hybrid)}
    gaps = run.measure_gaps(models)
    assert max(gaps.values()) < 1e-5, gaps
    reference = run.actor.compute_ref_log_prob(data).batch["ref_log_prob"]
    torch.testing.assert_close(reference, plain, atol=1e-6, rtol=0)


@pytest.mark.parametrize("has_cache", [True, False])
def test_requests_of_one_batch_name_their_adapters(policy, start, tmp_path, monkeypatch, has_cache):
    if not has_cache:
        monkeypatch.setattr(hf, "_make_cache", lambda _: None)
    judge = save_random_adapter(policy, tmp_path / "judge")
    critic = save_random_adapter(policy, tmp_path / "critic", rank=2, targets=("down_proj",))
    run = start(policy, {"judge": tmp_path / "judge", "other-1": tmp_path / "critic"})
    run.sync(0)
    run.update()
    run.sync(1, is_updated=True)
    models = {
        "policy": run.export_policy(tmp_path / "merged"),
        "judge": judge,
        "other-1": critic,
        "base": load(policy),
    }
    for names in (models, ["base"], ["judge"], ["policy"]):
        gaps = run.measure_gaps({name: models[name] for name in names})
        assert max(gaps.values()) < 1e-5, gaps
    assert run.measure_gaps({"judge": models["base"]})["judge"] > 1e-2
    (request,) = ask(1)
    request.model = "nobody"
    with pytest.raises(ValueError, check=mentions("nobody", "judge", "base")):
        run.engine.add(request)


def test_names_of_methods_and_modules_can_name_adapters(policy, start, tmp_path):
    models = [
        save_random_adapter(policy, tmp_path / str(i), targets=(f"{part}_proj",))
        for i, part in enumerate(("up", "down"))
    ]
    names = ("eval", "train", "values", "0", "layers", "lora_A", "weight", "__base__", "default")
    run = start(policy, {name: tmp_path / str(i % 2) for i, name in enumerate(names)})
    run.sync(0)
    gaps = run.measure_gaps({name: models[i % 2] for i, name in enumerate(names)})
    assert max(gaps.values()) < 1e-5, gaps


def test_rows_of_one_batch_have_their_adapters_in_a_shared_expert():
    """A shared expert gets the tokens of all rows without a row dimension."""
    config = Qwen2MoeConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        shared_expert_intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    model = build_family(config).eval().requires_grad_(False)
    targets = ("shared_expert.up_proj", "q_proj")
    adapters = HFAdapters(model, {name: AdapterShape(2, targets) for name in ("one", "two")})
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.data.normal_()
    names = ["two", "base", "one"]
    ids = torch.arange(12).reshape(3, 4)
    adapters.set_row_adapters(names)
    mixed = model(input_ids=ids).logits
    for row, name in enumerate(names):
        adapters.set_row_adapters([name])
        expected = model(input_ids=ids[row : row + 1]).logits[0]
        torch.testing.assert_close(mixed[row], expected, atol=1e-5, rtol=0)


def test_adapter_that_the_engine_drops_ends_the_run(policy, start, monkeypatch):
    run = start(policy)
    run.sync(0)
    run.update()
    replace = HFAdapters.replace_adapter

    def keep_old(self, name, adapter):
        return replace(self, name, {key: value * 0 for key, value in adapter.items()})

    monkeypatch.setattr(HFAdapters, "replace_adapter", keep_old)
    with pytest.raises(EngineError, check=mentions("lora_")):
        run.sync(1, is_updated=True)


def test_adapter_changed_in_transit_ends_the_run(policy, start, monkeypatch):
    run = start(policy)
    run.sync(0)
    run.update()
    export = run.actor.export_adapter

    def export_zeros():
        return [(name, array * 0) for name, array in export()]

    monkeypatch.setattr(run.actor, "export_adapter", export_zeros)
    with pytest.raises(WeightSyncError, check=mentions("lora_B")):
        run.sync(1, is_updated=True)


def test_adapter_that_does_not_follow_the_gradient_ends_the_run(policy, start, monkeypatch):
    run = start(policy)
    run.sync(0)
    stale = gather_full_weights(run.actor.train_engine, ".lora_")
    assert run.update()
    monkeypatch.setattr(actor_module, "gather_full_weights", lambda *_: stale)
    with pytest.raises(WeightSyncError):
        run.sync(1, is_updated=True)


def test_adapter_without_its_tensors_is_not_sent(policy, start, monkeypatch):
    run = start(policy)
    run.sync(0)
    state = gather_full_weights(run.actor.train_engine, ".lora_")
    state.pop(next(name for name in state if ".lora_B." in name))
    monkeypatch.setattr(actor_module, "gather_full_weights", lambda *_: state)
    with pytest.raises(ValueError, check=mentions("lora_B")):
        run.sync(1)


@pytest.mark.parametrize("ranks", [0, 4])
def test_reference_is_the_base_model_without_adapter(policy, ranks):
    config = policy_config(policy)
    config.model.lora_rank = ranks
    actor = ActorWorker(config, device="cpu")
    actor.init_model()
    if not ranks:
        with pytest.raises(RuntimeError, check=mentions("reference")):
            actor.compute_ref_log_prob(random_rows())
        return
    reference = ActorWorker(config, role="ref", device="cpu")
    reference.init_model()
    data = random_rows()
    expected = reference.compute_ref_log_prob(data).batch["ref_log_prob"]
    for _ in range(2):
        actor.update_actor(data)
        trained = actor.compute_log_prob(data).batch["old_log_probs"]
        scores = actor.compute_ref_log_prob(data).batch["ref_log_prob"]
        torch.testing.assert_close(scores, expected, atol=1e-6, rtol=0)
        assert (trained - scores).abs().max() > 1e-3
        # The adapter is applied again afterwards.
        again = actor.compute_log_prob(data).batch["old_log_probs"]
        assert torch.equal(again, trained)


def test_resumed_and_exported_adapter_is_that_of_the_engine(policy, start, tmp_path):
    run = start(policy)
    run.update()
    sent = {name: as_tensor(array) for name, array in run.actor.export_adapter()}
    run.actor.save_checkpoint(str(tmp_path / "actor"))
    wait_for_files(run.actor)
    resumed = start(policy)
    resumed.actor.load_checkpoint(str(tmp_path / "actor"))
    loaded = {name: as_tensor(array) for name, array in resumed.actor.export_adapter()}
    assert sent.keys() == loaded.keys()
    assert all(torch.equal(sent[name], loaded[name]) for name in sent)
    state = gather_full_weights(run.actor.train_engine)
    save_adapters(run.actor.lm, state, LM_PREFIX, tmp_path / "adapter", policy)
    for name, tensor in read_adapter(tmp_path / "adapter").items():
        torch.testing.assert_close(tensor, sent[name])
    # The saved adapter serves another run as an adapter that is not trained.
    resumed = start(policy, {"earlier": tmp_path / "adapter"})
    resumed.sync(0)
    gaps = resumed.measure_gaps({"earlier": run.export_policy(tmp_path / "merged")})
    assert gaps["earlier"] < 1e-5


def test_critic_trains_an_adapter_of_its_own(policy, tmp_path):
    config = critic_config(policy)
    config.model.lora_rank, config.model.lora_alpha = 4, 8.0
    config.model.target_modules = ["q_proj", "layers.1.mlp.up_proj"]
    critic = CriticWorker(config, device="cpu")
    critic.init_model()
    scales = lora_scales(critic.train_engine.module)
    assert len(scales) == 3 and set(scales.values()) == {2.0}
    data = random_rows()
    before = gather_full_weights(critic.train_engine)
    for _ in range(2):
        critic.update_critic(data)
    after = gather_full_weights(critic.train_engine)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {name for name in after if ".lora_" in name or "value_head" in name}
    critic.save_checkpoint(str(tmp_path))
    wait_for_files(critic)
    resumed = CriticWorker(config, device="cpu")
    resumed.init_model()
    resumed.load_checkpoint(str(tmp_path))
    values = [worker.compute_values(data).batch["values"] for worker in (critic, resumed)]
    assert torch.equal(*values) and values[0].abs().max() > 0
