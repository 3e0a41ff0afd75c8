"""Logits by the model's own ``forward``, for models whose output head alone does not give them.

The ``forward`` of Gemma, Cohere, Granite and others also divides the hidden states, or scales or
caps the logits. It is called with the hidden states that the backbone has computed already::

    lm.forward( backbone replaced by  hidden [1, N, H] )  ──▶  logits [1, N, V]
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl.models.backbone import find_backbone, output_head
from verl.models.token_scores import compute_float32_logits, head_width

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

# Largest logit in the test that compares the output head with ``forward``. It is large enough to
# detect soft caps: caps of usual size (30 and more) clearly change such logits.
PROBE_LOGIT = 50.0
PROBE_POSITIONS = 4  # random hidden states in this test
# Largest difference of logits that counts as rounding, as a fraction of ``PROBE_LOGIT``.
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-5}
ROUGH_ROUNDING = 0.02  # this fraction for all other dtypes, such as bfloat16


class ForwardLogitsHead(nn.Module):
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
        ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        with _replace_backbone_output(lm, hidden[None]):
            return lm(input_ids=ids, use_cache=False).logits[0].float()


def make_head(lm: "PreTrainedModel", logits_by_forward: bool) -> nn.Module:
    """Return the module that maps hidden states to logits.

    It is the output head, or with ``logits_by_forward`` the model's own ``forward``, which also
    scales or caps the logits.
    """
    return ForwardLogitsHead(lm) if logits_by_forward else output_head(lm)


@torch.no_grad()
def forward_changes_logits(lm: "PreTrainedModel") -> bool:
    """Return True if the ``forward`` of ``lm`` gives other logits than its output head alone.

    The logits are compared on random hidden states that give logits up to ``PROBE_LOGIT``.
    """
    head = output_head(lm)
    width = head.get_parameter("weight").shape[-1]
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(PROBE_POSITIONS, width, generator=draw).to(lm.device, lm.dtype)
    largest = compute_float32_logits(head, hidden).abs().max().clamp(min=1e-6)
    hidden = hidden * (PROBE_LOGIT / largest).to(hidden.dtype)
    plain = compute_float32_logits(head, hidden)
    try:
        by_forward = ForwardLogitsHead(lm)(hidden)
    except Exception:  # any error of the model; the caller then compares log-probs only
        return False
    tolerance = ROUNDING.get(lm.dtype, ROUGH_ROUNDING) * PROBE_LOGIT
    return plain.shape != by_forward.shape or not bool(
        (plain - by_forward).abs().max() <= tolerance
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
    replaced: list[nn.Module] = [find_backbone(lm), lm.get_decoder()]
    for module in replaced:
        module.forward = return_hidden
    if isinstance(head, nn.Linear) and hidden.dtype != torch.float32:
        head.forward = partial(compute_float32_logits, head)  # pyright: ignore[reportAttributeAccessIssue]
        replaced.append(head)
    try:
        yield
    finally:
        for module in replaced:
            # Without the instance attribute, the method of the class is used again.
            module.__dict__.pop("forward", None)
