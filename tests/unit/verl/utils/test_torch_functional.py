import math

import pytest
import torch

from tests.helpers.refusals import mentions
from verl.utils import torch_functional as F
from verl.utils.torch_functional import (
    entropy_from_logits,
    find_last_nonzero,
    logprobs_and_entropy_from_logits,
    logprobs_from_logits,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    pad_sequence_to_length,
    select_where,
)

VALUES = torch.tensor([[1.0, 2.0, math.nan], [6.0, 100.0, math.inf]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def test_masked_statistics_never_read_masked_values():
    assert masked_sum(VALUES, MASK).item() == 9.0
    assert masked_mean(VALUES, MASK).item() == 3.0
    assert masked_mean(VALUES, MASK, axis=-1).tolist() == [1.5, 6.0]
    assert masked_var(VALUES, MASK).item() == pytest.approx(7.0)  # (4 + 1 + 9) / 2
    assert masked_var(VALUES, MASK, unbiased=False).item() == pytest.approx(14 / 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_selected_values_are_those_of_torch(dtype):
    values = torch.randn(5, 7).to(dtype)
    mask = torch.randint(0, 2, (5, 7))
    for source in (values, values.t().contiguous().t(), values[:, :1].expand(5, 7)):
        assert select_where(source, mask).equal(source[mask.bool()])
    gradient = torch.ones(5, 7, requires_grad=True)
    select_where(gradient, mask).sum().backward()
    assert gradient.grad is not None and gradient.grad.equal(mask.float())


def test_masked_statistics_of_no_or_one_value_are_finite():
    empty_mask = torch.zeros_like(MASK)
    assert masked_mean(VALUES, empty_mask).item() == 0.0
    assert masked_var(VALUES, empty_mask).item() == 0.0
    single = torch.tensor([[0, 1, 0], [0, 0, 0]])
    assert masked_var(VALUES, single).item() == 0.0
    assert masked_whiten(VALUES, single).tolist() == [[0.0] * 3] * 2


def test_masked_whiten_has_unit_variance_and_may_keep_the_mean():
    whitened = masked_whiten(VALUES, MASK)
    expected = [(v - 3) / math.sqrt(7) for v in (1, 2, 6)]
    assert whitened[MASK.bool()].tolist() == pytest.approx(expected)
    assert (whitened[~MASK.bool()] == 0).all()
    unshifted = masked_whiten(VALUES, MASK, shift_mean=False)
    assert unshifted[MASK.bool()].tolist() == pytest.approx([e + 3 for e in expected])


@pytest.mark.parametrize("chunk", [5, 1 << 24])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_statistics_equal_plain_formulas_for_any_chunk(monkeypatch, chunk, temperature):
    monkeypatch.setattr(F, "_CPU_CHUNK_SIZE", chunk)
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 7, 5) * 3, torch.randint(5, (2, 7))
    log_probs = (logits / temperature).log_softmax(-1)
    expected = log_probs.gather(-1, labels[..., None])[..., 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    torch.testing.assert_close(logprobs_from_logits(logits, labels, temperature), expected)
    torch.testing.assert_close(entropy_from_logits(logits, temperature), entropy)
    both = logprobs_and_entropy_from_logits(logits, labels, temperature)
    torch.testing.assert_close(both, (expected, entropy))


def test_token_statistics_gradients_are_correct(monkeypatch):
    monkeypatch.setattr(F, "_CPU_CHUNK_SIZE", 8)
    torch.manual_seed(1)
    logits = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(4, (3, 2))
    assert torch.autograd.gradcheck(
        lambda x: logprobs_and_entropy_from_logits(x, labels, 0.8), (logits,)
    )
    assert torch.autograd.gradcheck(lambda x: logprobs_from_logits(x, labels), (logits,))


def test_half_precision_logits_are_reduced_in_float32():
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)).bfloat16()
    labels = torch.arange(4)
    result = logprobs_from_logits(logits, labels)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, logits.double().log_softmax(-1)[labels, labels].float())
    logits.requires_grad_()
    logprobs_from_logits(logits, labels).sum().backward()
    assert logits.grad is not None and logits.grad.dtype == torch.bfloat16


def test_forbidden_tokens_give_no_nan():
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    log_prob, entropy = logprobs_and_entropy_from_logits(logits, torch.tensor([1]))
    (log_prob + entropy).sum().backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert logits.grad is not None and logits.grad.isfinite().all()


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, check=mentions("temperature")):
        logprobs_from_logits(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long), temperature=0.0)
    with pytest.raises(ValueError, check=mentions("labels")):
        logprobs_from_logits(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long))


def test_sequences_are_padded_to_a_length():
    rows = torch.tensor([[1, 2]])
    assert pad_sequence_to_length(rows, 4, 9).tolist() == [[1, 2, 9, 9]]
    assert pad_sequence_to_length(rows, 4, 9, left_pad=True).tolist() == [[9, 9, 1, 2]]
    assert pad_sequence_to_length(rows, 1, 9).tolist() == [[1, 2]]


def test_last_selected_position_of_each_row():
    rows, columns = find_last_nonzero(torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]))
    assert rows.tolist() == [0, 2] and columns.tolist() == [2, 3]
