"""Tests of the output head: float32 logits of bfloat16 factors, computed in parts."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.refusals import mentions
from verl.models import token_scores
from verl.models.token_scores import (
    Float32Logits,
    Targets,
    compute_float32_logits,
    log_probs_from_hidden,
)

TOKENS, WIDTH, VOCAB = 23, 4, 50


def head_and_hidden(dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCAB).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    hidden = (3 * torch.randn(TOKENS, WIDTH, generator=draw)).to(dtype)
    return head, hidden.requires_grad_()


def test_bfloat16_products_are_summed_in_float32():
    head, hidden = head_and_hidden()
    exact = hidden.double() @ head.weight.double().t()
    logits = Float32Logits.apply(hidden, head.weight)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-5
    assert (hidden @ head.weight.t() - exact).abs().max() > 1e-2


def test_bfloat16_gradients_are_rounded_float32_gradients():
    """Rounding of the logits' gradient and of the result adds at most half of 2^-8 each."""
    upstream = torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(1))
    head, hidden = head_and_hidden()
    Float32Logits.apply(hidden, head.weight).backward(upstream)
    gradients = (hidden.grad, head.weight.grad)
    exact = (
        upstream.double() @ head.weight.double(),
        upstream.double().t() @ hidden.double(),
    )
    magnitudes = (
        upstream.double().abs() @ head.weight.double().abs(),
        upstream.double().abs().t() @ hidden.double().abs(),
    )
    for gradient, reference, magnitude in zip(gradients, exact, magnitudes, strict=True):
        assert gradient is not None and gradient.dtype == torch.bfloat16
        assert ((gradient - reference).abs() <= 2**-8 * magnitude + 2**-8 * reference.abs()).all()
        assert (gradient - reference).abs().max() > 0


def test_frozen_head_gets_no_gradient():
    head, hidden = head_and_hidden()
    head.requires_grad_(False)
    Float32Logits.apply(hidden, head.weight).sum().backward()
    assert head.weight.grad is None
    assert hidden.grad is not None


def test_bfloat16_factors_are_multiplied_in_float32_on_cpu():
    head, hidden = head_and_hidden()
    expected = torch.nn.functional.linear(hidden.float(), head.weight.float(), head.bias.float())
    assert torch.equal(compute_float32_logits(head, hidden), expected)


def test_float64_logits_are_rounded_once():
    head, hidden = head_and_hidden(torch.float64)
    expected = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
    assert torch.equal(compute_float32_logits(head, hidden), expected)


class MaxLogitRows(TorchDispatchMode):
    """Records the number of rows of the largest tensor over the vocabulary."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCAB,):
                self.rows = max(self.rows, tensor.numel() // VOCAB)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_computed_in_parts_forward_and_backward(monkeypatch, dtype):
    tokens = torch.arange(TOKENS) % VOCAB
    targets = Targets(torch.arange(TOKENS), tokens, temperature=0.7)
    results = []
    for rows in (TOKENS, 5):
        monkeypatch.setattr(token_scores, "MAX_LOGITS", rows * VOCAB)
        head, hidden = head_and_hidden(dtype)
        with MaxLogitRows() as recorder:
            scores = log_probs_from_hidden(head, hidden, targets)
            (scores.log_probs.sum() + scores.required_entropy.square().sum()).backward()
        assert recorder.rows == rows
        results.append((scores.log_probs, scores.required_entropy, hidden.grad))
    torch.testing.assert_close(*results)


def test_entropy_is_computed_only_on_request():
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(4, 9), torch.randn(3, 4)
    positions, tokens = torch.arange(3), torch.tensor([1, 2, 3])
    with_entropy = log_probs_from_hidden(head, hidden, Targets(positions, tokens, 0.7))
    without_entropy = log_probs_from_hidden(
        head, hidden, Targets(positions, tokens, 0.7, with_entropy=False)
    )
    assert torch.equal(with_entropy.log_probs, without_entropy.log_probs)
    assert with_entropy.required_entropy is with_entropy.entropy
    assert without_entropy.entropy is None and without_entropy.allowed_token_log_probs is None
    with pytest.raises(ValueError, check=mentions("with_entropy=True")):
        without_entropy.required_entropy  # noqa: B018
