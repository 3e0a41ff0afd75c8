"""A small Qwen3-architecture policy with a tokenizer of its own, built from texts of the
environment.

The tokenizer is byte-level BPE, so every text survives encode and decode. The words of the domain
are entries of their own (one token each), the thinking tags, level digits and chat marks are single
tokens, and the chat template adds two marks per turn. Control marks are special tokens and cannot
come out of an observation that is encoded with ``split_special_tokens``; the tags are not special,
so they survive decoding without special tokens.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agent_system.environments.env_package.alfworld import layout

TAGS = ("<level>", "</level>", "<think>", "</think>", "<action>", "</action>")
PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
MARKS = (PAD, END, USER, ASSISTANT, SYSTEM)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
_PIECE = re.compile("|".join(map(re.escape, TAGS)))
MAX_MERGES = 96  # entries left for BPE merges, which spell words outside the vocabulary


def build_policy(
    out_dir: str | Path,
    texts: Iterable[str],
    vocab_size: int = 800,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    ff: int = 384,
    max_length: int = 2048,
    rope_theta: float = 10000.0,
    tie_embeddings: bool = True,
    seed: int = 0,
) -> Path:
    """Train the tokenizer on ``texts``, initialise the model, save both to ``out_dir`` in Hugging
    Face form.

    The model has as many embeddings as the tokenizer has entries (at most ``vocab_size``), so that
    no id without a text can be sampled. Raises ``ValueError`` where ``vocab_size`` cannot hold
    bytes, tags and marks. Returns ``out_dir``.
    """
    tokenizer = build_tokenizer(texts, vocab_size, max_length)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        tie_word_embeddings=tie_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    out_dir = Path(out_dir)
    model.save_pretrained(out_dir, safe_serialization=True)
    tokenizer.save_pretrained(out_dir)
    return out_dir


def build_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most ``vocab_size`` entries.

    Its vocabulary is: marks and tags, the 256 bytes, the most frequent words of ``texts`` and of
    the domain, and a few merges for what is left.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = vocab_size - len(alphabet) - len(MARKS) - len(TAGS)
    if room < 0:
        raise ValueError(
            f"vocab_size={vocab_size}: bytes, tags and marks alone need {vocab_size - room}"
        )
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    counts = Counter(domain_words())
    for text in texts:
        for piece in _PIECE.split(text):
            counts.update(word for word, _ in split.pre_tokenize_str(piece))
    words = [
        word
        for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        if len(word) > 1
    ]
    whole = words[: max(0, room - min(MAX_MERGES, room // 4))]
    merges = train_merges(words, counts, alphabet, room - len(whole))
    vocabulary = list(dict.fromkeys([*alphabet, *whole, *(left + right for left, right in merges)]))
    # ignore_merges: a word that is an entry is one token, however the merges would spell it
    model = models.BPE(
        {entry: index for index, entry in enumerate(vocabulary)}, merges, ignore_merges=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(mark, normalized=False, special=True) for mark in MARKS]
    )
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def train_merges(
    words: list[str], counts: Counter, alphabet: list[str], room: int
) -> list[tuple[str, str]]:
    """The first ``room`` BPE merges over the words, most useful first."""
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + room, initial_alphabet=alphabet, show_progress=False
    )
    scratch = Tokenizer(models.BPE())
    # Words are byte-level already; each is repeated as often as it occurs, up to a cap that keeps
    # training instant.
    scratch.train_from_iterator(
        (word for word in words for _ in range(min(counts[word], 200))), trainer
    )
    learnt = json_merges(scratch)
    return learnt[:room]


def json_merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The merges of a trained BPE tokenizer."""
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]


def domain_words() -> list[str]:
    """Names of everything ALFWorld's scenes hold, and instance numbers, as byte-level words with a
    leading space.
    """
    table = layout.constants()
    names = sorted({name.lower() for name in table.OBJECTS_SET | set(table.VAL_RECEPTACLE_OBJECTS)})
    return [f"Ġ{name}" for name in names] + [f"Ġ{number}" for number in range(1, 31)]
