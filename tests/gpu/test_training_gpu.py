"""Tests of code with another implementation on CUDA: attention, output head, compiled layers."""

import pytest
import torch

from tests.helpers.policy_rows import add_branches, gradients, random_rows
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.schema.model import OptimConfig
from verl.models.loader import load_causal_lm
from verl.models.policy import PolicyModel
from verl.models.token_scores import compute_float32_logits
from verl.workers.branch_scores import compute_log_probs_and_scores
from verl.workers.engine import TrainEngine
from verl.workers.rows import Rows

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=128, layers=2, std=0.1)


def score_and_learn(policy, attention, compiled, dtype):
    """Return the scores of rows and branches, and the gradient of the rows' log-probs."""
    lm = load_causal_lm(policy, attention=attention)
    engine = TrainEngine(
        PolicyModel(lm), device="cuda", dtype=dtype, optim=OptimConfig(), compiled=compiled
    )
    data = add_branches(random_rows(rows=6))
    scores = compute_log_probs_and_scores(engine, data, max_rows=4)
    assert scores.branch_scores is not None
    branches = torch.tensor([one.logprob for row in scores.branch_scores for one in row])
    rows = Rows(data, "cuda")
    for index in ([0, 1], [2, 3, 4]):
        packed = rows.pack_rows(index)
        inputs = (packed.input_ids, packed.position_ids, packed.layout)
        row_scores = engine.module(*inputs, [rows.sampled_targets(packed, index)])[0]
        engine.backward(row_scores.log_probs.sum() / 50, is_last_micro_batch=index[0] == 2)
    gradient = {name: value.cpu() for name, value in gradients(engine.module).items()}
    return scores.log_probs, branches, gradient


@pytest.mark.parametrize(("dtype", "atol"), [("float32", 1e-3), ("bfloat16", 0.1)])
@pytest.mark.parametrize(
    ("attention", "compiled"), [("flex", False), ("sdpa", True), ("flex", True)]
)
def test_all_variants_equal_plain_layers_with_sdpa(policy, attention, compiled, dtype, atol):
    expected = score_and_learn(policy, "sdpa", compiled=False, dtype=dtype)
    actual = score_and_learn(policy, attention, compiled, dtype)
    torch.testing.assert_close(actual, expected, atol=atol, rtol=atol)


def test_logits_of_bfloat16_factors_are_summed_in_float32():
    draw = torch.Generator("cuda").manual_seed(0)
    head = torch.nn.Linear(256, 1000, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(64, 256, device="cuda", generator=draw).bfloat16().requires_grad_()
    logits = compute_float32_logits(head, hidden)
    exact = torch.nn.functional.linear(hidden.double(), head.weight.double(), head.bias.double())
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-4
    upstream = torch.randn(logits.shape, device="cuda", generator=draw)
    logits.backward(upstream)
    hidden_gradient = upstream.double() @ head.weight.double()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad.double(), hidden_gradient, atol=0.1, rtol=2**-6)
