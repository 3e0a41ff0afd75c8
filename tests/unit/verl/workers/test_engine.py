"""Tests of the training engine: packed rows, schedule, skipped steps and saved state."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.policy_rows import (
    PROMPT,
    actor_of,
    critic_config,
    gradients,
    padded_scores,
    policy_config,
    random_rows,
)
from tests.helpers.refusals import list_logged, mentions
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.schema.model import OptimConfig
from verl.models.attention_calls import AttentionCalls
from verl.models.loader import load_causal_lm
from verl.models.packed_layout import layout_of_rows
from verl.models.policy import PolicyModel
from verl.models.token_scores import Targets, compute_float32_logits
from verl.models.weights import UnusableWeightsError
from verl.workers import engine as engine_module
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker
from verl.workers.engine import NonFiniteWeightsError, TrainEngine, learning_rate
from verl.workers.engine_state import gather_full_weights, load_engine, save_engine
from verl.workers.rows import Rows, make_micro_batches


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=2)


@pytest.fixture(scope="module")
def untied_policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("untied"), hidden=32, layers=1, tie=False)


def make_engine(path, optim=None, **options):
    return TrainEngine(PolicyModel(load_causal_lm(path, **options)), device="cpu", optim=optim)


def test_cudnn_attention_is_disabled_on_a_gpu_only(policy, monkeypatch):
    def refuse_group(_device: str) -> None:
        raise RuntimeError("no process group")

    torch.backends.cuda.enable_cudnn_sdp(True)
    make_engine(policy)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine_module, "init_distributed", refuse_group)
    with pytest.raises(RuntimeError, match="no process group"):
        TrainEngine(PolicyModel(load_causal_lm(policy)), device="cuda")
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def mean_log_prob(engine, data):
    rows = Rows(data)
    packed = rows.pack_rows(range(len(rows)))
    targets = rows.sampled_targets(packed, range(len(rows)))
    return engine.module(packed.input_ids, packed.position_ids, packed.layout, [targets])[
        0
    ].log_probs.mean()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("micro", [1, 3, 8])
def test_packed_scores_equal_padded_scores(policy, temperature, micro):
    data = random_rows()
    data.meta_info["temperature"] = temperature
    worker = actor_of(policy, ppo_micro_batch_size_per_gpu=micro)
    actual = worker.compute_log_prob(data).batch
    log_probs, entropy = padded_scores(policy, data, temperature)
    torch.testing.assert_close(actual["old_log_probs"], log_probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(actual["entropys"], entropy, atol=1e-5, rtol=0)


def test_rows_in_one_attention_call_are_independent(policy):
    """Rows of similar length share a padded call."""
    engine = make_engine(policy)
    rows = [torch.randint(3, 300, (length,)) for length in (20, 21, 22, 5, 60)]
    layout = layout_of_rows([len(row) for row in rows])
    assert [group.num_rows for group in AttentionCalls(layout).row_groups] == [3, 1, 1]

    def scores(chosen):
        ids = torch.cat(chosen)
        positions = torch.cat([torch.arange(len(row)) for row in chosen])
        with torch.no_grad():
            targets = [Targets(torch.arange(len(ids) - 1), ids[1:])]
            return engine.module(
                ids, positions, layout_of_rows([len(row) for row in chosen]), targets
            )[0].log_probs

    together, start = scores(rows), 0
    for row in rows:
        torch.testing.assert_close(
            together[start : start + len(row) - 1], scores([row]), atol=1e-5, rtol=0
        )
        start += len(row)


def test_gradient_of_packed_rows_equals_that_of_padded_rows(policy):
    data = random_rows(rows=4)
    engine = make_engine(policy, OptimConfig())
    engine.backward(mean_log_prob(engine, data), is_last_micro_batch=True)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    batch = data.batch
    logits = model(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        position_ids=batch["position_ids"],
    ).logits[:, PROMPT - 1 : -1]
    log_probs = logits.log_softmax(-1).gather(-1, batch["responses"][..., None])[..., 0]
    log_probs[batch["response_mask"].bool()].mean().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    for name, gradient in gradients(engine.module).items():
        torch.testing.assert_close(
            gradient, expected[name.removeprefix("lm.")], atol=1e-6, rtol=1e-4
        )


def test_gradient_checkpointing_does_not_change_gradients(policy):
    data = random_rows(rows=4)
    both = []
    for checkpointing in (False, True):
        engine = make_engine(policy, OptimConfig(), gradient_checkpointing=checkpointing)
        engine.module.train()
        engine.backward(mean_log_prob(engine, data), is_last_micro_batch=True)
        both.append(gradients(engine.module))
    torch.testing.assert_close(*both)


def test_bfloat16_compute_keeps_float32_masters(policy):
    data = random_rows(rows=4)
    engine = TrainEngine(
        PolicyModel(load_causal_lm(policy)), device="cpu", dtype="bfloat16", optim=OptimConfig()
    )
    exact = mean_log_prob(make_engine(policy), data)
    loss = mean_log_prob(engine, data)
    engine.backward(loss, is_last_micro_batch=True)
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    assert {gradient.dtype for gradient in gradients(engine.module).values()} == {torch.float32}
    assert loss != exact and abs(loss - exact) < 0.05


def test_logits_of_bfloat16_layers_are_not_rounded():
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(64, 100).bfloat16(), (10 * torch.randn(8, 64)).bfloat16()
    exact = hidden.double() @ head.weight.double().T + head.bias.double()
    assert (compute_float32_logits(head, hidden) - exact).abs().max() < 1e-4
    assert (head(hidden) - exact).abs().max() > 1e-2


def test_training_state_continues_exactly(policy, tmp_path):
    """A new engine that loads the save of step 2 takes the same steps 3 and 4."""
    optim = OptimConfig(lr=1e-2, warmup_style="cosine", lr_warmup_steps=2, total_training_steps=6)

    def train(engine, steps):
        for step in steps:
            loss = -mean_log_prob(engine, random_rows(rows=4, seed=step))
            engine.backward(loss, is_last_micro_batch=True)
            engine.step()

    first = make_engine(policy, optim)
    train(first, (0, 1))
    save_engine(first, tmp_path).wait_for_files()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "engine.json",
        "rng_rank0.safetensors",
        *(f"shard-00001-model-0000{kind}-of-00004.safetensors" for kind in (1, 2, 3, 4)),
    ]
    train(first, (2, 3))
    second = make_engine(policy, optim)
    load_engine(second, tmp_path)
    train(second, (2, 3))
    assert second.steps == 4
    for name, tensor in gather_full_weights(first).items():
        torch.testing.assert_close(gather_full_weights(second)[name], tensor, atol=0, rtol=0)


@pytest.mark.parametrize(("saves_optimizer", "num_warnings"), [(True, 0), (False, 1)])
def test_missing_moments_are_reported(policy, tmp_path, caplog, saves_optimizer, num_warnings):
    first = make_engine(policy, OptimConfig(lr=1e-2))
    first.backward(-mean_log_prob(first, random_rows(rows=4, seed=0)), is_last_micro_batch=True)
    first.step()
    save_engine(first, tmp_path, saves_optimizer=saves_optimizer).wait_for_files()
    load_engine(make_engine(policy, OptimConfig(lr=1e-2)), tmp_path)
    assert len(list_logged(caplog, load_engine.__module__, tmp_path)) == num_warnings


def test_fused_step_equals_the_plain_step_and_continues(policy, tmp_path, monkeypatch):
    """The fused step is one kernel, as on CUDA. PyTorch also has it for CPUs."""

    def train(engine, seeds):
        for seed in seeds:
            loss = -mean_log_prob(engine, random_rows(rows=4, seed=seed))
            engine.backward(loss, is_last_micro_batch=True)
            engine.step()
        return gather_full_weights(engine)

    plain = train(make_engine(policy, OptimConfig(lr=1e-2)), range(3))
    monkeypatch.setattr(engine_module, "can_use_fused_adamw", lambda _: True)
    first = make_engine(policy, OptimConfig(lr=1e-2))
    train(first, range(2))
    save_engine(first, tmp_path).wait_for_files()
    second = make_engine(policy, OptimConfig(lr=1e-2))
    load_engine(second, tmp_path)
    assert second.optimizer is not None and second.optimizer.defaults["fused"]
    for name, tensor in train(second, [2]).items():
        torch.testing.assert_close(tensor, plain[name], atol=1e-6, rtol=1e-5)


def test_state_of_another_model_is_refused(policy, untied_policy, tmp_path):
    save_engine(make_engine(policy, OptimConfig()), tmp_path).wait_for_files()
    with pytest.raises(ValueError):
        load_engine(make_engine(untied_policy, OptimConfig()), tmp_path)


def test_non_finite_gradient_is_skipped(policy):
    engine = make_engine(policy, OptimConfig(lr=1e-2))
    before = gather_full_weights(engine)
    engine.backward(mean_log_prob(engine, random_rows(rows=2)) * math.nan, is_last_micro_batch=True)
    report = engine.step()
    assert report.is_skipped and engine.steps == 1
    for name, tensor in gather_full_weights(engine).items():
        torch.testing.assert_close(tensor, before[name], atol=0, rtol=0)
    engine.backward(mean_log_prob(engine, random_rows(rows=2)), is_last_micro_batch=True)
    assert not engine.step().is_skipped


def test_zero_gradient_does_not_change_the_weights(policy):
    """Neither weight decay nor the momentum of an earlier step changes them."""
    engine = make_engine(policy, OptimConfig(lr=1e-2, weight_decay=0.5))
    engine.backward(mean_log_prob(engine, random_rows(rows=2)), is_last_micro_batch=True)
    engine.step()
    before = gather_full_weights(engine)
    engine.backward(mean_log_prob(engine, random_rows(rows=2)) * 0.0, is_last_micro_batch=True)
    assert engine.step().has_zero_gradient
    for name, tensor in gather_full_weights(engine).items():
        torch.testing.assert_close(tensor, before[name], atol=0, rtol=0)


def test_learning_rate_warms_up_and_decays():
    cosine = OptimConfig(
        lr=1.0,
        warmup_style="cosine",
        lr_warmup_steps=2,
        min_lr_ratio=0.1,
        total_training_steps=12,
    )
    rates = [learning_rate(step, cosine) for step in range(12)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[-1] == pytest.approx(0.1)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    constant = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.25, total_training_steps=8)
    assert [learning_rate(step, constant) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("tied", [True, False])
def test_exported_directory_loads_with_the_same_numbers(policy, untied_policy, tied, tmp_path):
    source = policy if tied else untied_policy
    config = policy_config(source)
    worker = ActorWorker(config, device="cpu")
    worker.init_model()
    data = random_rows()
    worker.update_actor(data)
    worker.export_hf(str(tmp_path / "hf"))
    log_probs, _ = padded_scores(tmp_path / "hf", data)
    actual = worker.compute_log_prob(data).batch["old_log_probs"]
    torch.testing.assert_close(actual, log_probs, atol=1e-5, rtol=0)
    names = set(load_file(tmp_path / "hf" / "model.safetensors"))
    assert ("lm_head.weight" in names) is not tied
    assert names == {name for name, _ in worker.export_weights()}
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").encode(
        "go to"
    ) == AutoTokenizer.from_pretrained(source).encode("go to")


def test_exported_weights_are_copies(policy):
    worker = actor_of(policy)
    exported = dict(worker.export_weights())
    before = {name: np.array(value) for name, value in exported.items()}
    worker.update_actor(random_rows())
    assert all(np.array_equal(exported[name], before[name]) for name in before)
    after = dict(worker.export_weights())
    assert any(not np.array_equal(after[name], before[name]) for name in before)


def test_lora_trains_adapters_and_exports_merged_weights(policy, tmp_path):
    config = policy_config(policy)
    config.model.lora_rank = 4
    worker = ActorWorker(config, device="cpu")
    worker.init_model()
    data = random_rows()
    plain, _ = padded_scores(policy, data)
    initial = worker.compute_log_prob(data).batch["old_log_probs"]
    torch.testing.assert_close(initial, plain, atol=1e-5, rtol=0)  # adapters start at zero
    worker.update_actor(data)
    worker.update_actor(data)
    trained = worker.compute_log_prob(data).batch["old_log_probs"]
    assert (trained - plain).abs().max() > 1e-4
    worker.export_hf(str(tmp_path / "hf"))
    merged, _ = padded_scores(tmp_path / "hf", data)
    torch.testing.assert_close(trained, merged, atol=1e-5, rtol=0)
    names = {name for name, _ in worker.export_weights()}
    assert not any("lora" in name or "base_layer" in name for name in names)


def test_missing_models_are_named(tmp_path):
    with pytest.raises(ValueError, check=mentions(str(tmp_path), "config.json")):
        load_causal_lm(tmp_path)
    policy = make_tiny_policy(tmp_path / "policy")
    (policy / "model.safetensors").unlink()
    with pytest.raises(UnusableWeightsError, check=mentions("model.safetensors")):
        load_causal_lm(policy)


def test_micro_batches_hold_every_row_once():
    lengths = [5, 100, 7, 6, 40]
    assert make_micro_batches(lengths, max_rows=2) == [[0, 3], [2, 4], [1]]
    assert make_micro_batches(lengths, max_tokens=50) == [
        [0, 3, 2],
        [4],
        [1],
    ]  # a row above the limit is alone


def test_rows_without_a_prompt_are_refused():
    data = random_rows(rows=2)
    data.batch["attention_mask"][1, :PROMPT] = 0
    with pytest.raises(ValueError, check=mentions("row 1")):
        Rows(data)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["lm.model.norm.weight", "lm.model.embed_tokens.weight"])
def test_non_finite_weights_are_neither_trained_nor_resumed(policy, tmp_path, name, value):
    engine = make_engine(policy, OptimConfig())
    engine.check_finite_weights()
    with torch.no_grad():
        dict(engine.module.named_parameters())[name].data.view(-1)[-1] = value
    with pytest.raises(NonFiniteWeightsError, check=mentions(name)):
        engine.check_finite_weights()
    save_engine(engine, tmp_path).wait_for_files()
    with pytest.raises(NonFiniteWeightsError, check=mentions(name)):
        load_engine(make_engine(policy, OptimConfig()), tmp_path)


def test_update_to_infinite_weights_raises(policy):
    data = random_rows()
    actor = ActorWorker(policy_config(policy), device="cpu")
    critic = CriticWorker(critic_config(policy), device="cpu")
    for worker, update in ((actor, "update_actor"), (critic, "update_critic")):
        worker.init_model()
        optim: Any = worker.train_engine.optim
        optim.lr = math.inf  # no config allows this value
        with pytest.raises(NonFiniteWeightsError):
            getattr(worker, update)(data)
