"""The tokens of whole conversations, in which control tokens are the chat template's alone."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from verl.utils.chat_tokens import MARK, ChatTokens

__all__ = ["MARK", "ConversationTokens"]


class ConversationTokens:
    """Encodes conversations with the chat template of ``tokenizer``, a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The ids of ``messages``: those of the rendered text, unless a content would become a
        control token in it. It is then encoded as the letters that it is.
        """
        mark = self._tokens.mark
        marked = [{**said, "content": mark(said["content"])} for said in messages]
        return list(self._tokens.encode(self._render(marked)))

    @cached_property
    def _tokens(self) -> ChatTokens:
        return ChatTokens(self._tokenizer, self._render([{"role": "user", "content": ""}]))

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=False
        )
