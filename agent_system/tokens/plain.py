"""Tokens of a conversation without a chat template: the texts one after the other, nothing between
them.
"""

from collections.abc import Sequence

from agent_system.tokens.bridge import Bridge, ChatBridge, without_end
from agent_system.tokens.ledger import SegmentKind, TokenLedger
from agent_system.tokens.probe import Verdict, probe_template
from agent_system.tokens.template import Message, TemplateUnsupported
from agent_system.tokens.tokenizer import TextTokenizer, is_chat_tokenizer
from verl.utils.chat_tokens import ChatTokens
from verl.utils.end_tokens import find_end_ids


class PlainBridge:
    """``ChatBridge`` for a tokenizer that has no chat template.

    ``tokenizer(text, add_special_tokens=False)`` must return a mapping with ``input_ids``; what
    else it has is asked only by who needs it.
    """

    end_of_turn_id: int | None = None

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.end_ids = find_end_ids(tokenizer)
        # Only a tokenizer of transformers has control tokens that a text could spell.
        is_library = hasattr(tokenizer, "added_tokens_decoder")
        self._tokens = ChatTokens(tokenizer, "") if is_library else None
        self._as_sampled = (
            {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            if is_library
            else {}
        )

    def first_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the contents of ``messages``, a line break between two of them, after the
        token that the tokenizer begins a text with.
        """
        text = "\n".join(message["content"] for message in messages)
        if self._tokens is None:
            return list(self._encode(text))
        return [*self._begin(), *self._tokens.encode(self._tokens.mark(text))]

    def between(
        self,
        sampled_ids: Sequence[int],  # noqa: ARG002  nothing closes a turn here
        observation: str,
    ) -> Bridge:
        """The tokens of ``observation``; there is nothing around it."""
        return Bridge((), self.encode_text(observation), ())

    def extend(self, ledger: TokenLedger, bridge: Bridge, turn: int, episode: int = 0) -> None:
        """Append ``bridge`` to ``ledger`` as what comes before ``turn``."""
        ledger.append(bridge.observation, SegmentKind.ENV, turn=turn, episode=episode)

    def decode(self, sampled_ids: Sequence[int]) -> str:
        """The text of a sampled turn without the tokens that ended it."""
        said = without_end(sampled_ids, self.end_ids)
        return self.tokenizer.decode(said, **self._as_sampled)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that continues another one and that was not sampled."""
        if self._tokens is None:
            return self._encode(text)
        return self._tokens.encode(self._tokens.mark(text), inside=True)

    def encode_template(self, text: str) -> tuple[int, ...]:
        """Token ids of a text whose control tokens are meant."""
        return (
            self._encode(text) if self._tokens is None else self._tokens.encode(text, inside=True)
        )

    def _begin(self) -> list[int]:
        """What the tokenizer puts before a text: the token that begins a sequence, or nothing."""
        plain = self._encode("x")
        whole = list(self.tokenizer("x", add_special_tokens=True)["input_ids"])
        places = range(len(whole) - len(plain) + 1)
        found = (at for at in places if tuple(whole[at : at + len(plain)]) == plain)
        return whole[: next(found, 0)]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def bridge_for_appending(tokenizer: TextTokenizer) -> ChatBridge | PlainBridge:
    """The bridge for conversations that only grow: the chat template's, or a plain one where there
    is no template.

    Raises:
        TemplateUnsupported: The template does not keep earlier turns as they were, so that a
            conversation cannot be one growing token sequence; the message says why.
    """
    if not is_chat_tokenizer(tokenizer):
        return PlainBridge(tokenizer)
    probe = probe_template(tokenizer)
    if probe.verdict is not Verdict.APPEND:
        raise TemplateUnsupported(
            "a trial is one growing token sequence, and this chat template cannot continue one: "
            f"{probe.reason}. Set one that keeps earlier turns as they were "
            "(trl ships such variants: trl/chat_templates/*_training.jinja)"
        )
    return ChatBridge(tokenizer)
