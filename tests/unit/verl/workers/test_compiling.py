"""Tests that compiled layers equal plain layers to rounding, for any number of tokens."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config

from tests.helpers.policy_rows import gradients, policy_config, random_rows
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.schema.model import OptimConfig
from verl.models.loader import load_causal_lm
from verl.models.policy import PolicyModel
from verl.workers.actor import ActorWorker
from verl.workers.engine import TrainEngine, compile_blocks
from verl.workers.rows import Rows


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=2, std=0.2)


@pytest.fixture(scope="module")
def small_policy(tmp_path_factory):
    """Return a policy of one layer: compiling with a C++ compiler is slow."""
    return make_tiny_policy(tmp_path_factory.mktemp("small"), hidden=32, layers=1, std=0.2)


@pytest.fixture(autouse=True)
def reset_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run_passes(engine, checkpointing=False):
    """Return log-probs and gradients of micro-batches of three sizes."""
    rows = Rows(random_rows(rows=6))
    engine.module.train(checkpointing)
    log_probs = []
    for index in ([0], [1, 2], [3, 4, 5]):
        packed = rows.pack_rows(index)
        targets = [rows.sampled_targets(packed, index)]
        scores = engine.module(packed.input_ids, packed.position_ids, packed.layout, targets)[0]
        engine.backward(scores.log_probs.sum() / len(rows), is_last_micro_batch=True)
        log_probs.append(scores.log_probs.detach())
    return log_probs, gradients(engine.module)


def make_engine(policy, compiled, checkpointing=False):
    lm = load_causal_lm(policy, gradient_checkpointing=checkpointing)
    return TrainEngine(PolicyModel(lm), device="cpu", optim=OptimConfig(), compiled=compiled)


def test_compiled_scores_and_gradients_equal_plain_ones(small_policy):
    plain, compiled = (
        run_passes(make_engine(small_policy, compiled)) for compiled in (False, True)
    )
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-4)


def test_layers_share_graphs_for_any_number_of_tokens(policy, monkeypatch):
    """The graphs of one model also serve a second equal model."""
    counter = CompileCounterWithBackend("eager")
    compile_function = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda call, dynamic=None: compile_function(call, dynamic=dynamic, backend=counter),
    )
    run_passes(make_engine(policy, True, checkpointing=True), checkpointing=True)
    frame_count = counter.frame_count
    assert frame_count > 2  # the trial, the part before attention and the part after it
    run_passes(make_engine(policy, True, checkpointing=True), checkpointing=True)
    assert counter.frame_count == frame_count


def test_compiled_layers_keep_the_weight_names(policy):
    module = PolicyModel(load_causal_lm(policy))
    names = list(module.state_dict())
    compile_blocks(module, "cpu")
    assert list(module.state_dict()) == names


@pytest.mark.parametrize("role", ["actor", "ref"])
def test_use_torch_compile_compiles_policy_and_reference(policy, monkeypatch, role):
    devices = []
    monkeypatch.setattr(
        "verl.workers.engine.compile_blocks", lambda module, device: devices.append(device)
    )
    for is_compiled in (False, True):
        config = policy_config(policy, use_torch_compile=is_compiled)
        ActorWorker(config, role=role, device="cpu").init_model()
    assert devices == ["cpu"]


def test_missing_compiler_is_reported(policy, monkeypatch):
    monkeypatch.setattr(inductor_config.cpp, "cxx", ("/nowhere/c++",))
    monkeypatch.setattr(inductor_config, "force_disable_caches", True)
    module = PolicyModel(load_causal_lm(policy))
    with pytest.raises(RuntimeError, check=mentions("use_torch_compile=true", "C++")):
        compile_blocks(module, "cpu")
