"""Masked statistics, and log-probs and entropies of tokens without a softmax over all logits.

Reductions use float32 (float64 for float64 input). Values at masked positions are not used, so they
may be NaN. The logits of a token may be NaN if neither its log-prob nor its entropy is used; their
gradient is 0.
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

# The unit tests check the shapes (tests/helpers/shape_check.py). V is the vocabulary size.
Values = Num[Tensor, "*shape"]
Mask = Shaped[Tensor, "*shape"]
Logits = Float[Tensor, "*shape V"]
Labels = Int[Tensor, "..."]  # no shape: _compute_token_statistics checks it
PerLabel = Float[Tensor, "*shape"]
Scalar = Float[Tensor, ""]
RowMask = Shaped[Tensor, "B L"]
Positions = Int[Tensor, " N"]
Axis = int | tuple[int, ...] | None

# Logits per chunk. On a CPU a chunk must stay in the cache for several passes (512 KiB). On a GPU
# fewer, larger kernels are faster (64 MiB).
_CPU_CHUNK = 1 << 17
_CHUNK = 1 << 24
_LOWEST_LOG_PROB = -1e4  # replaces log 0 = -inf: its exp is 0, and 0 times it is 0, not NaN


def _get_work_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def masked_sum(values: Values, mask: Mask, axis: Axis = None) -> Tensor:
    """Sum ``values [...]`` where ``mask [...]`` is non-zero, over ``axis`` or all axes."""
    selected = torch.where(mask.bool(), values.to(_get_work_dtype(values)), 0.0)
    return selected.sum() if axis is None else selected.sum(dim=axis)


def masked_mean(values: Values, mask: Mask, axis: Axis = None) -> Tensor:
    """Return the mean of ``values`` where ``mask`` is non-zero; 0 if the mask selects nothing."""
    count = masked_sum(torch.ones_like(values), mask, axis)
    return masked_sum(values, mask, axis) / count.clamp(min=1.0)


def masked_var(values: Values, mask: Mask, unbiased: bool = True) -> Scalar:
    """Return the variance of the selected values (0 for fewer than two), by default unbiased."""
    count = mask.bool().sum()
    # Replace masked values before squaring: their gradient would be 0 times NaN.
    values = torch.where(mask.bool(), values, 0.0)
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    if unbiased:
        variance = variance * count / (count - 1).clamp(min=1)
    return torch.where(count > 1, variance, torch.zeros_like(variance))


def masked_whiten(values: Values, mask: Mask, shift_mean: bool = True) -> Values:
    """Scale the selected values to unit variance and, with ``shift_mean``, to zero mean.

    Values that are not selected become 0.
    """
    values = torch.where(mask.bool(), values, 0.0)
    mean = masked_mean(values, mask)
    # 1e-8 avoids 0 / 0 for equal values, which become 0.
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    return torch.where(mask.bool(), whitened, 0.0)


class _TokenStatistics(torch.autograd.Function):
    """Log-prob of the label and entropy of every row of logits ``[N, V]``, computed in chunks.

    Only the logits are saved for the backward pass. Float32 copies exist for one chunk at a time.
    With ``p = softmax(x / T)`` the gradient of the log-prob is ``(1[y] - p) / T``. The gradient of
    the entropy H is ``-p (log p + H) / T``. The backward pass skips entropies without a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        work = _get_work_dtype(logits)
        log_probs = torch.empty(logits.shape[0], dtype=work, device=logits.device)
        entropies = torch.zeros_like(log_probs)
        for rows in _split_rows(logits):
            chunk = _log_softmax(logits[rows], work, temperature)
            log_probs[rows] = chunk.gather(-1, labels[rows].unsqueeze(-1)).squeeze(-1)
            if with_entropy:
                entropies[rows] = -chunk.exp().mul_(chunk).sum(-1)
        ctx.save_for_backward(logits, labels, entropies)
        ctx.temperature = temperature
        return log_probs, entropies

    @staticmethod
    @once_differentiable  # hides the parameters' names from the type checker
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  see above
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Tensor, None, None, None]:
        logits, labels, entropies = ctx.saved_tensors
        has_entropy_gradient = grad_outputs[1] is not None
        grad_log_probs, grad_entropies = (
            torch.zeros_like(entropies) if grad is None else grad for grad in grad_outputs
        )
        gradient = torch.empty_like(logits)
        for rows in _split_rows(logits):
            # Recompute the chunk: saving it would double the memory of the logits.
            chunk = _log_softmax(logits[rows], entropies.dtype, ctx.temperature)
            weight = grad_log_probs[rows].unsqueeze(-1)
            if has_entropy_gradient:
                surplus = chunk + entropies[rows].unsqueeze(-1)
                weight = surplus.mul_(grad_entropies[rows].unsqueeze(-1)).add_(weight)
            part = chunk.exp_().mul_(-weight)
            part.scatter_add_(-1, labels[rows].unsqueeze(-1), grad_log_probs[rows].unsqueeze(-1))
            is_unused = (grad_log_probs[rows] == 0) & (grad_entropies[rows] == 0)
            part.masked_fill_(is_unused.unsqueeze(-1), 0.0)
            gradient[rows] = part if ctx.temperature == 1.0 else part.div_(ctx.temperature)
        return gradient, None, None, None


def _log_softmax(logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """Return the log-probs ``[N, V]`` in ``dtype``, at least ``_LOWEST_LOG_PROB``."""
    scaled = logits.to(dtype)
    if temperature != 1.0:
        scaled = scaled / temperature
    return scaled.log_softmax(-1).clamp_(min=_LOWEST_LOG_PROB)


def _split_rows(logits: Tensor) -> list[slice]:
    elements = _CPU_CHUNK if logits.device.type == "cpu" else _CHUNK
    size = max(1, elements // max(1, logits.shape[-1]))
    return [slice(start, start + size) for start in range(0, logits.shape[0], size)]


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
    flat = logits.reshape(-1, logits.shape[-1])
    log_probs, entropies = _TokenStatistics.apply(
        flat, labels.reshape(-1).long(), temperature, with_entropy
    )
    return log_probs.view(labels.shape), entropies.view(labels.shape)


def logprobs_and_entropy_from_logits(
    logits: Logits, labels: Labels, temperature: float = 1.0
) -> tuple[PerLabel, PerLabel]:
    """Return log-probs of ``labels [...]`` and entropies (nats) in one pass.

    The distribution is ``softmax(logits [..., V] / temperature)``. The results are ``[...]``
    float32 (float64 for float64 logits). Raises ``ValueError`` for a temperature that is not
    positive and for labels of another shape.
    """
    return _compute_token_statistics(logits, labels, temperature, True)


def logprobs_from_logits(logits: Logits, labels: Labels, temperature: float = 1.0) -> PerLabel:
    """Return the log-probs of ``labels [...]`` under ``softmax(logits [..., V] / temperature)``.

    ``[...]`` float32 (float64 for float64 logits).
    """
    return _compute_token_statistics(logits, labels, temperature, False)[0]


def entropy_from_logits(logits: Logits, temperature: float = 1.0) -> PerLabel:
    """Return the entropy ``-sum_v p log p`` (nats) of ``softmax(logits [..., V] / temperature)``.

    ``[...]`` float32 (float64 for float64 logits).
    """
    labels = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    return _compute_token_statistics(logits, labels, temperature, True)[1]


def find_last_selected(mask: RowMask) -> tuple[Positions, Positions]:
    """Return row and column of the last non-zero entry of each row of ``mask [B, L]``.

    Rows without such an entry are omitted, so both are ``[N]`` with N at most B.
    """
    selected = mask.bool()
    columns = torch.arange(selected.shape[1], device=selected.device).expand_as(selected)
    last_columns = torch.where(selected, columns, -1).amax(-1)
    rows = (last_columns >= 0).nonzero().squeeze(-1)
    return rows, last_columns[rows]
