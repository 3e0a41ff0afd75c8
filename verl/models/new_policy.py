"""A small Qwen3-architecture policy with a tokenizer of its own, built from texts of its tasks.

The tokenizer is byte-level BPE, so every text survives encode and decode. Frequent words of the
texts are entries of their own (one token each), tags and chat marks are single tokens, and the chat
template adds two marks per turn. Control marks are special tokens and cannot come out of an
observation that is encoded with ``split_special_tokens``; the tags are not special, so they survive
decoding without special tokens.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from verl.models.weights import quiet_transformers

PAD = "<|pad|>"
END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SYSTEM = "<|system|>"
MARKS = (PAD, END, USER, ASSISTANT, SYSTEM)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<|end|>' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
MAX_MERGES = 96  # entries left for BPE merges, which spell words outside the vocabulary
MAX_REPEATS = 200  # how often one word is shown to the merge trainer: keeps training instant


def build_policy(
    out_dir: str | Path,
    texts: Iterable[str],
    *,
    words: Iterable[str] = (),
    tags: Sequence[str] = (),
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

    ``words`` and ``tags`` as in ``build_tokenizer``. The model has as many embeddings as the
    tokenizer has entries (at most ``vocab_size``), so that no id without a text can be sampled.
    Raises ``ValueError`` where ``vocab_size`` cannot hold bytes, tags and marks. Returns
    ``out_dir``.
    """
    tokenizer = build_tokenizer(texts, vocab_size, max_length, words=words, tags=tags)
    ids = tokenizer.get_vocab()
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
        eos_token_id=ids[END],
        pad_token_id=ids[PAD],
    )
    # The caller's random numbers go on as if no model had been made.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=ids[END], pad_token_id=ids[PAD])
    out_dir = Path(out_dir)
    with quiet_transformers():
        model.save_pretrained(out_dir, safe_serialization=True)
    tokenizer.save_pretrained(out_dir)
    return out_dir


def build_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    max_length: int,
    *,
    words: Iterable[str] = (),
    tags: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most ``vocab_size`` entries.

    Its vocabulary is: marks and ``tags``, the 256 bytes, the most frequent words of ``texts``, and
    a few merges for what is left. Each of ``words`` counts as having occurred once: what the tasks
    can name although the texts do not, written as in a sentence, with the space before it
    (``" mug"``). Raises ``ValueError`` where ``vocab_size`` cannot hold bytes, tags and marks.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = vocab_size - len(alphabet) - len(MARKS) - len(tags)
    if room < 0:
        raise ValueError(
            f"vocab_size={vocab_size}: bytes, tags and marks alone need {vocab_size - room}"
        )
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    counts = count_words(split, [*words, *_without_tags(texts, tags)])
    # Ties by the word itself: the same texts give the same ids on every machine.
    frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    longer = [word for word, _ in frequent if len(word) > 1]  # single bytes are entries already
    # Words take most of the room, but a quarter of it at most is kept for merges.
    whole = longer[: max(0, room - min(MAX_MERGES, room // 4))]
    merges = train_merges(longer, counts, alphabet, room - len(whole))
    merged = [left + right for left, right in merges]
    vocabulary = dict.fromkeys([*alphabet, *whole, *merged])  # in order, each once
    ids = {entry: index for index, entry in enumerate(vocabulary)}
    # ignore_merges: a word that is an entry is one token, however the merges would spell it
    tokenizer = Tokenizer(models.BPE(ids, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(mark, normalized=False, special=True) for mark in MARKS]
    )
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _without_tags(texts: Iterable[str], tags: Sequence[str]) -> Iterable[str]:
    """The pieces of ``texts`` between tags: a tag is a token of its own and no part of a word."""
    if not tags:
        yield from texts
        return
    border = re.compile("|".join(map(re.escape, tags)))
    for text in texts:
        yield from border.split(text)


def count_words(split: pre_tokenizers.ByteLevel, pieces: Iterable[str]) -> Counter[str]:
    """How often each byte-level word occurs in ``pieces``."""
    counts: Counter[str] = Counter()
    for piece in pieces:
        counts.update(word for word, _ in split.pre_tokenize_str(piece))
    return counts


def train_merges(
    words: list[str], counts: Counter[str], alphabet: list[str], room: int
) -> list[tuple[str, str]]:
    """The first ``room`` BPE merges over the byte-level words, most useful first."""
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + room, initial_alphabet=alphabet, show_progress=False
    )
    scratch = Tokenizer(models.BPE())
    repeated = (word for word in words for _ in range(min(counts[word], MAX_REPEATS)))
    scratch.train_from_iterator(repeated, trainer)
    return json_merges(scratch)[:room]


def json_merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The merges of a trained BPE tokenizer."""
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    # older versions of the library write a merge as one text, newer ones as a pair
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    return [(left, right) for left, right in pairs]
