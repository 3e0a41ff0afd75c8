"""Tests that a policy, a critic and an engine on a GPU never combine tensors of two devices.

``fakegpu`` computes on the CPU, so all results equal those on the CPU. The tests need a process in
which nothing was differentiated before: torch counts the devices at the first backward pass.
"""

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.helpers.fake_gpu import fake_gpu
from tests.helpers.policy_rows import add_branches, policy_config, random_rows, share_prefixes
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.schema.critic import CriticConfig, RewardModelConfig
from verl.config.schema.model import FSDPConfig
from verl.models.architecture import choose_forward_kind
from verl.models.forward_kind import RowWiseForward
from verl.models.loader import load_causal_lm
from verl.models.packed_attention import MAX_GRAPHS, increase_recompile_limit
from verl.models.policy import PolicyModel, ValueModel
from verl.models.prefix_tree import pack_rows
from verl.models.token_scores import compute_float32_logits
from verl.protocol import DataProto, object_array
from verl.records import (
    CHOICE_CREDIT,
    CHOICE_OLD_LOG_PROBS,
    CHOICE_POSTERIOR,
    MESSAGES,
    RestrictedTokenLoss,
)
from verl.utils.sampling import SamplingRequest
from verl.workers.actor import ActorWorker
from verl.workers.branch_scores import compute_log_probs_and_scores
from verl.workers.critic import CriticWorker
from verl.workers.engine import TrainEngine
from verl.workers.policy_loss import PolicyLoss, compute_denominators
from verl.workers.reward_model import RewardModelWorker, last_token_scores
from verl.workers.rollout.hf import HFEngine

SAMPLING: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"temperature": 0.0}, {"top_k": 5}]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def device():
    with fake_gpu() as name:
        weight = torch.ones(1, requires_grad=True)
        try:
            weight.to(name).sum().backward()
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            pytest.skip("needs a process without a backward pass before: pytest tests/fake_gpu")
        yield name


def make_engine(module, device, prefix_tree=False):
    """Return an engine without FSDP, whose parameters are on ``device``."""
    engine = TrainEngine.__new__(TrainEngine)
    engine.device, engine.module = device, module.to(device)
    if isinstance(module, PolicyModel):
        module.lm.tie_weights()  # ``to`` copies the parameters of this device one by one
    engine.prefix_tree, engine.sequence_ranks, engine.fsdp = prefix_tree, 1, FSDPConfig()
    return engine


def get_gradient(parameter):
    assert parameter.grad is not None
    return parameter.grad.cpu()


def choice_columns(data):
    shape = (*data.batch["responses"].shape, 2)
    draw = torch.Generator().manual_seed(1)
    return {
        CHOICE_CREDIT: torch.randn(shape, generator=draw),
        CHOICE_OLD_LOG_PROBS: torch.randn(shape, generator=draw) - 5,
        CHOICE_POSTERIOR: torch.rand(shape, generator=draw),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("merged", [False, True])
def test_scores_equal_those_on_the_cpu(policy, device, merged, dtype):
    data = add_branches(share_prefixes(random_rows(rows=6)))
    results = []
    for name in ("cpu", device):
        module = PolicyModel(load_causal_lm(policy)).to(dtype)
        engine = make_engine(module, name, merged)
        results.append(compute_log_probs_and_scores(engine, data, max_rows=4))
    on_cpu, on_gpu = results
    assert {on_gpu.log_probs.device.type, on_gpu.entropy.device.type} == {"cpu"}
    # In bfloat16 the attention of fakegpu rounds otherwise than that of the CPU.
    tolerance = {"atol": 1e-5 if dtype == torch.float32 else 0.05, "rtol": 0}
    torch.testing.assert_close(on_gpu.log_probs, on_cpu.log_probs, **tolerance)
    on_gpu_branches, on_cpu_branches = (
        torch.tensor([score.logprob for row in scores.branch_scores for score in row])
        for scores in (on_gpu, on_cpu)
    )
    torch.testing.assert_close(on_gpu_branches, on_cpu_branches, **tolerance)


@pytest.mark.parametrize("loss_mode", ["vanilla", "clip_cov"])
def test_policy_loss_and_gradient_equal_those_on_the_cpu(policy, device, loss_mode):
    config = policy_config(policy, use_kl_loss=True, entropy_coeff=0.01).actor
    config.policy_loss.loss_mode = loss_mode
    data = random_rows(rows=4)
    for name, column in choice_columns(data).items():
        data.batch[name] = column
    results = []
    for name in ("cpu", device):
        worker = ActorWorker.__new__(ActorWorker)
        worker.config, worker.device_name = policy_config(policy), name
        worker._engine = make_engine(PolicyModel(load_causal_lm(policy)), name)
        loss = PolicyLoss(config, RestrictedTokenLoss((5, 6), 0.1, "level"), name)
        denominators = compute_denominators(data, [0, 1, 2, 3], config.loss_agg_mode)
        token_selector = loss.make_token_selector(data, [0, 1, 2, 3])
        rows = worker._make_rows(data)
        value, metrics = worker._compute_micro_batch_loss(
            loss, rows, data, denominators, token_selector, [0, 2, 3]
        )
        value.backward()
        gradients = {n: get_gradient(p) for n, p in worker._engine.module.named_parameters()}
        results.append((value.item(), {n: m.item() for n, m in metrics.items()}, gradients))
    torch.testing.assert_close(results[1], results[0])


def test_value_loss_equals_that_on_the_cpu(policy, device):
    data = random_rows(rows=4)
    results = []
    for name in ("cpu", device):
        worker = CriticWorker.__new__(CriticWorker)
        worker.config, worker.device_name = CriticConfig(), name
        worker._engine = make_engine(ValueModel(load_causal_lm(policy)), name)
        denominators = compute_denominators(data, [0, 1, 2, 3], "token-mean")
        rows = worker._make_rows(data)
        loss, metrics = worker._compute_micro_batch_loss(rows, data, denominators, [0, 2])
        loss.backward()
        results.append((loss.item(), {n: m.item() for n, m in metrics.items()}))
    torch.testing.assert_close(results[1], results[0])


def test_row_wise_scores_equal_those_on_the_cpu(policy, device):
    data = add_branches(random_rows(rows=4))
    results = []
    for name in ("cpu", device):
        module = PolicyModel(load_causal_lm(policy))
        module.forward_kind = RowWiseForward("eager")
        results.append(compute_log_probs_and_scores(make_engine(module, name), data, max_rows=4))
    torch.testing.assert_close(results[1].log_probs, results[0].log_probs)


def test_forward_kind_is_chosen_on_the_device(policy, device):
    model = load_causal_lm(policy)
    assert choose_forward_kind(model.to(device)) == model.forward_kind


def test_reward_scores_equal_those_on_the_cpu(policy, device):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).eval()
    rows = [[3, 4, 5], [6, 7]]
    on_cpu = last_token_scores(model, rows)
    torch.testing.assert_close(last_token_scores(model.to(device), rows), on_cpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_engine_samples_as_on_the_cpu(policy, device, dtype):
    tokenizer = AutoTokenizer.from_pretrained(policy)
    results = []
    for name in ("cpu", device):
        model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype=dtype).eval()
        if dtype == torch.bfloat16:
            head = model.get_output_embeddings()
            head.forward = partial(compute_float32_logits, head)
        engine = HFEngine.wrap_model(model.to(name), tokenizer, [])
        for number, sampling in enumerate(SAMPLING):
            prompt = [3, 4, 5][: number + 1]
            request = SamplingRequest(str(number), prompt, max_tokens=4, seed=7, **sampling)
            engine.add(request)
        finished = []
        while engine.has_work():
            finished += engine.step()
        results.append({r.request_id: (r.token_ids, r.logprobs) for r in finished})
    for request_id, (token_ids, logprobs) in results[1].items():
        assert token_ids == results[0][request_id][0]
        assert logprobs == pytest.approx(results[0][request_id][1], abs=0.01)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 1)])
def test_float32_logits_of_every_shape(device, shape):
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(8, 11).bfloat16(), torch.randn(*shape, 8).bfloat16()
    expected = compute_float32_logits(head, hidden)
    logits = compute_float32_logits(head.to(device), hidden.to(device))
    assert logits.shape == (*shape, 11)
    torch.testing.assert_close(logits.cpu(), expected)


def test_tensors_of_two_devices_are_refused(device):
    on_gpu = torch.zeros(3, device=device)
    with pytest.raises(RuntimeError, match="two devices"):
        torch.add(on_gpu, torch.zeros(3))


# ---- memory that a training process must free before the rollout engine on the same GPU wakes


@pytest.fixture
def cache_clearings(monkeypatch):
    clearings: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: clearings.append(True))
    return clearings


@pytest.mark.parametrize("offload_policy", [False, True])
def test_passes_on_a_gpu_free_cached_memory(policy, cache_clearings, offload_policy, monkeypatch):
    engine = TrainEngine(PolicyModel(load_causal_lm(policy)), device="cpu")
    engine.device, engine.fsdp = "cuda", FSDPConfig(offload_policy=offload_policy)
    monkeypatch.setattr(engine.module, "to", lambda _: engine.module)
    with engine.model_on_device():
        assert not cache_clearings
    assert cache_clearings


def test_reward_scores_on_a_gpu_free_cached_memory(cache_clearings):
    worker = RewardModelWorker(RewardModelConfig(), device="cpu")
    worker.device_name = "cuda"
    data = DataProto.from_dict({"x": torch.zeros(1, 1)}, {MESSAGES: object_array([[]])})
    worker.compute_rm_score(data)
    assert cache_clearings


def test_values_of_bfloat16_layers_are_not_rounded(policy):
    torch.manual_seed(0)
    module = ValueModel(load_causal_lm(policy)).bfloat16()
    torch.nn.init.normal_(module.value_head.weight, std=10)
    packed = pack_rows([torch.arange(3, 40)])
    values = module(packed.input_ids, packed.position_ids, packed.layout, torch.arange(37))
    assert values.dtype == torch.float32
    assert (values != values.bfloat16()).any()


def test_graph_limit_is_raised_and_never_lowered(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)
    increase_recompile_limit()
    assert torch._dynamo.config.recompile_limit == MAX_GRAPHS
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 10 * MAX_GRAPHS)
    increase_recompile_limit()
    assert torch._dynamo.config.recompile_limit == 10 * MAX_GRAPHS
