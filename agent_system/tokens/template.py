"""A chat template as text: what it writes around the messages, found by rendering anchors.

Messages are never rendered with their real content. The template is rendered once per sequence of
roles with an anchor in the place of every content, and the text between the anchors is kept;
content is put there later, as tokens.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2.exceptions import TemplateError

Message = dict[str, str]  # {"role": "system" | "user" | "assistant", "content": text}

ANCHOR = re.compile(r"xANCHOR(\d+)x")
RENDER_ERRORS = (TemplateError, TypeError, KeyError, ValueError, AttributeError)


class TemplateUnsupported(ValueError):
    """The chat template cannot be used at all, or not with the history policy asked for."""


def anchor(index: int) -> str:
    """The stand-in for the content of message ``index``."""
    return f"xANCHOR{index}x"


def has_chat_template(tokenizer: Any) -> bool:
    """Whether ``tokenizer`` brings one template, or several by name; any object may be asked."""
    return isinstance(getattr(tokenizer, "chat_template", None), (str, dict))


class ChatTemplate:
    """Text-level view of ``tokenizer.chat_template``.

    ``parts``: the template wants content as a list of typed parts instead of a string. ``trims``:
    it strips white space around user content. ``takes_system``: it renders a system message of its
    own; where it does not, the system text is put in front of the first user message.

    Raises:
        TemplateUnsupported: There is no template, or it does not show one user message exactly
            once.
    """

    def __init__(self, tokenizer, template_kwargs: dict[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateUnsupported(
                "the tokenizer has no chat template; set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        self._kwargs = template_kwargs or {}
        self.parts = self._wants_parts()
        self.trims = f" {anchor(0)} " not in self.render(
            [{"role": "user", "content": f" {anchor(0)} "}]
        )
        self.takes_system = self._shows_once(
            [("system", anchor(0)), ("user", anchor(1))], self.parts
        )
        self.pieces = cache(self._pieces)

    def render(self, messages: Sequence[Message], parts: bool | None = None) -> str:
        """The template's text for ``messages``, ready for an assistant turn."""
        parts = self.parts if parts is None else parts
        if parts:
            messages = [
                {**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages
            ]
        return self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **self._kwargs
        )

    def _pieces(self, roles: tuple[str, ...]) -> list[str | int]:
        """The text for messages of ``roles``: strings of the template, integers where a message's
        content goes.
        """
        messages = [{"role": role, "content": anchor(i)} for i, role in enumerate(roles)]
        try:
            pieces: list[str | int] = list(ANCHOR.split(self.render(messages)))
        except RENDER_ERRORS as error:
            raise TemplateUnsupported(
                f"the chat template refuses messages of roles {list(roles)}: {error}"
            ) from error
        pieces[1::2] = [int(index) for index in pieces[1::2]]
        if sorted(pieces[1::2]) != list(range(len(roles))):
            raise TemplateUnsupported(
                f"the chat template does not show every message of roles {list(roles)} once"
            )
        return [piece for piece in pieces if piece != ""]

    def generation_prompt(self) -> str:
        """What the template writes after the user's text to open the assistant's turn."""
        return self.render([{"role": "user", "content": anchor(0)}]).rpartition(anchor(0))[2]

    def between(self) -> tuple[str, str]:
        """The text between an assistant's words and the next user text, and the text after that
        user text.

        Raises:
            TemplateUnsupported: The template cannot render a conversation that goes on after an
                assistant turn.
        """
        turns = [("user", anchor(0)), ("assistant", anchor(1)), ("user", anchor(2))]
        try:
            tail = self.render(
                [{"role": role, "content": text} for role, text in turns]
            ).rpartition(anchor(1))
        except RENDER_ERRORS as error:
            raise TemplateUnsupported(
                f"the chat template cannot continue after an assistant turn ({error}); use env.history=window"
            ) from error
        before, found, after = tail[2].rpartition(anchor(2))
        if not tail[1] or not found:
            raise TemplateUnsupported(
                "the chat template does not keep an earlier assistant turn in front of the next user turn; "
                "use env.history=window"
            )
        return before, after

    def _wants_parts(self) -> bool:
        for parts in (False, True):
            if self._shows_once([("user", anchor(0))], parts):
                return parts
        raise TemplateUnsupported(
            "the chat template does not show a user message exactly once: it cannot be used"
        )

    def _shows_once(self, turns: list[tuple[str, str]], parts: bool) -> bool:
        try:
            text = self.render(
                [{"role": role, "content": content} for role, content in turns], parts
            )
        except RENDER_ERRORS:
            return False
        return all(text.count(content) == 1 for _, content in turns)
