"""Chat tokenizers of several kinds that split and normalise text differently, built without
downloads.
"""

from functools import cache
from typing import Any

from tests.helpers.chat_tokenizers import train_unigram, train_word_piece
from tests.helpers.tiny_model import CHAT_TEMPLATE, SPECIAL, TAGS, make_tiny_tokenizer

LINES = ["you see a desk and a mug", "nothing happens here", "system user assistant look"]
TOOLS = ("<tool_call>", "</tool_call>")
END_TURN = "<end_turn>"
TEMPLATE = CHAT_TEMPLATE.replace("<|im_end|>", END_TURN)


def unmarked() -> Any:
    """Return a byte-level tokenizer whose end-of-turn token is added and not marked as special."""
    from tokenizers import AddedToken

    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokens = [AddedToken(text, special=False) for text in (END_TURN, *TOOLS)]
    tokenizer.add_tokens(tokens)
    return tokenizer


def _wrapped(raw: Any) -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    # The tokens also match normalised text, where the spelling may differ. The end of a turn is not
    # special.
    raw.add_special_tokens([AddedToken(text, normalized=True) for text in SPECIAL])
    raw.add_tokens([AddedToken(text, normalized=True) for text in (*TAGS, *TOOLS, END_TURN)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|pad|>", unk_token="<unk>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


WORDS = "< > | / _ action level think im_end im_start pad"
KINDS = {
    "bytes": make_tiny_tokenizer,
    "unmarked": unmarked,
    "pieces": lambda: _wrapped(train_unigram(LINES, 120)),
    "words": lambda: _wrapped(train_word_piece([*LINES, WORDS], 120, "Lowercase")),
}


@cache
def of_kind(kind: str) -> Any:
    """Return the tokenizer of ``KINDS``; each is made once."""
    return KINDS[kind]()
