"""Log-probs and entropies at given positions from hidden states, without storing all logits.

The output head of a model maps hidden states to logits. The ``forward`` of Gemma, Cohere, Granite
and others also divides the hidden states, or scales or caps the logits. For these models it is
called with the hidden states that the backbone has computed already::

    lm.forward( backbone replaced by  hidden [1, N, H] )  ──▶  logits [1, N, V]
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from verl.models.backbone import find_backbone, output_head
from verl.names import MAX_LOGITS
from verl.utils.torch_functional import logprobs_and_entropy_from_logits, logprobs_from_logits

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

FULL_PRECISION = (torch.float32, torch.float64)  # the product of such factors needs no cast


@dataclass(frozen=True)
class Targets:
    """Tokens of one packed sequence whose log-probs and entropies are computed (targets).

    ``predicting_positions`` [N] are the packed positions *before* the targets ``tokens`` [N], where
    the model predicts them. ``with_entropy=False`` omits the entropies, which cost as much time as
    the log-probs.
    """

    predicting_positions: torch.Tensor
    tokens: torch.Tensor
    temperature: float = 1.0
    with_entropy: bool = True


class TargetLogProbs(NamedTuple):
    """Log-probs and entropies of N target tokens, float32.

    ``log_probs`` and ``entropy`` are [N]. ``allowed_token_log_probs`` [N, K] are the log-probs of K
    given tokens at every target. ``entropy`` and ``allowed_token_log_probs`` are None unless
    requested. The class is a named tuple, because FSDP only finds output tensors in standard
    containers.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    allowed_token_log_probs: torch.Tensor | None = None

    @property
    def required_entropy(self) -> torch.Tensor:
        """``entropy`` [N]. Raises ``ValueError`` if no entropies were computed."""
        if self.entropy is None:
            raise ValueError("no entropies were computed; fix: use Targets(with_entropy=True)")
        return self.entropy


def log_probs_from_hidden(
    head: nn.Module,
    hidden: torch.Tensor,
    targets: Targets,
    allowed_token_ids: torch.Tensor | None = None,
) -> TargetLogProbs:
    """Return log-probs and entropies of the tokens ``targets``.

    The distribution is ``softmax(head(hidden) / temperature)`` with ``hidden`` [T, H].
    ``allowed_token_ids`` [K] adds the log-probs of those tokens at every target.
    """

    def score(hidden: torch.Tensor, tokens: torch.Tensor) -> TargetLogProbs:
        logits = compute_float32_logits(head, hidden)
        temperature = targets.temperature
        # The results are cloned, because the outputs of an FSDP module must not be views.
        if targets.with_entropy:
            log_probs_and_entropy = logprobs_and_entropy_from_logits(logits, tokens, temperature)
            token_scores = TargetLogProbs(*(tensor.clone() for tensor in log_probs_and_entropy))
        else:
            token_scores = TargetLogProbs(logprobs_from_logits(logits, tokens, temperature).clone())
        if allowed_token_ids is None:
            return token_scores
        # The log-prob of the target is known, so a logit difference gives the other log-probs. This
        # avoids a second sum over the vocabulary.
        logits_of_targets = logits.gather(-1, tokens.unsqueeze(-1))
        logit_differences = logits.index_select(-1, allowed_token_ids) - logits_of_targets
        return token_scores._replace(
            allowed_token_log_probs=logit_differences / temperature
            + token_scores.log_probs.unsqueeze(-1)
        )

    target_hidden = hidden.index_select(0, targets.predicting_positions)
    chunk_size = max(1, MAX_LOGITS // head_width(head))
    if len(target_hidden) <= chunk_size:
        return score(target_hidden, targets.tokens)
    chunk_scores: list[TargetLogProbs] = []
    for chunk in zip(
        target_hidden.split(chunk_size), targets.tokens.split(chunk_size), strict=True
    ):
        # In training, backward computes the logits of a chunk again instead of storing them.
        if torch.is_grad_enabled():
            chunk_scores.append(checkpoint(score, *chunk, use_reentrant=False))
        else:
            chunk_scores.append(score(*chunk))
    return TargetLogProbs(*map(_join_chunks, zip(*chunk_scores, strict=True)))


def _join_chunks(chunks: tuple[Any, ...]) -> Any:
    return None if chunks[0] is None else torch.cat(chunks)


def compute_float32_logits(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return the logits [..., V] in float32, also for ``hidden`` [..., H] in bfloat16.

    Rounding to bfloat16 would change a logit of 20 by up to 0.06. The product of two bfloat16
    numbers is exact in float32. A GPU multiplies in bfloat16 and sums in float32. A CPU converts
    the factors to float32. A head that is not a plain ``nn.Linear`` (an adapter) computes in its
    dtype.
    """
    if hidden.dtype in FULL_PRECISION or not isinstance(head, nn.Linear):
        return head(hidden).float()
    if not hidden.is_cuda:
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(hidden.float(), head.weight.float(), bias)
    flat_logits: torch.Tensor = Float32Logits.apply(hidden.flatten(0, -2), head.weight)
    logits = flat_logits.unflatten(0, hidden.shape[:-1])  # models give their head [B, L, H]
    return logits if head.bias is None else logits + head.bias.float()


class Float32Logits(torch.autograd.Function):
    """Product ``hidden [N, H] @ weight [V, H].T`` of bfloat16 factors with a float32 result.

    On a GPU no float32 copies of the factors are made. Backward rounds the gradient of the logits
    to bfloat16, the dtype of the gradients of both factors.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.t().float()  # CPU kernels do not support out_dtype

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  hidden by the decorator
        ctx: Any, grad_logits: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        hidden, weight = ctx.saved_tensors
        needs_grad_hidden, needs_grad_weight = ctx.needs_input_grad
        rounded_grad_logits = grad_logits.to(weight.dtype)
        grad_weight = rounded_grad_logits.t() @ hidden if needs_grad_weight else None
        return rounded_grad_logits @ weight if needs_grad_hidden else None, grad_weight


def head_width(head: nn.Module) -> int:
    """Return the number of logits that ``head`` gives per position."""
    # Linear layers and adapters have ``out_features``. Other heads only have a weight [width, H].
    num_logits: int | None = getattr(head, "out_features", None)
    return num_logits or head.get_parameter("weight").shape[0]


# ---- logits by the model's own forward -----------------------------------------------------------

# Largest logit in the test that compares the output head with ``forward``. It is large enough to
# detect soft caps: caps of usual size (30 and more) clearly change such logits.
PROBE_LOGIT = 50.0
PROBE_POSITIONS = 4  # random hidden states in this test
# Largest difference of logits that counts as rounding, as a fraction of ``PROBE_LOGIT``.
ROUNDING_BY_DTYPE = dict.fromkeys(FULL_PRECISION, 1e-5)
DEFAULT_ROUNDING = 0.02  # this fraction for all other dtypes, such as bfloat16


class ModelForwardHead(nn.Module):
    """Output head that turns hidden states [N, H] into logits [N, V] float32.

    For models that cap or scale their logits. Their ``forward`` is called with a stand-in for the
    layers that returns the given hidden states. No parameters are registered: they belong to
    ``lm``.
    """

    def __init__(self, lm: "PreTrainedModel") -> None:
        super().__init__()
        self._lm = (lm,)  # a tuple, so that the model is not registered a second time
        self.out_features = head_width(output_head(lm))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``hidden`` [N, H]."""
        (lm,) = self._lm
        placeholder_ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        with _replace_backbone_output(lm, hidden[None]):
            return lm(input_ids=placeholder_ids, use_cache=False).logits[0].float()


def make_head(lm: "PreTrainedModel", logits_by_forward: bool) -> nn.Module:
    """Return the output head, or with ``logits_by_forward`` the model's own ``forward``."""
    return ModelForwardHead(lm) if logits_by_forward else output_head(lm)


@torch.no_grad()
def forward_changes_logits(lm: "PreTrainedModel") -> bool:
    """Return True if the ``forward`` of ``lm`` gives other logits than its output head alone."""
    head = output_head(lm)
    hidden_size = head.get_parameter("weight").shape[-1]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(PROBE_POSITIONS, hidden_size, generator=generator).to(lm.device, lm.dtype)
    largest_logit = compute_float32_logits(head, hidden).abs().max().clamp(min=1e-6)
    hidden = hidden * (PROBE_LOGIT / largest_logit).to(hidden.dtype)
    head_logits = compute_float32_logits(head, hidden)
    try:
        forward_logits = ModelForwardHead(lm)(hidden)
    except Exception:  # any error of the model; the caller then compares log-probs only
        return False
    tolerance = ROUNDING_BY_DTYPE.get(lm.dtype, DEFAULT_ROUNDING) * PROBE_LOGIT
    return head_logits.shape != forward_logits.shape or not bool(
        (head_logits - forward_logits).abs().max() <= tolerance
    )


@contextlib.contextmanager
def _replace_backbone_output(lm: "PreTrainedModel", hidden: torch.Tensor) -> Iterator[None]:
    """Make the backbone return ``hidden``, and the head float32 logits, inside the context."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class HiddenStates(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            """Return None for missing fields, such as ``router_logits`` of MoE models."""
            if name.startswith("__"):
                raise AttributeError(name)

    def return_hidden(*_arguments: Any, **_options: Any) -> HiddenStates:
        return HiddenStates(last_hidden_state=hidden)  # pyright: ignore[reportArgumentType]

    head = output_head(lm)
    # Replace backbone and decoder: some models call the decoder inside their backbone directly.
    patched_modules: list[nn.Module] = [find_backbone(lm), lm.get_decoder()]
    for module in patched_modules:
        module.forward = return_hidden
    if isinstance(head, nn.Linear) and hidden.dtype not in FULL_PRECISION:
        head.forward = partial(compute_float32_logits, head)  # pyright: ignore[reportAttributeAccessIssue]
        patched_modules.append(head)
    try:
        yield
    finally:
        for module in patched_modules:
            # Without the instance attribute, the method of the class is used again.
            module.__dict__.pop("forward", None)
