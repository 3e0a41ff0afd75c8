"""A chat template as text: what it renders, and what it writes around the messages.

The text around the messages is found by rendering anchors in the place of their contents.
"""

import contextlib
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from jinja2.exceptions import TemplateError

# {"role": "system" | "user" | "assistant", "content": text}
Message = dict[str, str]

# The letter at the end keeps message 1 apart from message 10.
ANCHOR = re.compile(r"xANCHOR(\d+)x")
# What a template raises on purpose, and by accident over roles or fields it does not expect.
RENDER_ERRORS = (TemplateError, TypeError, KeyError, ValueError, AttributeError)
# Arguments of ``apply_chat_template`` that are set here.
RESERVED = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "return_dict",
    "tokenize",
)


class TemplateUnsupported(ValueError):
    """The chat template cannot be used at all, or not with the history policy asked for."""


def anchor(index: int) -> str:
    """The stand-in for the content of message ``index``."""
    return f"xANCHOR{index}x"


class ChatTemplate:
    """Text-level view of ``tokenizer.chat_template``.

    ``parts``: the template wants content as a list of typed parts instead of a string. ``trims``:
    it strips white space around user content. ``takes_system``: it renders a system message of its
    own; where it does not, the system text is put in front of the first user message.

    Raises:
        TemplateUnsupported: There is no template, it does not show one user message exactly once,
            or ``template_kwargs`` has a key of ``RESERVED``.
    """

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateUnsupported(
                "the tokenizer has no chat template; set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        self._kwargs = template_kwargs or {}
        reserved = sorted(set(self._kwargs).intersection(RESERVED))
        if reserved:
            raise TemplateUnsupported(
                f"data.apply_chat_template_kwargs has {', '.join(reserved)}, which the framework "
                "sets; allowed: arguments that the template itself reads; fix: remove them (a "
                "template belongs in chat_template.jinja beside the tokenizer)"
            )
        self.parts = self._wants_parts()
        padded = f" {anchor(0)} "
        self.trims = padded not in self.render([{"role": "user", "content": padded}])
        with_system = [("system", anchor(0)), ("user", anchor(1))]
        self.takes_system = self._shows_once(with_system, self.parts)
        self.pieces = cache(self._pieces)

    def render(
        self,
        messages: Sequence[Message],
        parts: bool | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The template's text for ``messages``, by default ready for an assistant turn."""
        return self._apply(messages, parts, add_generation_prompt, tokenize=False)

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """What ``apply_chat_template(tokenize=True)`` returns for ``messages``, ready for an
        assistant turn.
        """
        ids = self._apply(messages, None, True, tokenize=True, return_dict=False)
        return list(ids)

    def _apply(
        self,
        messages: Sequence[Message],
        parts: bool | None,
        add_generation_prompt: bool,
        **options: bool,
    ) -> Any:
        parts = self.parts if parts is None else parts
        shown: list[dict[str, Any]] = [dict(message) for message in messages]
        if parts:
            for message in shown:
                message["content"] = [{"type": "text", "text": message["content"]}]
        return self._tokenizer.apply_chat_template(
            shown, add_generation_prompt=add_generation_prompt, **options, **self._kwargs
        )

    def _pieces(self, roles: tuple[str, ...]) -> list[str | int]:
        """The text for messages of ``roles``: strings of the template, integers where a message's
        content goes.
        """
        messages = [{"role": role, "content": anchor(i)} for i, role in enumerate(roles)]
        try:
            texts = ANCHOR.split(self.render(messages))
        except RENDER_ERRORS as error:
            raise TemplateUnsupported(
                f"the chat template refuses messages of roles {list(roles)}: {error}"
            ) from error
        # What the pattern's group caught, the indices, stands at the odd places.
        places = [int(index) for index in texts[1::2]]
        pieces: list[str | int] = list(texts)
        pieces[1::2] = places
        if sorted(places) != list(range(len(roles))):
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
            text = self.render([{"role": role, "content": content} for role, content in turns])
        except RENDER_ERRORS as error:
            raise TemplateUnsupported(
                f"the chat template cannot continue after an assistant turn ({error}); "
                "use env.history=window"
            ) from error
        _, kept, tail = text.rpartition(anchor(1))
        before, found, after = tail.rpartition(anchor(2))
        if not kept or not found:
            raise TemplateUnsupported(
                "the chat template does not keep an earlier assistant turn in front of the next "
                "user turn; use env.history=window"
            )
        return before, after

    def turn_end(self) -> str:
        """What the template writes after an assistant's words: up to the next user text where it
        can continue, else up to its end; empty where it shows no assistant turn.
        """
        with contextlib.suppress(TemplateUnsupported):
            return self.between()[0]
        with contextlib.suppress(TemplateUnsupported):
            return self.closing()
        return ""

    def closing(self) -> str:
        """What the template writes after the words of a last assistant turn.

        Raises:
            TemplateUnsupported: It does not show such a turn.
        """
        turns = [("user", anchor(0)), ("assistant", anchor(1))]
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = self.render(messages, add_generation_prompt=False)
        except RENDER_ERRORS as error:
            raise TemplateUnsupported(
                f"the chat template refuses assistant turns: {error}"
            ) from error
        _, shown, end = text.rpartition(anchor(1))
        if not shown:
            raise TemplateUnsupported("the chat template does not show an assistant turn")
        return end

    def _wants_parts(self) -> bool:
        # Strings first: a template that takes both is used in the simpler way.
        for parts in (False, True):
            if self._shows_once([("user", anchor(0))], parts):
                return parts
        raise TemplateUnsupported(
            "the chat template does not show a user message exactly once: it cannot be used"
        )

    def _shows_once(self, turns: list[tuple[str, str]], parts: bool) -> bool:
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = self.render(messages, parts)
        except RENDER_ERRORS:
            return False
        return all(text.count(content) == 1 for _, content in turns)
