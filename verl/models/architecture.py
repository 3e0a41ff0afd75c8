"""Choose how a model's forward passes run: packed if that is exact, else row by row.

The config and the layers are searched for features that packed rows do not support: attention
sinks, alibi, soft caps, recurrent states. Then two short rows and a branch (alternative
continuation of a row) are packed as in training. Their log-probs are compared with those of plain
forward passes, which use the model's original attention.

    packed   | row 0 | row 1 | branch of row 1 |      one forward, as in training and scoring
    plain    | row 0 |   | row 1 |   | row 1[:start] + branch |      one forward per sequence

A model whose packed rows differ runs row by row, after the same comparison. It is refused if these
log-probs differ too.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from verl.models.backbone import (
    attention_window,
    compute_packed_hidden,
    decoder_layers,
    find_backbone,
    find_length_dependent_rope,
    get_max_packed_length,
)
from verl.models.forward_kind import (
    ForwardKind,
    PackedForward,
    RowWiseForward,
    list_sequences,
    set_attention_implementation,
    set_forward_kind,
)
from verl.models.packed_attention import PACKED_ATTENTION, UnsupportedAttentionError
from verl.models.prefix_tree import pack_rows
from verl.models.token_scores import compute_float32_logits, forward_changes_logits, make_head
from verl.records import BranchRequest

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel

# Largest difference of log-probs (nats) that counts as rounding. 65 tiny supported models differed
# by at most 9e-6 in float32, and 0.07 in bfloat16 unless a token changed its expert. Unsupported
# models differed by at least 0.01. Training loads float32 weights, also for mixed precision.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
LOW_PRECISION_TOLERANCE = 0.25
# In a mixture of experts, rounding can send a token to another expert if two experts are nearly
# tied. So a difference counts only if it occurs for each of several sets of random tokens.
MAX_COMPARISONS = 3
ROW_LENGTHS = (9, 7)  # tokens of the two random rows that are compared
BRANCH_START = 4  # tokens of the row that precede its branch (alternative continuation)
BRANCH_LENGTH = 5

# Values of ``layer_types`` in model configs.
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
LAYERS_WITH_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
RECURRENT_CLASS_NAMES = re.compile(
    r"Mamba|Rwkv|Recurrent|DeltaNet|DeltaAttention|LinearAttention|LightningAttention|Retention"
    r"|ShortConv|SSM|[ms]LSTM"
)
RECURRENT_STATE_PROBLEM = (
    "keeps a recurrent state: it would continue from one packed row into the next row, "
    "and from the end of a row into its branches"
)
ATTENTION_NOT_REPLACEABLE = (
    "it does not look up its attention in transformers' AttentionInterface, so packed attention "
    "cannot replace it"
)
# Config keys of models that scale or cap logits before or after the output head.
LOGIT_KEYS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "lm_head_multiplier",
    "output_multiplier",
    "logits_mup_width_multiplier",
)
SUPPORTED_MODELS = (
    "causal language models of transformers, in which no token depends on later tokens"
)
SUGGESTED_FIX = "choose another model; docs/models.md says which models train"


class UnsupportedArchitectureError(ValueError):
    """Error for a model whose log-probs are wrong both in packed and in row-wise passes."""


def choose_forward_kind(lm: "PreTrainedModel") -> ForwardKind:
    """Choose packed or row-wise forward passes for ``lm``, and store the choice in ``lm``.

    ``lm`` is not sharded yet, and uses packed attention unless that could not be set. Weights and
    global random generators are not changed. A model on ``meta`` is only checked by its config, its
    layers and its calls of attention. Raises ``UnsupportedArchitectureError`` if neither packed nor
    row-wise passes give the log-probs of plain forward passes.
    """
    problems = [*find_packing_problems(lm.config), *_find_layer_problems(lm)]
    if not problems and lm.config._attn_implementation != PACKED_ATTENTION:
        problems.append(ATTENTION_NOT_REPLACEABLE)
    if lm.device.type == "meta":
        reason = problems[0] if problems else _find_attention_problem(lm)
        logits_by_forward = _config_changes_logits(lm.config)
        forward_kind = _make_row_wise_forward(lm, reason) if reason else _make_packed_forward(lm)
        forward_kind = replace(forward_kind, computes_logits_by_forward=logits_by_forward)
    else:
        with _without_dropout_and_gradient(lm):
            forward_kind = _choose_by_log_probs(lm, problems[0] if problems else "")
    set_forward_kind(lm, forward_kind)
    return forward_kind


def unsupported_model_error(
    config: "PreTrainedConfig", reason: str
) -> UnsupportedArchitectureError:
    """Return the error that says why a model with ``config`` is not supported."""
    model_name = config.name_or_path or "built from a config"
    return UnsupportedArchitectureError(
        f"model {model_name} ({config.model_type}): {reason}; allowed: {SUPPORTED_MODELS}; "
        f"fix: {SUGGESTED_FIX}"
    )


# ---------------------------------------------------------------------- known features


def find_packing_problems(config: "PreTrainedConfig") -> Iterator[str]:
    """Yield a phrase for each feature in ``config`` that packed rows do not support."""
    text_config = config.get_text_config()
    attention_soft_cap = getattr(text_config, "attn_logit_softcapping", None)
    if attention_soft_cap:
        yield f"attn_logit_softcapping={attention_soft_cap}: a soft cap on the attention logits"
    attention_config = getattr(text_config, "attn_config", None)
    if getattr(text_config, "alibi", False) or getattr(attention_config, "alibi", False):
        yield "alibi: it adds a bias by distance to the attention logits"
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    for layer_type in sorted(layer_types - ATTENTION_LAYERS):
        has_state = layer_type in LAYERS_WITH_STATE
        why = f"such a layer {RECURRENT_STATE_PROBLEM}" if has_state else "not plain attention"
        yield f"layers of type {layer_type}: {why}"


def is_packable(config: "PreTrainedConfig") -> bool:
    """Return True if ``config`` has no feature that packed rows do not support."""
    return next(find_packing_problems(config), None) is None


def _config_changes_logits(config: "PreTrainedConfig") -> bool:
    """Return True if ``config`` says that the model scales or caps its logits."""
    text_config = config.get_text_config()
    return any(getattr(text_config, name, None) not in (None, 1.0) for name in LOGIT_KEYS)


def _find_layer_problems(lm: "PreTrainedModel") -> Iterator[str]:
    """Yield unsupported features that only the layers of ``lm`` show, not its config."""
    backbone = find_backbone(lm)
    if any("alibi" in name for name in dir(type(backbone))):
        yield "alibi: it adds a bias by distance to the attention logits"
    for module in decoder_layers(backbone).modules():
        is_time_convolution = isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
        if is_time_convolution or RECURRENT_CLASS_NAMES.search(type(module).__name__):
            yield f"its layers have a {type(module).__name__}, which {RECURRENT_STATE_PROBLEM}"
            return


def _find_attention_problem(lm: "PreTrainedModel") -> str:
    """Return why packed attention cannot compute ``lm``, a model on ``meta``; "" if it can.

    A packed pass on ``meta`` calls the attention of each layer. Errors other than
    ``UnsupportedAttentionError`` end the pass early and are ignored.
    """
    row = pack_rows([torch.zeros(2, dtype=torch.long)], device=lm.device)
    try:
        with _without_dropout_and_gradient(lm):
            _require_packed_attention(lm)
            compute_packed_hidden(find_backbone(lm), row.input_ids, row.position_ids, row.layout)
    except UnsupportedAttentionError as error:
        return str(error)
    except Exception:  # the model reads values of tensors, for example to select experts
        return ""
    return ""


def _choose_row_wise_attention(lm: "PreTrainedModel") -> str:
    current_attention = lm.config._attn_implementation or ""
    if current_attention not in ("", PACKED_ATTENTION):
        return current_attention
    # Other implementations than eager ignore a soft cap on the attention logits.
    attention_soft_cap = getattr(lm.config.get_text_config(), "attn_logit_softcapping", None)
    has_sdpa = lm._supports_sdpa and lm._can_set_attn_implementation()
    return "sdpa" if has_sdpa and not attention_soft_cap else "eager"


def _make_row_wise_forward(lm: "PreTrainedModel", reason: str) -> RowWiseForward:
    # Padding makes a pass longer, and some rotary embeddings depend on the length of the pass.
    should_pad = not find_length_dependent_rope(lm.config)
    return RowWiseForward(
        _choose_row_wise_attention(lm), should_pad=should_pad, not_packed_reason=reason
    )


def _make_packed_forward(lm: "PreTrainedModel") -> PackedForward:
    limit = get_max_packed_length(lm.config)
    if limit is None:
        return PackedForward(PACKED_ATTENTION)
    why = "window" if limit == attention_window(lm.config) else "range of its rotary embeddings"
    long_rows = _make_row_wise_forward(lm, f"rows longer than the {why} of {limit} tokens")
    return PackedForward(PACKED_ATTENTION, limit, long_rows)


# ---------------------------------------------------------------------- measurement


@contextlib.contextmanager
def _without_dropout_and_gradient(lm: "PreTrainedModel") -> Iterator[None]:
    """Disable dropout and gradients inside the context, and restore the random state after it."""
    devices = [lm.device] if lm.device.type == "cuda" else []
    was_training = lm.training
    lm.eval()  # dropout would make any two forwards differ
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        lm.train(was_training)


def _choose_by_log_probs(lm: "PreTrainedModel", reason: str) -> ForwardKind:
    """Choose packed passes if they give the log-probs of plain passes, else row-wise passes.

    If ``reason`` is not empty, it says why packed passes are not tried. Raises
    ``UnsupportedArchitectureError`` if row-wise passes give other log-probs than plain passes too.
    """
    tolerance = TOLERANCES.get(lm.dtype, LOW_PRECISION_TOLERANCE)
    logits_by_forward = _config_changes_logits(lm.config) or forward_changes_logits(lm)
    if not reason:
        packed = replace(_make_packed_forward(lm), computes_logits_by_forward=logits_by_forward)
        try:
            _require_packed_attention(lm)
            # Ignore the length limit: the test rows may be longer than a tiny attention window.
            log_prob_gap = _measure_smallest_log_prob_gap(
                lm, replace(packed, max_row_tokens=None, long_row_forward=None)
            )
        except UnsupportedAttentionError as error:
            reason = str(error)
        else:
            if log_prob_gap <= tolerance:
                return packed
            reason = f"its log-probs in packed rows {_describe_gap(log_prob_gap, tolerance)}"
    set_attention_implementation(lm, _choose_row_wise_attention(lm))
    forward_kind = replace(
        _make_row_wise_forward(lm, reason), computes_logits_by_forward=logits_by_forward
    )
    log_prob_gap = 0.0
    for candidate in dict.fromkeys([forward_kind, replace(forward_kind, attention="eager")]):
        for should_pad in dict.fromkeys([candidate.should_pad, False]):
            candidate = replace(candidate, should_pad=should_pad)
            log_prob_gap = _measure_smallest_log_prob_gap(lm, candidate)
            if log_prob_gap <= tolerance:
                _check_causal(lm, tolerance)
                return candidate
    why = f"its log-probs row by row {_describe_gap(log_prob_gap, tolerance)}"
    raise unsupported_model_error(lm.config, why)


def _describe_gap(log_prob_gap: float, tolerance: float) -> str:
    return (
        f"differ from plain forwards by up to {log_prob_gap:.2g} nats "
        f"(rounding explains at most {tolerance:g})"
    )


def _check_causal(lm: "PreTrainedModel", tolerance: float) -> None:
    """Raise ``UnsupportedArchitectureError`` if the logits of a token depend on later tokens."""
    tokens = _sample_random_rows(lm, 0)[0].to(lm.device)[None]
    whole_row_log_probs, prefix_log_probs = (
        lm(input_ids=ids, use_cache=False).logits[0, :BRANCH_START].float().log_softmax(-1)
        for ids in (tokens, tokens[:, :BRANCH_START])
    )
    gap = float((whole_row_log_probs - prefix_log_probs).abs().max())
    if not gap <= max(tolerance, TOLERANCES[torch.float32]):
        why = f"its log-probs depend on later tokens (by {gap:.2g} nats): it is not a causal LM"
        raise unsupported_model_error(lm.config, why)


def _measure_smallest_log_prob_gap(lm: "PreTrainedModel", forward_kind: ForwardKind) -> float:
    tolerance = TOLERANCES.get(lm.dtype, LOW_PRECISION_TOLERANCE)
    smallest_gap = float("inf")
    for seed in range(MAX_COMPARISONS):
        smallest_gap = min(
            smallest_gap, _measure_log_prob_gap(lm, forward_kind, seed)
        )  # a NaN is ignored, because min(inf, NaN) is inf in Python
        if smallest_gap <= tolerance:
            break
    return smallest_gap


def _require_packed_attention(lm: "PreTrainedModel") -> None:
    """Raise ``UnsupportedAttentionError`` for a model that does not call packed attention.

    The comparison of log-probs can overlook such a model: with random weights attention is nearly
    uniform, so the difference is small.
    """
    tokens = torch.zeros(1, 2, dtype=torch.long, device=lm.device)
    try:
        find_backbone(lm)(input_ids=tokens, use_cache=False)
    except UnsupportedAttentionError:
        return  # expected: packed attention was called, without a layout of rows
    raise UnsupportedAttentionError(ATTENTION_NOT_REPLACEABLE)


def _sample_random_rows(lm: "PreTrainedModel", seed: int) -> list[torch.Tensor]:
    """Return random rows of ``ROW_LENGTHS`` tokens, and a branch of ``BRANCH_LENGTH`` tokens."""
    vocab_size: int = lm.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    lengths = (*ROW_LENGTHS, BRANCH_LENGTH)
    return [torch.randint(vocab_size, (n,), generator=generator) for n in lengths]


def _measure_log_prob_gap(lm: "PreTrainedModel", forward_kind: ForwardKind, seed: int) -> float:
    *rows, branch_tokens = _sample_random_rows(lm, seed)
    branches_by_row = [[], [BranchRequest(BRANCH_START, branch_tokens.tolist())]]
    packed_rows = pack_rows(rows, branches_by_row, lm.device)
    set_attention_implementation(lm, forward_kind.attention)
    hidden_states = forward_kind.compute_hidden(
        find_backbone(lm), packed_rows.input_ids, packed_rows.position_ids, packed_rows.layout
    )
    log_probs = compute_float32_logits(
        make_head(lm, forward_kind.computes_logits_by_forward), hidden_states
    ).log_softmax(-1)
    set_attention_implementation(lm, "eager")
    gaps: list[torch.Tensor] = []
    for positions, _ in list_sequences(packed_rows.layout, lm.device):
        tokens = packed_rows.input_ids[positions]
        plain_logits = lm(input_ids=tokens[None], use_cache=False).logits[0]
        plain_log_probs = plain_logits.float().log_softmax(-1)
        # Compare the log-probs of the next tokens only, because training uses no others.
        next_tokens = tokens[1:, None]
        packed_log_probs = log_probs[positions[:-1]].gather(-1, next_tokens)
        gaps.append((packed_log_probs - plain_log_probs[:-1].gather(-1, next_tokens)).abs())
    set_attention_implementation(lm, forward_kind.attention)
    return float(torch.cat(gaps).max())  # NaN if one of the log-probs is NaN
