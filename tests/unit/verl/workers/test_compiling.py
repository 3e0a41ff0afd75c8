"""Compiled layers give the numbers of plain ones to rounding, for every number of tokens."""

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
def small(tmp_path_factory):
    """Of one layer: a C++ compiler takes its time."""
    return make_tiny_policy(tmp_path_factory.mktemp("small"), hidden=32, layers=1, std=0.2)


@pytest.fixture(autouse=True)
def forgetful():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def passes(engine, checkpointing=False):
    """Log-probs and gradients of micro-batches of three sizes."""
    rows = Rows(random_rows(rows=6))
    engine.module.train(checkpointing)
    found = []
    for index in ([0], [1, 2], [3, 4, 5]):
        packed = rows.pack_rows(index)
        targets = [rows.sampled_targets(packed, index)]
        scores = engine.module(packed.input_ids, packed.position_ids, packed.layout, targets)[0]
        engine.backward(scores.log_probs.sum() / len(rows), is_last_micro_batch=True)
        found.append(scores.log_probs.detach())
    return found, gradients(engine.module)


def engine_of(policy, compiled, checkpointing=False):
    lm = load_causal_lm(policy, gradient_checkpointing=checkpointing)
    return TrainEngine(PolicyModel(lm), device="cpu", optim=OptimConfig(), compiled=compiled)


def test_scores_and_gradients_agree_to_rounding(small):
    plain, compiled = (passes(engine_of(small, compiled)) for compiled in (False, True))
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-4)


def test_layers_share_graphs_that_fit_every_number_of_tokens(policy, monkeypatch):
    """Those of one model serve another one like it, in all its layers and sizes."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda call, dynamic=None: compiled(call, dynamic=dynamic, backend=counter),
    )
    passes(engine_of(policy, True, checkpointing=True), checkpointing=True)
    seen = counter.frame_count
    assert seen > 2  # the trial, what stands before attention and what after it
    passes(engine_of(policy, True, checkpointing=True), checkpointing=True)
    assert counter.frame_count == seen


def test_names_of_weights_are_those_of_plain_layers(policy):
    module = PolicyModel(load_causal_lm(policy))
    names = list(module.state_dict())
    compile_blocks(module, "cpu")
    assert list(module.state_dict()) == names


@pytest.mark.parametrize("role", ["actor", "ref"])
def test_the_key_compiles_policy_and_reference(policy, monkeypatch, role):
    taken = []
    monkeypatch.setattr(
        "verl.workers.engine.compile_blocks", lambda module, device: taken.append(device)
    )
    for wanted in (False, True):
        config = policy_config(policy, use_torch_compile=wanted)
        ActorWorker(config, role=role, device="cpu").init_model()
    assert taken == ["cpu"]


def test_a_machine_without_a_compiler_is_told_so(policy, monkeypatch):
    monkeypatch.setattr(inductor_config.cpp, "cxx", ("/nowhere/c++",))
    monkeypatch.setattr(inductor_config, "force_disable_caches", True)
    module = PolicyModel(load_causal_lm(policy))
    with pytest.raises(RuntimeError, check=mentions("use_torch_compile=true", "C++")):
        compile_blocks(module, "cpu")
