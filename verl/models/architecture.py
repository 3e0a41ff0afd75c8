"""Check that a model computes the same log-probs in packed rows as in plain forwards.

The config and the layers are searched for features that packed rows do not support: attention
sinks, alibi, soft caps, recurrent states. Then two short rows and a branch (alternative
continuation of a row) are packed as in training. Their log-probs are compared with those of plain
forwards that use the model's original attention.

    packed   | row 0 | row 1 | branch of row 1 |      one forward, as in training and scoring
    plain    | row 0 |   | row 1 |   | row 1[:start] + branch |      one forward per sequence
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from verl.models.backbone import attention_window, decoder_layers, last_hidden, output_head
from verl.models.branch_attention import PackedBranches, naive_sequences, pack_with_branches
from verl.models.packed_attention import PACKED_ATTENTION, UnsupportedAttention
from verl.models.token_scores import full_logits
from verl.records import Branch

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel

# Largest difference of log-probs (nats) that rounding can explain. Measured: 65 tiny supported
# models differed by at most 9e-6 in float32. In bfloat16 they differed by at most 0.07, unless
# rounding sent a token to another expert. Unsupported models differed by at least 0.01. Training
# loads float32 weights, also for mixed precision.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
LOW_PRECISION_TOLERANCE = 0.25  # for bfloat16 and float16
# In a mixture of experts, rounding can change the expert of a token if two experts are nearly tied.
# Therefore a model is refused only if it differs in each of several random token sequences.
MAX_COMPARISONS = 3
ROW_LENGTHS = (9, 7)
BRANCH_START = 4
BRANCH_LENGTH = 5

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
SUPPORTED_MODELS = (
    "causal LMs with plain causal attention as the only interaction between tokens "
    "(Qwen2, Qwen3, Llama, Mistral, Phi-3, OLMo and similar models)"
)
SUGGESTED_FIX = "choose another model; docs/models.md lists the tested models"


class UnsupportedArchitecture(ValueError):
    """Error for a model that would get wrong log-probs in packed rows."""


def check_architecture(lm: "PreTrainedModel") -> None:
    """Raise ``UnsupportedArchitecture`` for a model that would get wrong log-probs in packed rows.

    ``lm`` uses packed attention and is not sharded yet. The model and the global random generators
    are left unchanged. A model without weights (device ``meta``) is only checked by its config and
    layers.
    """
    for reason in (*find_config_problems(lm.config), *_find_layer_problems(lm)):
        raise unsupported_model_error(lm.config, reason)
    if lm.device.type == "meta":
        return
    try:
        gap = measure_packing_gap(lm)
    except UnsupportedAttention as error:
        raise unsupported_model_error(lm.config, str(error)) from error
    tolerance = TOLERANCES.get(lm.dtype, LOW_PRECISION_TOLERANCE)
    if gap > tolerance:
        raise unsupported_model_error(
            lm.config,
            f"its log-probs in packed rows differ from plain forwards by up to {gap:.2g} nats "
            f"(rounding explains at most {tolerance:g})",
        )


def unsupported_model_error(config: "PreTrainedConfig", reason: str) -> UnsupportedArchitecture:
    """Return the error that says why a model with ``config`` is not supported."""
    model_name = config.name_or_path or "built from a config"
    return UnsupportedArchitecture(
        f"model {model_name} ({config.model_type}): {reason}; allowed: {SUPPORTED_MODELS}; "
        f"fix: {SUGGESTED_FIX}"
    )


# ---------------------------------------------------------------------- known features


def find_config_problems(config: "PreTrainedConfig") -> Iterator[str]:
    """Yield a phrase for an error message for each unsupported feature in ``config``."""
    text_config = config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(text_config, name, None) not in (None, 1.0):
            yield f"{name}={getattr(text_config, name)}: it changes logits after the output head"
    logit_cap = getattr(text_config, "attn_logit_softcapping", None)
    if logit_cap:
        yield f"attn_logit_softcapping={logit_cap}: a soft cap on the attention logits"
    attention_config = getattr(text_config, "attn_config", None)
    if getattr(text_config, "alibi", False) or getattr(attention_config, "alibi", False):
        yield "alibi: it adds a bias by distance to the attention logits"
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    for layer_type in sorted(layer_types - ATTENTION_LAYERS):
        has_state = layer_type in LAYERS_WITH_STATE
        problem = f"such a layer {RECURRENT_STATE_PROBLEM}" if has_state else "not plain attention"
        yield f"layers of type {layer_type}: {problem}"


def _find_layer_problems(lm: "PreTrainedModel") -> Iterator[str]:
    """Yield a phrase for each unsupported feature that only the layers of ``lm`` show."""
    if any("alibi" in name for name in dir(type(lm.base_model))):
        yield "alibi: it adds a bias by distance to the attention logits"
    if lm.base_model is lm:
        yield "its backbone cannot be called without its output head"
        return
    for module in decoder_layers(lm.base_model).modules():
        mixes_positions = isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
        if mixes_positions or RECURRENT_CLASS_NAMES.search(type(module).__name__):
            yield f"its layers have a {type(module).__name__}, which {RECURRENT_STATE_PROBLEM}"
            return


# ---------------------------------------------------------------------- measurement


def measure_packing_gap(lm: "PreTrainedModel") -> float:
    """Return the largest difference (nats) between log-probs of packed and of plain forwards.

    The comparison is repeated with up to ``MAX_COMPARISONS`` sets of random tokens until a
    difference is within the tolerance. The result is the smallest of these differences. Raises
    ``UnsupportedAttention`` if the model does not call packed attention, or calls it with
    unsupported arguments.
    """
    cuda_devices = [lm.device] if lm.device.type == "cuda" else []
    was_training = lm.training
    lm.eval()  # with dropout, two forwards would differ
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=cuda_devices):
            _require_packed_attention(lm)
            return _measure_smallest_gap(lm, TOLERANCES.get(lm.dtype, LOW_PRECISION_TOLERANCE))
    finally:
        lm.train(was_training)


def _measure_smallest_gap(lm: "PreTrainedModel", tolerance: float) -> float:
    smallest_gap = float("inf")
    for seed in range(MAX_COMPARISONS):
        # If the gap is NaN, min() returns its first argument, so NaN never passes the check.
        smallest_gap = min(smallest_gap, _measure_log_prob_gap(lm, seed))
        if smallest_gap <= tolerance:
            break
    return smallest_gap


def _require_packed_attention(lm: "PreTrainedModel") -> None:
    """Raise ``UnsupportedAttention`` for a model that does not call packed attention.

    The comparison of log-probs can miss such a model: with random weights, attention is nearly
    uniform, so the difference is small.
    """
    tokens = torch.zeros(1, 2, dtype=torch.long, device=lm.device)
    try:
        lm.base_model(input_ids=tokens, use_cache=False)
    except UnsupportedAttention:
        return  # packed attention was called, and it raised this error because it got no layout
    raise UnsupportedAttention(ATTENTION_NOT_REPLACEABLE)


def _measure_log_prob_gap(lm: "PreTrainedModel", seed: int) -> float:
    vocab_size: int = lm.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(vocab_size, (n,), generator=generator) for n in ROW_LENGTHS]
    branch_tokens = torch.randint(vocab_size, (BRANCH_LENGTH,), generator=generator).tolist()
    branches = [[], [Branch(BRANCH_START, branch_tokens)]]
    packed = pack_with_branches(rows, branches, lm.device)
    window = attention_window(lm.config)
    hidden = last_hidden(
        lm.base_model, packed.input_ids, packed.position_ids, packed.layout, window
    )
    packed_log_probs = full_logits(output_head(lm), hidden).log_softmax(-1)
    sequences = [*rows, *(sequence for row in naive_sequences(rows, branches) for sequence in row)]
    gaps: list[torch.Tensor] = []
    lm.set_attn_implementation("eager")
    try:
        for positions, sequence in zip(_list_packed_positions(packed), sequences, strict=True):
            tokens = sequence.to(lm.device)
            plain_logits = lm(input_ids=tokens[None], use_cache=False).logits[0]
            plain_log_probs = plain_logits.float().log_softmax(-1)
            # Compare only the log-probs of the next tokens, which scoring uses.
            next_tokens = tokens[1:, None]
            packed_token_log_probs = packed_log_probs[positions[:-1]].gather(-1, next_tokens)
            gaps.append(
                (packed_token_log_probs - plain_log_probs[:-1].gather(-1, next_tokens)).abs()
            )
    finally:
        lm.set_attn_implementation(PACKED_ATTENTION)
    return float(torch.cat(gaps).max())  # NaN if any log-prob is NaN


def _list_packed_positions(packed: PackedBranches) -> Iterator[torch.Tensor]:
    """Yield the packed positions of the three plain sequences that ``packed`` contains.

    They are row 0, row 1, and the branch (alternative continuation) of row 1 after its prefix.
    """
    for row_offset, length in zip(packed.offsets, ROW_LENGTHS, strict=True):
        yield torch.arange(row_offset, row_offset + length)
    row_start = packed.offsets[1]
    branch_start = packed.branch_offsets[1][0]
    prefix = torch.arange(row_start, row_start + BRANCH_START)
    yield torch.cat([prefix, torch.arange(branch_start, branch_start + BRANCH_LENGTH)])
