"""The output head: logits of bfloat16 factors are not rounded, and never exist as a whole."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.refusals import mentions
from verl.models import token_scores
from verl.models.token_scores import Float32Logits, Targets, full_logits, scores_from_hidden

TOKENS, WIDTH, VOCAB = 23, 4, 50


def head_and_hidden(dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCAB).to(dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    hidden = (3 * torch.randn(TOKENS, WIDTH, generator=draw)).to(dtype)
    return head, hidden.requires_grad_()


def test_products_of_bfloat16_numbers_are_added_up_in_float32():
    head, hidden = head_and_hidden()
    exact = hidden.double() @ head.weight.double().t()
    logits = Float32Logits.apply(hidden, head.weight)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-5
    assert (hidden @ head.weight.t() - exact).abs().max() > 1e-2


def test_their_gradients_are_those_of_float32_rounded_to_bfloat16():
    """Of the logits' gradient and of the results, each by half of 2^-8 at most."""
    upstream = torch.randn(TOKENS, VOCAB, generator=torch.Generator().manual_seed(1))
    head, hidden = head_and_hidden()
    Float32Logits.apply(hidden, head.weight).backward(upstream)
    found = (hidden.grad, head.weight.grad)
    exact = (
        upstream.double() @ head.weight.double(),
        upstream.double().t() @ hidden.double(),
    )
    size = (
        upstream.double().abs() @ head.weight.double().abs(),
        upstream.double().abs().t() @ hidden.double().abs(),
    )
    for gradient, right, terms in zip(found, exact, size, strict=True):
        assert gradient is not None and gradient.dtype == torch.bfloat16
        assert ((gradient - right).abs() <= 2**-8 * terms + 2**-8 * right.abs()).all()
        assert (gradient - right).abs().max() > 0


def test_a_frozen_head_gets_no_gradient():
    head, hidden = head_and_hidden()
    head.requires_grad_(False)
    Float32Logits.apply(hidden, head.weight).sum().backward()
    assert head.weight.grad is None
    assert hidden.grad is not None


def test_on_a_cpu_bfloat16_factors_are_multiplied_in_float32():
    head, hidden = head_and_hidden()
    expected = torch.nn.functional.linear(hidden.float(), head.weight.float(), head.bias.float())
    assert torch.equal(full_logits(head, hidden), expected)


class Widest(TorchDispatchMode):
    """Notes how many rows the largest tensor over the vocabulary has."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCAB,):
                self.rows = max(self.rows, tensor.numel() // VOCAB)
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_exist_in_pieces_forward_and_backward(monkeypatch, dtype):
    tokens = torch.arange(TOKENS) % VOCAB
    targets = Targets(torch.arange(TOKENS), tokens, temperature=0.7)
    results = []
    for rows in (TOKENS, 5):
        monkeypatch.setattr(token_scores, "MAX_LOGITS", rows * VOCAB)
        head, hidden = head_and_hidden(dtype)
        with Widest() as widest:
            scores = scores_from_hidden(head, hidden, targets)
            (scores.log_probs.sum() + scores.required_entropy.square().sum()).backward()
        assert widest.rows == rows
        results.append((scores.log_probs, scores.required_entropy, hidden.grad))
    torch.testing.assert_close(*results)


def test_entropies_that_nobody_asked_for_are_not_there():
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(4, 9), torch.randn(3, 4)
    places, tokens = torch.arange(3), torch.tensor([1, 2, 3])
    both = scores_from_hidden(head, hidden, Targets(places, tokens, 0.7))
    alone = scores_from_hidden(head, hidden, Targets(places, tokens, 0.7, with_entropy=False))
    assert torch.equal(both.log_probs, alone.log_probs)
    assert both.required_entropy is both.entropy
    assert alone.entropy is None and alone.choice_log_probs is None
    with pytest.raises(ValueError, check=mentions("with_entropy=True")):
        alone.required_entropy  # noqa: B018
