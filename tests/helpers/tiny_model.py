"""Tiny Qwen3 policy with its own byte-level BPE tokenizer, made in about a second.

``make_tiny_policy`` writes a directory that transformers and vLLM both load. The weights are random
and seeded.
"""

import itertools
from pathlib import Path
from typing import Any

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|pad|>")
TAGS = ("<level>", "</level>", "<think>", "</think>", "<action>", "</action>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
VERBS = ("go to", "take", "put", "open", "close", "examine", "heat", "cool", "clean", "look at")
THINGS = ("apple", "mug", "plate", "knife", "book", "lamp", "towel", "egg", "potato", "soap")
PLACES = (
    "cabinet",
    "drawer",
    "shelf",
    "table",
    "fridge",
    "microwave",
    "sink",
    "sofa",
    "desk",
    "bed",
)


def _corpus() -> list[str]:
    lines = [
        f"system user assistant You {verb} the {thing} in the {place}. "
        f"On the {place} you see a {thing}. Nothing happens."
        for verb, thing, place in itertools.product(VERBS, THINGS, PLACES)
    ]
    lines.append(
        "I have not tried this yet, so first I plan where to search and which door could be closed."
    )
    syllables = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
    # more text for larger vocabularies
    lines += [f"{a}{b}{a} {b}{a}" for a, b in itertools.combinations(syllables, 2)]
    return lines


def make_tiny_tokenizer(vocab: int = 400) -> Any:
    """Return a ``PreTrainedTokenizerFast`` of at most ``vocab`` tokens.

    Digits, tags and special tokens are single tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(TAGS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(_corpus(), trainer)
    raw.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_tiny_policy(
    directory: str | Path,
    tie: bool = True,
    vocab: int = 400,
    hidden: int = 64,
    layers: int = 2,
    max_len: int = 4096,
    seed: int = 0,
    std: float = 0.05,
) -> Path:
    """Write a random Qwen3 policy in float32, its tokenizer and generation config; return the
    directory.

    The model has the vocabulary of the tokenizer, so every sampled id decodes. ``hidden`` is a
    multiple of 32. ``tie`` shares the embedding with the output head. ``std`` is the standard
    deviation of the initial weights.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    directory = Path(directory)
    tokenizer = make_tiny_tokenizer(vocab)
    heads = max(2, hidden // 32)
    ids = tokenizer.get_vocab()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=32,
        max_position_embeddings=max_len,
        tie_word_embeddings=tie,
        initializer_range=std,
        bos_token_id=None,
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|pad|>"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
