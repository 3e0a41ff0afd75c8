"""Tokens of a conversation for tokenizers without a chat template: its texts, one after another."""

from collections.abc import Sequence

from agent_system.tokens.bridge import Bridge, ChatBridge, strip_end_ids
from agent_system.tokens.ledger import SegmentKind, TokenLedger
from agent_system.tokens.probe import Verdict, probe_template
from agent_system.tokens.template import Message, TemplateUnsupported
from agent_system.tokens.tokenizer import TextTokenizer, is_chat_tokenizer
from verl.utils.chat_template import find_end_ids
from verl.utils.chat_tokens import ChatTokens


class PlainBridge:
    """``ChatBridge`` for a tokenizer that has no chat template.

    ``tokenizer(text, add_special_tokens=False)`` must return a mapping with ``input_ids``.
    ``decode`` of the tokenizer is needed only for ``PlainBridge.decode``.
    """

    end_of_turn_id: int | None = None

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.end_ids = find_end_ids(tokenizer)
        # Only tokenizers of transformers have control tokens (<|im_end|>) that a text may contain.
        is_transformers = hasattr(tokenizer, "added_tokens_decoder")
        self._tokens = ChatTokens(tokenizer, "") if is_transformers else None
        self._decode_options = (
            {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            if is_transformers
            else {}
        )

    def first_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of the contents of ``messages``, joined by line breaks.

        The BOS token, if the tokenizer adds one, is in front. A tokenizer that is not of
        transformers adds none.
        """
        text = "\n".join(message["content"] for message in messages)
        if self._tokens is None:
            return list(self._encode(text))
        return [*self._start_tokens(), *self._tokens.encode(self._tokens.mark_control_tokens(text))]

    def make_bridge(
        self,
        sampled_ids: Sequence[int],  # noqa: ARG002  nothing closes a turn here
        observation: str,
    ) -> Bridge:
        """Return the tokens of ``observation``, without any template tokens."""
        return Bridge((), self.encode_text(observation), ())

    def append_bridge(
        self, ledger: TokenLedger, bridge: Bridge, turn: int, episode: int = 0
    ) -> None:
        """Append the observation of ``bridge`` to ``ledger``, before the tokens of ``turn``."""
        ledger.append(bridge.observation, SegmentKind.ENV, turn=turn, episode=episode)

    def decode(self, sampled_ids: Sequence[int]) -> str:
        """Return the text of a sampled turn without its end tokens."""
        turn_ids = strip_end_ids(sampled_ids, self.end_ids)
        return self.tokenizer.decode(turn_ids, **self._decode_options)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the ids of text that continues other text, with control tokens as plain text."""
        if self._tokens is None:
            return self._encode(text)
        return self._tokens.encode(self._tokens.mark_control_tokens(text), inside=True)

    def encode_template(self, text: str) -> tuple[int, ...]:
        """Return the ids of text that continues other text; control tokens in it keep their ids."""
        return (
            self._encode(text) if self._tokens is None else self._tokens.encode(text, inside=True)
        )

    def _start_tokens(self) -> list[int]:
        """Return the tokens that the tokenizer puts in front of text: BOS, or nothing."""
        ids_without_start = self._encode("x")
        ids_with_start = list(self.tokenizer("x", add_special_tokens=True)["input_ids"])
        start_offsets = range(len(ids_with_start) - len(ids_without_start) + 1)
        matches = (
            at
            for at in start_offsets
            if tuple(ids_with_start[at : at + len(ids_without_start)]) == ids_without_start
        )
        return ids_with_start[: next(matches, 0)]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def bridge_for_appending(tokenizer: TextTokenizer) -> ChatBridge | PlainBridge:
    """Return the encoder of prompts and observations for append-only conversations.

    It is a ``ChatBridge``, or a ``PlainBridge`` if the tokenizer has no chat template.

    Raises:
        TemplateUnsupported: The template changes earlier turns, so a conversation is not one
            growing token sequence. The message gives the reason.
    """
    if not is_chat_tokenizer(tokenizer):
        return PlainBridge(tokenizer)
    probe = probe_template(tokenizer)
    if probe.verdict is not Verdict.APPEND:
        raise TemplateUnsupported(
            "a trial is one growing token sequence, and this chat template cannot continue one: "
            f"{probe.reason}. Set a template that keeps earlier turns unchanged "
            "(trl contains such variants: trl/chat_templates/*_training.jinja)"
        )
    return ChatBridge(tokenizer)
