"""What this package asks of a tokenizer; those of Hugging Face transformers have it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard


class TextTokenizer(Protocol):
    """Text to tokens and back; enough where there is no chat template."""

    def __call__(
        self, text: str, *, add_special_tokens: bool = ..., **options: Any
    ) -> Mapping[str, Any]:
        """A mapping with ``input_ids``, the tokens of ``text``."""
        ...

    def decode(self, token_ids: list[int], **options: Any) -> Any:
        """The text of ``token_ids``."""
        ...


class AddedToken(Protocol):
    """A token that was added to the vocabulary as a whole."""

    @property
    def content(self) -> str:
        """Its text."""
        ...

    @property
    def special(self) -> bool:
        """Whether ``split_special_tokens`` splits that text."""
        ...


class ChatTokenizer(TextTokenizer, Protocol):
    """A tokenizer with a chat template."""

    @property
    def all_special_ids(self) -> Sequence[int]:
        """The special tokens."""
        ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        """The added tokens by id."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **options: Any,
    ) -> Any:
        """``conversation`` as one text, where ``tokenize`` is false."""
        ...


def is_chat_tokenizer(tokenizer: object) -> TypeGuard[ChatTokenizer]:
    """Whether ``tokenizer`` brings one template, or several by name; any object may be asked."""
    return isinstance(getattr(tokenizer, "chat_template", None), (str, dict))


def end_of_sequence(tokenizer: object) -> int | None:
    """The id of ``tokenizer``'s end-of-sequence token; None where it has none."""
    # Not a member of the protocols: transformers resolves it in __getattr__, which no checker sees.
    found = getattr(tokenizer, "eos_token_id", None)
    return found if isinstance(found, int) else None


def padding_token(tokenizer: object) -> int:
    """The id that pads rows: ``tokenizer``'s own, else its end-of-sequence token; raises
    ``ValueError`` where it has neither.
    """
    found = getattr(tokenizer, "pad_token_id", None)
    token = end_of_sequence(tokenizer) if found is None else found
    if token is None:
        raise ValueError("the tokenizer has neither pad_token_id nor eos_token_id: set one")
    return token
