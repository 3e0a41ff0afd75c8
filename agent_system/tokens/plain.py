"""Tokens of a conversation without a chat template: the texts one after the other, nothing between
them.
"""

from collections.abc import Sequence

from agent_system.tokens.bridge import Bridge, ChatBridge, without_end
from agent_system.tokens.ledger import SegmentKind, TokenLedger
from agent_system.tokens.probe import Verdict, probe_template
from agent_system.tokens.template import Message, TemplateUnsupported
from agent_system.tokens.tokenizer import TextTokenizer, end_of_sequence, is_chat_tokenizer


class PlainBridge:
    """``ChatBridge`` for a tokenizer that has no chat template.

    ``tokenizer(text, add_special_tokens=False)`` must return a mapping with ``input_ids``; what
    else it has is asked only by who needs it.
    """

    end_of_turn_id: int | None = None

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        eos = end_of_sequence(tokenizer)
        self.end_ids: frozenset[int] = frozenset() if eos is None else frozenset({eos})
        # Only a tokenizer with control tokens can be made to read them in a text, and only such a
        # one knows the option.
        specials = getattr(tokenizer, "all_special_ids", None)
        has_specials = isinstance(specials, list) and bool(specials)
        self._safe = {"split_special_tokens": True} if has_specials else {}

    def first_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the contents of ``messages``, a line break between two of them."""
        return list(self.encode_text("\n".join(message["content"] for message in messages)))

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
        return self.tokenizer.decode(without_end(sampled_ids, self.end_ids))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that nobody sampled."""
        return tuple(self.tokenizer(text, add_special_tokens=False, **self._safe)["input_ids"])

    def encode_template(self, text: str) -> tuple[int, ...]:
        """Token ids of a text whose control tokens are meant."""
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
