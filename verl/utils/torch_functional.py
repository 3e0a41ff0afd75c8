"""Masked statistics, and log-probs and entropies of tokens without a softmax over all logits.

Sums and means use float32 (float64 for float64 input). Values at masked positions may be NaN. The
logits of a token may be NaN if neither its log-prob nor its entropy is used; then their gradient is
0.
"""

from typing import Any

import torch
from jaxtyping import Float, Int, Num, Shaped
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.utils.lazy import make_lazy_exports

__getattr__, _lazy_names = make_lazy_exports(
    "verl.compat", {"pad_sequence_to_length": "micro_batches"}
)

# Type annotations with shapes, where V is the vocabulary size. The unit tests check them
# (tests/helpers/shape_check.py).
Values = Num[Tensor, "*shape"]
Mask = Shaped[Tensor, "*shape"]
Logits = Float[Tensor, "*shape V"]
Labels = Int[Tensor, "..."]  # any shape, because _compute_token_statistics checks it
PerLabel = Float[Tensor, "*shape"]
Scalar = Float[Tensor, ""]
RowMask = Shaped[Tensor, "B L"]
Positions = Int[Tensor, " N"]
Axis = int | tuple[int, ...] | None

# Number of float32 logits per chunk. On a CPU a chunk (512 KiB) must fit into the cache. On a GPU
# large chunks (64 MiB) are faster.
_CPU_CHUNK_SIZE = 1 << 17
_GPU_CHUNK_SIZE = 1 << 24
_LOWEST_LOG_PROB = -1e4  # replaces log 0 = -inf, because 0 * -inf is NaN; its exp is also 0


def _get_work_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def select_where(values: Values, mask: Mask) -> Tensor:
    """Return ``values[mask.bool()]`` [N], on a CPU in half the time of torch's indexing."""
    mask = mask.bool()
    if values.device.type != "cpu" or values.requires_grad or values.dtype == torch.bfloat16:
        return values[mask]
    return torch.from_numpy(values.numpy()[mask.numpy()])


def masked_sum(values: Values, mask: Mask, axis: Axis = None) -> Tensor:
    """Return the sum of ``values`` [...] where ``mask`` [...] is non-zero.

    The sum is over ``axis``, or over all axes if it is None.
    """
    masked_values = torch.where(mask.bool(), values.to(_get_work_dtype(values)), 0.0)
    return masked_values.sum() if axis is None else masked_values.sum(dim=axis)


def masked_mean(values: Values, mask: Mask, axis: Axis = None) -> Tensor:
    """Return the mean of ``values`` [...] where ``mask`` [...] is non-zero.

    The mean is over ``axis``, or over all axes if it is None. It is 0 if no value is selected.
    """
    num_selected = masked_sum(torch.ones_like(values), mask, axis)
    return masked_sum(values, mask, axis) / num_selected.clamp(min=1.0)


def masked_var(values: Values, mask: Mask, unbiased: bool = True) -> Scalar:
    """Return the variance of ``values`` where ``mask`` is non-zero; 0 for fewer than two values.

    With ``unbiased`` the sum of squares is divided by the count - 1.
    """
    num_selected = mask.bool().sum()
    # Replace masked values, which may be NaN: otherwise their gradient would be 0 * NaN = NaN.
    values = torch.where(mask.bool(), values, 0.0)
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    if unbiased:
        variance = variance * num_selected / (num_selected - 1).clamp(min=1)
    return torch.where(num_selected > 1, variance, torch.zeros_like(variance))


def masked_whiten(values: Values, mask: Mask, shift_mean: bool = True) -> Values:
    """Scale the values where ``mask`` is non-zero to variance 1, and set others to 0.

    With ``shift_mean`` their mean becomes 0, otherwise it is kept.
    """
    values = torch.where(mask.bool(), values, 0.0)
    mean = masked_mean(values, mask)
    whitened_values = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    if not shift_mean:
        whitened_values = whitened_values + mean
    return torch.where(mask.bool(), whitened_values, 0.0)


class _TokenStatistics(torch.autograd.Function):
    """Autograd function: log-prob of the label and entropy of every row of logits [N, V].

    It works in chunks of rows, so that a float32 copy exists for one chunk only. The backward pass
    uses the saved logits x. Let T be the temperature, y the label and ``p = softmax(x / T)``. The
    gradient of the log-prob is ``(1[y] - p) / T``. The gradient of the entropy H is
    ``-p (log p + H) / T``.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        work_dtype = _get_work_dtype(logits)
        log_probs = torch.empty(logits.shape[0], dtype=work_dtype, device=logits.device)
        entropies = torch.zeros_like(log_probs)
        for rows in _list_row_chunks(logits):
            chunk_log_probs = _log_softmax(logits[rows], work_dtype, temperature)
            log_probs[rows] = chunk_log_probs.gather(-1, labels[rows].unsqueeze(-1)).squeeze(-1)
            if with_entropy:
                entropies[rows] = -chunk_log_probs.exp().mul_(chunk_log_probs).sum(-1)
        ctx.save_for_backward(logits, labels, entropies)
        ctx.temperature = temperature
        return log_probs, entropies

    @staticmethod
    @once_differentiable  # the type checker cannot see the parameters of a decorated function
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits, labels, entropies = ctx.saved_tensors
        has_entropy_gradient = grad_outputs[1] is not None
        grad_log_probs, grad_entropies = (
            torch.zeros_like(entropies) if output_gradient is None else output_gradient
            for output_gradient in grad_outputs
        )
        gradient = torch.empty_like(logits)
        for rows in _list_row_chunks(logits):
            # Recompute the log-probs of the chunk. Saving them would need as much memory as the
            # logits.
            chunk_log_probs = _log_softmax(logits[rows], entropies.dtype, ctx.temperature)
            probability_factor = grad_log_probs[rows].unsqueeze(-1)
            if has_entropy_gradient:
                log_prob_plus_entropy = chunk_log_probs + entropies[rows].unsqueeze(-1)
                probability_factor = log_prob_plus_entropy.mul_(
                    grad_entropies[rows].unsqueeze(-1)
                ).add_(probability_factor)
            chunk_gradient = chunk_log_probs.exp_().mul_(-probability_factor)
            chunk_gradient.scatter_add_(
                -1, labels[rows].unsqueeze(-1), grad_log_probs[rows].unsqueeze(-1)
            )
            is_unused = (grad_log_probs[rows] == 0) & (grad_entropies[rows] == 0)
            chunk_gradient.masked_fill_(is_unused.unsqueeze(-1), 0.0)
            gradient[rows] = (
                chunk_gradient if ctx.temperature == 1.0 else chunk_gradient.div_(ctx.temperature)
            )
        return gradient, None, None, None


def _log_softmax(logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """Return the log-probs [N, V] in ``dtype``, at least ``_LOWEST_LOG_PROB``."""
    scaled_logits = logits.to(dtype)
    if temperature != 1.0:
        scaled_logits = scaled_logits / temperature
    return scaled_logits.log_softmax(-1).clamp_(min=_LOWEST_LOG_PROB)


def _list_row_chunks(logits: Tensor) -> list[slice]:
    chunk_size = _CPU_CHUNK_SIZE if logits.device.type == "cpu" else _GPU_CHUNK_SIZE
    rows_per_chunk = max(1, chunk_size // max(1, logits.shape[-1]))
    return [
        slice(start, start + rows_per_chunk) for start in range(0, logits.shape[0], rows_per_chunk)
    ]


def _compute_token_statistics(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
) -> tuple[PerLabel, PerLabel]:
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have the shape {tuple(labels.shape)}, which must be that of the logits "
            f"{tuple(logits.shape)} without the last axis"
        )
    flat_logits = logits.reshape(-1, logits.shape[-1])
    log_probs, entropies = _TokenStatistics.apply(
        flat_logits, labels.reshape(-1).long(), temperature, with_entropy
    )
    return log_probs.view(labels.shape), entropies.view(labels.shape)


def logprobs_and_entropy_from_logits(
    logits: Logits, labels: Labels, temperature: float = 1.0
) -> tuple[PerLabel, PerLabel]:
    """Return the log-probs of ``labels`` [...] and the entropies (nats) [...], in one pass.

    The distribution is ``softmax(logits / temperature)`` with logits [..., V]. Results are float32
    (float64 for float64 logits). Raises ``ValueError`` for a temperature that is not positive, and
    if the shapes of logits and labels do not match.
    """
    return _compute_token_statistics(logits, labels, temperature, True)


def logprobs_from_logits(logits: Logits, labels: Labels, temperature: float = 1.0) -> PerLabel:
    """Return the log-probs [...] of ``labels``; see ``logprobs_and_entropy_from_logits``."""
    return _compute_token_statistics(logits, labels, temperature, False)[0]


def entropy_from_logits(logits: Logits, temperature: float = 1.0) -> PerLabel:
    """Return the entropies [...] (nats); see ``logprobs_and_entropy_from_logits``."""
    labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _compute_token_statistics(logits, labels, temperature, True)[1]


def find_last_nonzero(mask: RowMask) -> tuple[Positions, Positions]:
    """Return row indices [N] and column indices [N] of the last non-zero entry per row of a mask.

    ``mask`` is [B, L]. Rows that are all zero are omitted, so N is at most B.

        mask [[1, 1, 0], [0, 0, 0], [1, 0, 1]]: rows [0, 2], columns [1, 2]
    """
    is_selected = mask.bool()
    columns = torch.arange(is_selected.shape[1], device=is_selected.device).expand_as(is_selected)
    last_columns = torch.where(is_selected, columns, -1).amax(-1)
    rows = (last_columns >= 0).nonzero().squeeze(-1)
    return rows, last_columns[rows]
