"""Create a small policy with a tokenizer built from task texts.

The architecture is Qwen3, or Qwen3.5, in which every second layer has linear attention.

The tokenizer is byte-level BPE, so encode and decode preserve every text. Single tokens are:
frequent words, tags such as ``<think>``, and ``SPECIAL_TOKENS`` (padding, end of turn, roles). The
chat template adds two special tokens per turn. An observation encoded with ``split_special_tokens``
cannot produce them. Tags are not special tokens, so they are kept when special tokens are skipped
in decoding.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from verl.config.schema.sft import NewPolicyConfig
from verl.models.weights import quiet_transformers

PAD = "<|pad|>"
END_OF_TURN = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SYSTEM = "<|system|>"
SPECIAL_TOKENS = (PAD, END_OF_TURN, USER, ASSISTANT, SYSTEM)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
LAYER_TYPES = ("linear_attention", "full_attention")  # of even and odd layers of Qwen3.5
ROPE_THETA = 10000.0
ROTATED_SHARE = 0.25  # part of each head that Qwen3.5 rotates by position
# Largest number of entries for BPE merges, which shorten words outside the vocabulary.
MAX_MERGES = 96
MAX_REPEATS = 200  # limit for the copies of a word in the input of the BPE trainer, for speed


def build_policy(
    out_dir: str | Path,
    texts: Iterable[str],
    shape: NewPolicyConfig,
    *,
    words: Iterable[str] = (),
    tags: Sequence[str] = (),
    vocab_size: int = 800,
    seed: int = 0,
) -> Path:
    """Train a tokenizer, initialise a model and save both in Hugging Face format to ``out_dir``.

    The tokenizer is trained on ``texts``. ``words`` are further words for its vocabulary. ``tags``
    are texts that become single tokens. The model has one embedding per tokenizer entry (at most
    ``vocab_size``). ``shape`` is the section ``model.new``. Raises ``ValueError`` if ``vocab_size``
    is too small for bytes, tags and special tokens. Returns ``out_dir``.
    """
    max_length = shape.max_position_embeddings
    tokenizer = build_tokenizer(texts, vocab_size, max_length, words=words, tags=tags)
    ids = tokenizer.get_vocab()
    token_ids = {"eos_token_id": ids[END_OF_TURN], "pad_token_id": ids[PAD]}
    config = make_policy_config(shape, len(tokenizer), **token_ids)
    # The random state of the caller is restored after the model is made.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class = Qwen3ForCausalLM if isinstance(config, Qwen3Config) else Qwen3_5ForCausalLM
        model = model_class(config).float()
    model.generation_config = GenerationConfig(**token_ids)
    out_dir = Path(out_dir)
    with quiet_transformers():
        model.save_pretrained(out_dir, safe_serialization=True)
    tokenizer.save_pretrained(out_dir)
    return out_dir


def make_policy_config(
    shape: NewPolicyConfig, vocab_size: int, **token_ids: int
) -> Qwen3Config | Qwen3_5TextConfig:
    """Return the transformers config of a new policy of ``shape`` with ``vocab_size`` tokens."""
    rope_parameters = {"rope_type": "default", "rope_theta": ROPE_THETA}
    config_values: dict[str, Any] = {
        **shape.model_dump(exclude={"architecture"}),  # the keys of config.json
        "head_dim": shape.head_width,
        "vocab_size": vocab_size,
        "bos_token_id": None,
        **token_ids,
    }
    if shape.architecture == "qwen3":
        return Qwen3Config(**config_values, rope_parameters=rope_parameters)
    layer_indices = range(shape.num_hidden_layers)
    return Qwen3_5TextConfig(
        **config_values,
        rope_parameters=rope_parameters | {"partial_rotary_factor": ROTATED_SHARE},
        layer_types=[LAYER_TYPES[layer % 2] for layer in layer_indices],
        linear_num_key_heads=config_values["num_key_value_heads"],
        linear_num_value_heads=config_values["num_attention_heads"],
        linear_key_head_dim=config_values["head_dim"],
        linear_value_head_dim=config_values["head_dim"],
    )


def build_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    max_length: int,
    *,
    words: Iterable[str] = (),
    tags: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer of at most ``vocab_size`` entries.

    The vocabulary consists of ``SPECIAL_TOKENS``, ``tags``, the 256 bytes, the most frequent words
    of ``texts`` and merges for other words. Each of the additional ``words`` counts as one
    occurrence and includes the space before it, as in ``" mug"``. Raises ``ValueError`` if
    ``vocab_size`` is too small for bytes, tags and special tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    free_entries = vocab_size - len(alphabet) - len(SPECIAL_TOKENS) - len(tags)
    if free_entries < 0:
        raise ValueError(
            f"vocab_size={vocab_size} is too small; bytes, tags and special tokens need at least "
            f"{vocab_size - free_entries} entries"
        )
    word_splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    word_counts: Counter[str] = Counter()
    for piece in [*words, *_split_at_tags(texts, tags)]:
        word_counts.update(word for word, _ in word_splitter.pre_tokenize_str(piece))
    # Words of equal frequency are sorted by text, so that ids are the same on every machine.
    words_by_frequency = sorted(word_counts.items(), key=lambda item: (-item[1], item[0]))
    # Single bytes are entries already.
    candidate_words = [word for word, _ in words_by_frequency if len(word) > 1]
    # Up to a quarter of the free entries is reserved for merges. The remaining entries are for
    # whole words.
    whole_words = candidate_words[: max(0, free_entries - min(MAX_MERGES, free_entries // 4))]
    merges = train_merges(candidate_words, word_counts, alphabet, free_entries - len(whole_words))
    merged_tokens = [left + right for left, right in merges]
    vocabulary = dict.fromkeys([*alphabet, *whole_words, *merged_tokens])
    ids = {entry: index for index, entry in enumerate(vocabulary)}
    # With ignore_merges, a word in the vocabulary is always one token, regardless of the merges.
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = word_splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(special_token, normalized=False, special=True)
            for special_token in SPECIAL_TOKENS
        ]
    )
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    policy_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    policy_tokenizer.chat_template = CHAT_TEMPLATE
    return policy_tokenizer


def _split_at_tags(texts: Iterable[str], tags: Sequence[str]) -> Iterable[str]:
    """Yield the parts of ``texts`` between tags, because a tag is a separate token."""
    if not tags:
        yield from texts
        return
    tag_pattern = re.compile("|".join(map(re.escape, tags)))
    for text in texts:
        yield from tag_pattern.split(text)


def train_merges(
    words: list[str], counts: Counter[str], alphabet: list[str], max_merges: int
) -> list[tuple[str, str]]:
    """Return the first ``max_merges`` BPE merges over the byte-level words, in training order."""
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + max_merges, initial_alphabet=alphabet, show_progress=False
    )
    temporary_tokenizer = Tokenizer(models.BPE())
    repeated_words = (word for word in words for _ in range(min(counts[word], MAX_REPEATS)))
    temporary_tokenizer.train_from_iterator(repeated_words, trainer)
    merges = json.loads(temporary_tokenizer.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges[:max_merges]]
