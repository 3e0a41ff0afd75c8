"""Tokenizers and chat templates of many kinds, built without downloads. Each pair is a test
case.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from tests.helpers.tiny_model import CHAT_TEMPLATE, SPECIAL, TAGS, make_tiny_tokenizer

LINES = [
    "you see a desk and a mug. go north, take the mug from desk 1",
    "nothing happens here. be brief! rules: one two three",
    "system user assistant look [INST] [/INST] thought easy answer",
]
BOS, EOS = "<s>", "</s>"
END, START = "<|im_end|>", "<|im_start|>"


def _wrapped(raw: Any, added: Any = None, **options: Any) -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    options_by_mark = added or {}
    marks = (BOS, EOS, *SPECIAL)
    raw.add_special_tokens(
        [
            AddedToken(mark, **{"normalized": False, **options_by_mark.get(mark, {})})
            for mark in marks
        ]
    )
    raw.add_tokens(
        [AddedToken(tag, normalized=False, **options_by_mark.get("tag", {})) for tag in TAGS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token=BOS,
        eos_token=END,
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        **options,
    )


def _bpe(scheme: str, added: Any = None, split: bool = True) -> Any:
    """Return a BPE tokenizer with SentencePiece spaces and byte fallback."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    raw.decoder = decoders.Metaspace(prepend_scheme=scheme)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=480, special_tokens=["<unk>", *bytes_], show_progress=False
    )
    raw.train_from_iterator(LINES * 3, trainer)
    return _wrapped(raw, added, unk_token="<unk>")


def train_unigram(lines: Sequence[str], vocab_size: int) -> Any:
    """Return a unigram tokenizer with leading spaces and NFKC normalisation."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    raw = Tokenizer(models.Unigram())
    raw.normalizer = normalizers.NFKC()
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    raw.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    raw.train_from_iterator(lines, trainer)
    return raw


def train_word_piece(lines: Sequence[str], vocab_size: int, normalizer: str) -> Any:
    """Return a WordPiece tokenizer; ``normalizer`` is a class of ``tokenizers.normalizers``."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    raw = Tokenizer(models.WordPiece(unk_token="<unk>"))
    raw.normalizer = getattr(normalizers, normalizer)()
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=["<unk>"], show_progress=False
    )
    raw.train_from_iterator(lines, trainer)
    return raw


def _llama(legacy: bool) -> Any:
    """Return a tokenizer of transformers' own Llama class."""
    from transformers import LlamaTokenizer

    trained = _bpe("first")
    import json

    model = json.loads(trained.backend_tokenizer.to_str())["model"]
    merges = [
        tuple(pair) if isinstance(pair, list) else tuple(pair.split(" "))
        for pair in model["merges"]
    ]
    vocab = {**model["vocab"]}
    for mark in (BOS, EOS):
        vocab.setdefault(mark, len(vocab))
    tokenizer = LlamaTokenizer(vocab=vocab, merges=merges, legacy=legacy, eos_token=EOS)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(SPECIAL), "pad_token": "<|pad|>"}
    )
    tokenizer.add_tokens(list(TAGS))
    return tokenizer


def _bytes() -> Any:
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": BOS})
    tokenizer.add_special_tokens({"additional_special_tokens": [EOS]})
    return tokenizer


def _bytes_with_space() -> Any:
    """Return a byte-level tokenizer that puts a space before a text, as RoBERTa does."""
    from tokenizers import pre_tokenizers

    tokenizer = _bytes()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _bytes_of_qwen() -> Any:
    """Return a byte-level tokenizer in which a line break joins the preceding line breaks."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([*LINES * 3, "a\n\nb.\n\nc\n\n\nd>\n\ne.\nf" * 9], trainer)
    return _wrapped(raw)


def _ends_with_bos(tokenizer: Any) -> Any:
    """Let the post-processor start every text with BOS, as in Llama 3."""
    from tokenizers.processors import TemplateProcessing

    number = tokenizer.convert_tokens_to_ids(BOS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, number)]
    )
    return tokenizer


STRIPS = {
    END: {"rstrip": True, "lstrip": True},
    START: {"rstrip": True},
    EOS: {"lstrip": True},
}
TOKENIZERS = {
    "bytes": _bytes,
    "bytes, space first": _bytes_with_space,
    "bytes, lines joined": _bytes_of_qwen,
    "bytes, BOS of its own": lambda: _ends_with_bos(_bytes()),
    "first": lambda: _bpe("first"),
    "first, not split": lambda: _bpe("first", split=False),
    "always": lambda: _bpe("always"),
    "never": lambda: _bpe("never"),
    "first, BOS of its own": lambda: _ends_with_bos(_bpe("first")),
    "strips": lambda: _bpe("first", STRIPS),
    "one word": lambda: _bpe("first", {END: {"single_word": True}, "tag": {"single_word": True}}),
    "tidied": lambda: _bpe("always", {END: {"normalized": True}, START: {"normalized": True}}),
    "unigram": lambda: _wrapped(train_unigram(LINES * 3, 160), unk_token="<unk>"),
    "word pieces": lambda: _wrapped(
        train_word_piece(LINES * 3, 200, "BertNormalizer"), unk_token="<unk>"
    ),
    "llama": lambda: _llama(legacy=False),
    "llama, legacy": lambda: _llama(legacy=True),
}

CONTENT = "message['content']"
INST = (
    "{{- bos_token -}}{%- if messages[0]['role'] == 'system' -%}"
    "{%- set system = messages[0]['content'] -%}{%- set messages = messages[1:] -%}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}"
    "{{- '[INST] ' -}}{%- if PLACE and system is defined -%}{{- system + '\\n\\n' -}}{%- endif -%}"
    "{{- message['content'] + ' [/INST]' -}}"
    "{%- else -%}{{- ' ' + message['content'] + '</s>' -}}{%- endif -%}"
    "{%- endfor -%}"
)
PLAIN = (
    "{%- for message in messages -%}"
    "{{- message['role'] + ': ' + message['content'] + '\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}"
)
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "bos": "{{- bos_token -}}" + CHAT_TEMPLATE,
    "no system role": "{%- if messages[0]['role'] == 'system' -%}"
    "{{- raise_exception('no system role') -}}{%- endif -%}" + CHAT_TEMPLATE,
    "no generation prompt": CHAT_TEMPLATE.partition("{%- if add_generation_prompt")[0],
    "another generation prompt": CHAT_TEMPLATE.replace("start|>assistant", "start|>model"),
    "system in the first": INST.replace("PLACE", "loop.first"),
    "system in the last": INST.replace("PLACE", "loop.last"),
    "space before the end": INST.replace("PLACE", "loop.first").replace(
        "message['content'] + '</s>'", "message['content'] + ' </s>'"
    ),
    "thoughts removed": CHAT_TEMPLATE.replace(
        CONTENT,
        f"({CONTENT}.split('</think>')[-1].lstrip('\\n') "
        f"if message['role'] == 'assistant' and not loop.last else {CONTENT})",
    ),
    "trims": CHAT_TEMPLATE.replace(CONTENT, f"({CONTENT} | trim)"),
    "trims users": CHAT_TEMPLATE.replace(
        CONTENT, f"({CONTENT} | trim if message['role'] == 'user' else {CONTENT})"
    ),
    "opens a thought": CHAT_TEMPLATE.replace(
        "start|>assistant\\n'", "start|>assistant\\n<think>\\n'"
    ),
    "plain text": PLAIN,
    "tools": "{%- if tools -%}{{- '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' -}}"
    "{%- endif -%}" + CHAT_TEMPLATE,
    "parts": CHAT_TEMPLATE.replace(CONTENT, f"{CONTENT}[0]['text']"),
    "long rows": "{%- for message in messages -%}{{- message['role'] -}}:{{- message['content'] -}}"
    "{{- '</s>' if message['role'] == 'assistant' else ' ' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'assistant:' -}}{%- endif -%}",
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


@cache
def _tokenizer(kind: str) -> Any:
    return TOKENIZERS[kind]()


def chat_tokenizer(kind: str, template: str) -> Any:
    """Return the tokenizer of ``kind`` with the ``template`` of ``TEMPLATES``.

    Each kind is made once, so a later call changes the template of an earlier result.
    """
    tokenizer = _tokenizer(kind)
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def make_forgetful_tokenizer() -> Any:
    """Return the tiny tokenizer with a template that removes the thoughts of earlier turns."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES["thoughts removed"]
    return tokenizer
