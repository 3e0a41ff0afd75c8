"""Whether a model computes the same in packed rows as alone.

Two kinds of evidence. What a configuration or the layers say of themselves is refused in words that
name it: attention sinks, alibi, soft caps, states that run from token to token. And everything else
is measured: two short rows and a branch, packed as in training, against plain forwards of each
sequence with the model's own attention.

    packed   | row 0 | row 1 | branch of row 1 |      the pass that training and scoring use
    plain    | row 0 |   | row 1 |   | row 1[:start] + branch |      the model's own, one by one
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from verl.models.backbone import attention_window, decoder_layers, last_hidden, output_head
from verl.models.branch_attention import PackedBranches, naive_sequences, pack
from verl.models.packed_attention import PACKED_ATTENTION, UnsupportedAttention
from verl.models.token_scores import full_logits
from verl.records import Branch

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel

# The largest difference of log-probs, nats, that is rounding. Of 65 tiny right models the worst was
# 9e-6 off in float32, and 0.07 in bfloat16 where no expert changed; of the wrong ones the best was
# 0.01 off. Training loads float32, whatever it computes in later.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}
ROUGH_TOLERANCE = 0.25
# Of a mixture of experts, a token whose two last experts are nearly tied may go to another one by
# rounding alone: a model is wrong that differs in every draw of tokens.
DRAWS = 3
ROW_LENGTHS = (9, 7)
BRANCH_START = 4
BRANCH_LENGTH = 5

ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
LAYERS_WITH_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
RECURRENT = re.compile(
    r"Mamba|Rwkv|Recurrent|DeltaNet|DeltaAttention|LinearAttention|LightningAttention|Retention"
    r"|ShortConv|SSM|[ms]LSTM"
)
STATE = (
    "keeps a state that runs from token to token: of a packed row it would run into the next row, "
    "and of a row's end into its branches"
)
NOT_REACHED = (
    "its attention is not looked up in transformers' AttentionInterface, so that packed rows "
    "cannot reach it"
)
ALLOWED = (
    "causal LMs whose tokens meet in plain causal attention alone "
    "(Qwen2, Qwen3, Llama, Mistral, Phi-3, OLMo and the like)"
)
FIX = "choose another model; docs/models.md lists what was tried"


class UnsupportedArchitecture(ValueError):
    """A model that packed rows would score wrong."""


def check_architecture(lm: "PreTrainedModel") -> None:
    """Raise ``UnsupportedArchitecture`` where packed rows are known, or measured, to score wrong.

    ``lm`` has packed attention and is not yet sharded. Nothing of it changes, and no random number
    is drawn from a generator that others use. Without weights (device ``meta``) nothing is
    measured.
    """
    for reason in (*config_reasons(lm.config), *_layer_reasons(lm)):
        raise refusal(lm.config, reason)
    if lm.device.type == "meta":
        return
    try:
        found = measure(lm)
    except UnsupportedAttention as error:
        raise refusal(lm.config, str(error)) from error
    tolerance = TOLERANCES.get(lm.dtype, ROUGH_TOLERANCE)
    if found > tolerance:
        raise refusal(
            lm.config,
            f"in packed rows its log-probs are up to {found:.2g} nats off those of plain forwards "
            f"({tolerance:g} would be rounding)",
        )


def refusal(config: "PreTrainedConfig", reason: str) -> UnsupportedArchitecture:
    """The error that refuses a model of ``config`` for ``reason``."""
    where = config.name_or_path or "built from a config"
    return UnsupportedArchitecture(
        f"model {where} ({config.model_type}): {reason}; allowed: {ALLOWED}; fix: {FIX}"
    )


# ---------------------------------------------------------------------- what is known


def config_reasons(config: "PreTrainedConfig") -> Iterator[str]:
    """Why packed rows cannot score models of this ``config``, as far as it says so itself."""
    text = config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(text, name, None) not in (None, 1.0):
            yield f"{name}={getattr(text, name)}: it changes logits after the output head"
    cap = getattr(text, "attn_logit_softcapping", None)
    if cap:
        yield f"attn_logit_softcapping={cap}: a soft cap on the attention's logits"
    nested = getattr(text, "attn_config", None)
    if getattr(text, "alibi", False) or getattr(nested, "alibi", False):
        yield "alibi: it adds a bias by distance to the attention's logits"
    kinds = set(getattr(text, "layer_types", None) or ())
    for kind in sorted(kinds - ATTENTION_LAYERS):
        what = f"such a layer {STATE}" if kind in LAYERS_WITH_STATE else "it is no plain attention"
        yield f"layers of type {kind}: {what}"


def _layer_reasons(lm: "PreTrainedModel") -> Iterator[str]:
    """What the layers of ``lm`` say that its config does not."""
    if any("alibi" in name for name in dir(type(lm.base_model))):
        yield "alibi: it adds a bias by distance to the attention's logits"
    if lm.base_model is lm:
        yield "its backbone cannot be called apart from its output head"
        return
    for module in decoder_layers(lm.base_model).modules():
        over_time = isinstance(module, nn.Conv1d) and module.kernel_size[0] > 1
        if over_time or RECURRENT.search(type(module).__name__):
            yield f"its layers have a {type(module).__name__}, which {STATE}"
            return


# ---------------------------------------------------------------------- what is measured


def measure(lm: "PreTrainedModel") -> float:
    """The largest difference, nats, between log-probs of packed and of plain forwards.

    Of up to ``DRAWS`` draws of tokens the first without a difference counts, or the smallest.
    Raises ``UnsupportedAttention`` for what the attention is asked and does not compute, and for
    attention that cannot be asked.
    """
    tolerance = TOLERANCES.get(lm.dtype, ROUGH_TOLERANCE)
    devices = [lm.device] if lm.device.type == "cuda" else []
    training = lm.training
    lm.eval()  # dropout would make any two forwards differ
    smallest = float("inf")
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            _check_reached(lm)
            for draw in range(DRAWS):
                smallest = min(smallest, _difference(lm, draw))  # a NaN counts for infinity
                if smallest <= tolerance:
                    break
    finally:
        lm.train(training)
    return smallest


def _check_reached(lm: "PreTrainedModel") -> None:
    """Raise ``UnsupportedAttention`` for a model that attends without packed attention.

    Freshly made, such a model may hardly differ, since its attention is nearly uniform.
    """
    tokens = torch.zeros(1, 2, dtype=torch.long, device=lm.device)
    try:
        lm.base_model(input_ids=tokens, use_cache=False)
    except UnsupportedAttention:
        return  # packed attention was asked, and missed its layout
    raise UnsupportedAttention(NOT_REACHED)


def _difference(lm: "PreTrainedModel", seed: int) -> float:
    vocabulary: int = lm.config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(vocabulary, (n,), generator=draw) for n in ROW_LENGTHS]
    own = torch.randint(vocabulary, (BRANCH_LENGTH,), generator=draw).tolist()
    branches = [[], [Branch(BRANCH_START, own)]]
    packed = pack(rows, branches, lm.device)
    window = attention_window(lm.config)
    hidden = last_hidden(
        lm.base_model, packed.input_ids, packed.position_ids, packed.layout, window
    )
    found = full_logits(output_head(lm), hidden).log_softmax(-1)
    sequences = [*rows, *(sequence for row in naive_sequences(rows, branches) for sequence in row)]
    gaps: list[torch.Tensor] = []
    lm.set_attn_implementation("eager")
    try:
        for place, sequence in zip(_places(packed), sequences, strict=True):
            tokens = sequence.to(lm.device)
            plain = lm(input_ids=tokens[None], use_cache=False).logits[0].float().log_softmax(-1)
            # log-probs of the tokens that follow, which is what is scored
            chosen = tokens[1:, None]
            ours = found[place[:-1]].gather(-1, chosen)
            gaps.append((ours - plain[:-1].gather(-1, chosen)).abs())
    finally:
        lm.set_attn_implementation(PACKED_ATTENTION)
    return float(torch.cat(gaps).max())  # NaN where either side is


def _places(packed: PackedBranches) -> Iterator[torch.Tensor]:
    """Packed positions of the tokens of each plain sequence: two rows, then the branch with the
    prefix it continues.
    """
    for first, length in zip(packed.offsets, ROW_LENGTHS, strict=True):
        yield torch.arange(first, first + length)
    row = packed.offsets[1]
    own = packed.branch_offsets[1][0]
    prefix = torch.arange(row, row + BRANCH_START)
    yield torch.cat([prefix, torch.arange(own, own + BRANCH_LENGTH)])
