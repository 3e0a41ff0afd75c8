"""Chat tokenizers of several kinds, made from nothing: how they cut and tidy text differs."""

from functools import cache
from typing import Any

from tests.helpers.tiny_model import CHAT_TEMPLATE, SPECIAL, TAGS, make_tiny_tokenizer

LINES = ["you see a desk and a mug", "nothing happens here", "system user assistant look"]
TOOLS = ("<tool_call>", "</tool_call>")
END_TURN = "<end_turn>"
TEMPLATE = CHAT_TEMPLATE.replace("<|im_end|>", END_TURN)


def unmarked() -> Any:
    """Byte-level; what ends a turn is an added token that is not marked as special."""
    from tokenizers import AddedToken

    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokens = [AddedToken(text, special=False) for text in (END_TURN, *TOOLS)]
    tokenizer.add_tokens(tokens)
    return tokenizer


def _wrapped(raw: Any) -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    # Found in tidied text as well, where the spelling may differ; the end of a turn is not special.
    raw.add_special_tokens([AddedToken(text, normalized=True) for text in SPECIAL])
    raw.add_tokens([AddedToken(text, normalized=True) for text in (*TAGS, *TOOLS, END_TURN)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|pad|>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def pieces() -> Any:
    """Pieces with their leading space, letters made equal (NFKC)."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    raw = Tokenizer(models.Unigram())
    raw.normalizer = normalizers.NFKC()
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    raw.train_from_iterator(LINES, trainer)
    return _wrapped(raw)


def words() -> Any:
    """Words in small letters."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    raw = Tokenizer(models.WordPiece(unk_token="<unk>"))
    raw.normalizer = normalizers.Lowercase()
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["<unk>"], show_progress=False
    )
    raw.train_from_iterator([*LINES, "< > | / _ action level think im_end im_start pad"], trainer)
    return _wrapped(raw)


KINDS = {"bytes": make_tiny_tokenizer, "unmarked": unmarked, "pieces": pieces, "words": words}


@cache
def of_kind(kind: str) -> Any:
    """The tokenizer of ``KINDS``, made once."""
    return KINDS[kind]()
