"""The tokens of whole conversations, in which control tokens are the chat template's alone.

What the policy or an environment says may spell ``<|im_end|>``; as a token that would end its turn,
and what follows could pose as another speaker.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

# Where a content spells a control token; Unicode keeps it free for such use.
MARK = "\ufdd1"
MARKED = re.compile(f"{MARK}([0-9]+){MARK}")


class ConversationTokens:
    """Encodes conversations with the chat template of ``tokenizer``, a Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The ids of ``messages``: those of the rendered text, unless a content would become a
        control token in it. It is then encoded as the letters that it is.
        """
        marked = self._render(
            [{**said, "content": self._mark(said["content"])} for said in messages]
        )
        template = [self._control[text] for text in self._pattern.findall(marked)]
        whole = self._encode(MARKED.sub(self._spelled, marked))
        numbers = set(self._control.values())
        if [token for token in whole if token in numbers] == template:
            return whole
        ids: list[int] = []
        # The pattern has a group: what the template writes stands at the odd places.
        for place, piece in enumerate(self._pattern.split(marked)):
            if place % 2:
                ids.append(self._control[piece])
            else:
                ids.extend(self._letters(MARKED.sub(self._spelled, piece)))
        return ids

    @cached_property
    def _control(self) -> dict[str, int]:
        """The control tokens and their ids: those that the tokenizer calls special, and what else
        the template writes around a user's text.
        """
        frame = self._render([{"role": "user", "content": ""}])
        # What a tokenizer does not know it says with a special token of its own.
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        return {
            token.content: number
            for number, token in self._tokenizer.added_tokens_decoder.items()
            if token.content.strip() and number != unknown
            if token.special or token.content in frame
        }

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest = sorted(self._control, key=lambda text: (-len(text), text))
        # Without a control token, what never matches.
        return re.compile(f"({'|'.join(map(re.escape, longest)) or '(?!)'})")

    @cached_property
    def _order(self) -> list[str]:
        return list(self._control)

    def _mark(self, content: str) -> str:
        """``content`` with a number in the place of each control token that it spells."""
        plain = content.replace(MARK, "")
        return self._pattern.sub(lambda found: f"{MARK}{self._order.index(found[0])}{MARK}", plain)

    def _spelled(self, found: re.Match[str]) -> str:
        return self._order[int(found[1])]

    def _letters(self, text: str) -> list[int]:
        """The ids of ``text``, none of them a control token."""
        ids = self._encode(text, split_special_tokens=True)
        if set(self._control.values()).isdisjoint(ids):
            return ids
        # Not marked as special, or found in what a tokenizer tidied up.
        return [token for letter in text for token in self._encode(letter)]

    def _render(self, messages: list[dict[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=False
        )

    def _encode(self, text: str, **options: bool) -> list[int]:
        # The template writes the special tokens itself.
        return self._tokenizer(text, add_special_tokens=False, **options)["input_ids"]
