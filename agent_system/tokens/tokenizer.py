"""Protocols of tokenizers. Those of Hugging Face transformers implement them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard


class TextTokenizer(Protocol):
    """Tokenizer without a chat template: text to tokens and back."""

    def __call__(
        self, text: str, *, add_special_tokens: bool = ..., **options: Any
    ) -> Mapping[str, Any]:
        """Return a mapping with ``input_ids``, the tokens of ``text``."""
        ...

    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


class AddedToken(Protocol):
    """Token that was added to the vocabulary. ``special``: ``split_special_tokens`` splits it."""

    @property
    def content(self) -> str: ...

    @property
    def special(self) -> bool: ...


class ChatTokenizer(TextTokenizer, Protocol):
    """A tokenizer with a chat template."""

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **options: Any,
    ) -> Any:
        """Return ``conversation`` as one text if ``tokenize`` is false."""
        ...


def is_chat_tokenizer(tokenizer: object) -> TypeGuard[ChatTokenizer]:
    """Return True if ``tokenizer``, any object, has one chat template or several by name."""
    return isinstance(getattr(tokenizer, "chat_template", None), (str, dict))


def end_of_sequence(tokenizer: object) -> int | None:
    """Return the id of the end-of-sequence token, or None."""
    # Not in the protocols: transformers resolves it in __getattr__, which type checkers ignore.
    token = getattr(tokenizer, "eos_token_id", None)
    return token if isinstance(token, int) else None


def padding_token(tokenizer: object) -> int:
    """Return the id that pads rows: the padding token, else the end-of-sequence token.

    Raises ``ValueError`` if the tokenizer has neither.
    """
    padding = getattr(tokenizer, "pad_token_id", None)
    token = end_of_sequence(tokenizer) if padding is None else padding
    if token is None:
        raise ValueError("the tokenizer has neither pad_token_id nor eos_token_id: set one of them")
    return token
