"""Protocols of tokenizers. Those of Hugging Face transformers implement them."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard


class TextTokenizer(Protocol):
    """Tokenizer without a chat template: text to tokens and back."""

    def __call__(
        self, text: str, *, add_special_tokens: bool = ..., **options: Any
    ) -> Mapping[str, Any]:
        """Return a mapping with ``input_ids``, the tokens of ``text``."""
        ...

    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


class ChatTokenizer(TextTokenizer, Protocol):
    """A tokenizer with a chat template."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

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


def padding_token(tokenizer: object) -> int:
    """Return the id that pads rows: the padding token, else the end-of-sequence token.

    Raises ``ValueError`` if the tokenizer has neither.
    """
    # Not in the protocols: transformers resolves them in __getattr__, which type checkers ignore.
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if isinstance(token, int):
            return token
    raise ValueError("the tokenizer has neither pad_token_id nor eos_token_id: set one of them")
