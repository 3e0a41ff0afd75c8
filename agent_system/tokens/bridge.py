"""The chat-template bridge: the tokens between what the policy sampled and what it sees next.

    sampled turn   ... </action>
    bridge         <|im_end|> \\n <|im_start|> user \\n
    observation    You see a desk.
    bridge         <|im_end|> \\n <|im_start|> assistant \\n

The template's own text is found once by anchors (``template.ChatTemplate``) and encoded once.
Content is encoded with ``split_special_tokens=True``, and cut inside the added tokens that the
template writes: no text can act as a control token. Text of an environment (``as_text``) is cut
inside every other added token that is a mark (``<tool_call>``), so that what it writes is never the
tag that a prompt's own words and the policy write.
"""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from agent_system.tokens.ledger import SegmentKind, TokenLedger
from agent_system.tokens.template import ChatTemplate, Message, TemplateUnsupported
from agent_system.tokens.tokenizer import AddedToken, ChatTokenizer, end_of_sequence

# Prompts show these as the policy says them.
TAG = re.compile(r"</?(level|think|action)>")
# What an added token looks like that is no word: <tool_call>, [INST], <|vision_start|>.
MARK = re.compile(r"\s*[<\[].*[>\]]\s*", re.DOTALL)
# Where a text of an environment is cut; Unicode keeps it free for such use. Nobody else reads it.
CUT = "\ufdd0"
# Distinct texts whose tokens are remembered: observations repeat within a group.
ENCODED_TEXTS = 8192


@dataclass(frozen=True, slots=True)
class Bridge:
    """Tokens from the end of an agent's turn to the next one: template, observation, template."""

    before: tuple[int, ...]
    observation: tuple[int, ...]
    after: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.before) + len(self.observation) + len(self.after)


def without_end(sampled_ids: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    """``sampled_ids`` without the tokens of ``end_ids`` that they end with."""
    end = len(sampled_ids)
    while end and sampled_ids[end - 1] in end_ids:
        end -= 1
    return list(sampled_ids[:end])


def without_cuts(text: str) -> str:
    """``text`` as it was before ``ChatBridge.as_text``: what others than this bridge read."""
    return text.replace(CUT, "")


class ChatBridge:
    """First prompts and bridges of one tokenizer, as token ids.

    ``tokenizer`` is a Hugging Face tokenizer with a chat template; ``template_kwargs`` go to the
    template.

    Raises:
        TemplateUnsupported: See ``ChatTemplate``; ``between`` raises it where the template cannot
            continue a conversation, so that a template which only suits ``env.history=window``
            still gives first prompts.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, template_kwargs: dict[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, template_kwargs)
        specials = frozenset(tokenizer.all_special_ids)
        self._control = specials | frozenset(tokenizer.added_tokens_decoder)
        self.encode_text = lru_cache(ENCODED_TEXTS)(self._encode_text)
        self.encode_template = lru_cache(256)(self._encode_template)

    @cached_property
    def _tail(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        before, after = self.template.between()
        return self.encode_template(before), self.encode_template(after)

    @cached_property
    def end_of_turn_id(self) -> int | None:
        """The control token that closes an assistant turn in the template; None where plain text
        closes it.
        """
        before = self._tail[0]
        return before[0] if before and before[0] in self._control else None

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a turn when sampled: the template's end of turn and the tokenizer's end
        of sequence.
        """
        ends = (self.end_of_turn_id, end_of_sequence(self.tokenizer))
        return frozenset(end for end in ends if end is not None)

    def first_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of ``messages`` with the generation prompt; a template that opens ``<think>``
        opens it here.
        """
        if messages[0]["role"] == "system" and not self.template.takes_system:
            system, first, *rest = messages
            text = f"{system['content']}\n\n{first['content']}"
            messages = [{**first, "content": text}, *rest]
        roles = tuple(message["role"] for message in messages)
        ids: list[int] = []
        for piece in self.template.pieces(roles):
            if isinstance(piece, str):
                ids.extend(self.encode_template(piece))
            else:
                ids.extend(self._content(messages[piece]))
        return ids

    def between(self, sampled_ids: Sequence[int], observation: str) -> Bridge:
        """The bridge after a turn of ``sampled_ids``.

        An end-of-turn token that the policy sampled is not repeated; a missing one is part of
        ``before``.
        """
        before, after = self._tail
        ended = self.end_of_turn_id is not None and bool(sampled_ids)
        if ended and sampled_ids[-1] == self.end_of_turn_id:
            before = before[1:]
        return Bridge(before, self._content({"role": "user", "content": observation}), after)

    def extend(self, ledger: TokenLedger, bridge: Bridge, turn: int, episode: int = 0) -> None:
        """Append ``bridge`` to ``ledger`` as what comes before ``turn``."""
        ledger.append(bridge.before, SegmentKind.BRIDGE, turn=turn, episode=episode)
        ledger.append(bridge.observation, SegmentKind.ENV, turn=turn, episode=episode)
        ledger.append(bridge.after, SegmentKind.BRIDGE, turn=turn, episode=episode)

    def decode(self, sampled_ids: Sequence[int]) -> str:
        """The text of a sampled turn without the tokens that ended it; tags and other tokens stay
        visible.
        """
        said = without_end(sampled_ids, self.end_ids)
        # The library's clean-up would drop spaces that were sampled: text and tokens would differ.
        return self.tokenizer.decode(
            said, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def as_text(self, said: str) -> str:
        """``said`` by an environment, marked so that none of it becomes an added token: the same
        text, in the tokens of its letters.
        """
        plain = without_cuts(said)
        return self._added.sub(lambda found: f"{found[0][0]}{CUT}{found[0][1:]}", plain)

    @cached_property
    def _added(self) -> re.Pattern[str]:
        """Every added token that is a mark, and the tags; the longest first. Others are words: a
        small policy's tokenizer may have those of its environment.
        """
        contents = {
            token.content
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if number in self._meant_only or MARK.fullmatch(token.content)
        }
        # A token of one character has no inside to cut: it is a letter like any other.
        texts = [text for text in contents if text.strip() and len(text) > 1]
        longest = sorted(texts, key=lambda text: (-len(text), text))
        return re.compile("|".join([*map(re.escape, longest), TAG.pattern]))

    def _content(self, message: Message) -> tuple[int, ...]:
        text = message["content"]
        # As the template would have trimmed it, which never sees the real text.
        return self.encode_text(text.strip() if self.template.trims else text)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(token for part in text.split(CUT) for token in self._encode_part(part))

    def _encode_part(self, text: str) -> list[int]:
        cuts: list[int] = []
        if self._unmarked is not None:
            # One character in, so that neither part spells the token.
            cuts = [found.start() + 1 for found in self._unmarked.finditer(text)]
        ids: list[int] = []
        for start, end in pairwise([0, *cuts, len(text)]):
            ids.extend(self._split(text[start:end]))
        if self._meant_only.isdisjoint(ids):
            return ids
        # A tokenizer that tidies letters up found one in what is not spelled like it.
        return [token for letter in text for token in self._split(letter)]

    def _split(self, text: str) -> list[int]:
        encoded = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return encoded["input_ids"]

    @cached_property
    def _meant_only(self) -> frozenset[int]:
        """Control tokens: no text becomes one of them."""
        added = self.tokenizer.added_tokens_decoder
        special = {number for number, token in added.items() if token.special}
        written = {
            number
            for number, token in added.items()
            if number in self._written and self._controls(token)
        }
        # What a tokenizer does not know it says with a special token of its own.
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        return frozenset(number for number in special | written if number != unknown)

    @cached_property
    def _written(self) -> set[int | None]:
        """Tokens that the template writes, and the end of the sequence."""
        pieces = [piece for piece in self.template.pieces(("user",)) if isinstance(piece, str)]
        with contextlib.suppress(TemplateUnsupported):
            pieces += self.template.between()
        return {end_of_sequence(self.tokenizer)}.union(*map(self.encode_template, pieces))

    @staticmethod
    def _controls(token: AddedToken) -> bool:
        """Whether ``token``, which the template writes, is no white space and no tag of ours: those
        may stay whole.
        """
        return bool(token.content.strip()) and TAG.fullmatch(token.content) is None

    @cached_property
    def _unmarked(self) -> re.Pattern[str] | None:
        """Control tokens that the tokenizer does not mark as special, and so would not split; None:
        there are none.
        """
        texts = [
            token.content
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if number in self._written and not token.special and self._controls(token)
        ]
        return re.compile("|".join(map(re.escape, sorted(texts)))) if texts else None

    def _encode_template(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
