"""Chat-template bridge: the tokens between a sampled turn and the next turn.

    sampled turn   ... </action>
    bridge         <|im_end|> \\n <|im_start|> user \\n
    observation    You see a desk.
    bridge         <|im_end|> \\n <|im_start|> assistant \\n

Prompts and bridges are rendered with their real text and encoded as a whole
(``verl.utils.chat_tokens``). The tokens equal those of ``apply_chat_template(tokenize=True)``,
except that the text of a control token in a message becomes ordinary tokens.
``escape_added_tokens`` does the same for added tokens that look like tags (``<tool_call>``).
"""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeGuard

from agent_system.tokens.ledger import SegmentKind, TokenLedger
from verl.utils.chat_template import (
    ChatTemplate,
    Message,
    Tools,
    UnsupportedTemplateError,
    find_end_of_turn_id,
    find_reply_end_token,
    find_stop_token_ids,
    make_content_placeholder,
    make_placeholder_messages,
)
from verl.utils.chat_tokens import MAX_CACHED_TEXTS, TOKEN_SPLIT_CHARACTER, ChatTextEncoder

# Added tokens that look like tags, not like words: <tool_call>, [INST], <|vision_start|>.
TAG_LIKE_TOKEN_PATTERN = re.compile(r"\s*[<\[].*[>\]]\s*", re.DOTALL)


class TextTokenizer(Protocol):
    """Tokenizer without a chat template: text to tokens and back."""

    def __call__(
        self, text: str, *, add_special_tokens: bool = ..., **options: Any
    ) -> Mapping[str, Any]:
        """Return a mapping with ``input_ids``, the tokens of ``text``."""
        ...

    def decode(self, token_ids: list[int], **options: Any) -> Any: ...


class ChatTokenizer(TextTokenizer, Protocol):
    """Tokenizer that also has a chat template."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **options: Any,
    ) -> Any: ...


def is_chat_tokenizer(tokenizer: object) -> TypeGuard[ChatTokenizer]:
    """Return True if ``tokenizer``, any object, has one chat template or several by name."""
    return isinstance(getattr(tokenizer, "chat_template", None), (str, dict))


def find_padding_token_id(tokenizer: object) -> int:
    """Return the id that pads rows: the padding token, else the end-of-sequence token.

    Raises ``ValueError`` if the tokenizer has neither.
    """
    # Not in the protocols: transformers resolves them in __getattr__, which type checkers ignore.
    for name in ("pad_token_id", "eos_token_id"):
        token_id = getattr(tokenizer, name, None)
        if isinstance(token_id, int):
            return token_id
    raise ValueError("the tokenizer has neither pad_token_id nor eos_token_id: set one of them")


@dataclass(frozen=True, slots=True)
class InterTurnTokens:
    """Tokens between two turns of the agent: template tokens around the ``observation``."""

    ids_before: tuple[int, ...]
    observation: tuple[int, ...]
    ids_after: tuple[int, ...]

    @property
    def all_ids(self) -> tuple[int, ...]:
        """All tokens in order."""
        return (*self.ids_before, *self.observation, *self.ids_after)

    def append_to(self, ledger: TokenLedger, turn: int, episode: int = 0) -> None:
        """Append template and observation tokens to ``ledger``, before the tokens of ``turn``."""
        ids_with_kind = (
            (self.ids_before, SegmentKind.BRIDGE),
            (self.observation, SegmentKind.ENV),
            (self.ids_after, SegmentKind.BRIDGE),
        )
        for ids, kind in ids_with_kind:
            if ids:
                ledger.append(ids, kind, turn=turn, episode=episode)


def strip_end_ids(sampled_ids: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    """Return ``sampled_ids`` without trailing tokens that are in ``end_ids``."""
    kept_length = len(sampled_ids)
    while kept_length and sampled_ids[kept_length - 1] in end_ids:
        kept_length -= 1
    return list(sampled_ids[:kept_length])


def remove_escape_characters(text: str) -> str:
    """Return ``text`` without the invisible characters of ``ChatBridge.escape_added_tokens``."""
    return text.replace(TOKEN_SPLIT_CHARACTER, "")


class ChatBridge:
    """Encoder of first prompts and of the tokens between turns, with a tokenizer's chat template.

    ``template_kwargs`` are passed to the template. Raises ``UnsupportedTemplateError`` without a
    template, or if it does not render a user message exactly once. ``make_inter_turn_tokens``
    raises it if the template cannot continue a conversation. A template that only supports
    ``env.history=window`` can still encode first prompts.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, template_kwargs: dict[str, Any] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, template_kwargs)
        self._turn_end_text = self.template.render_turn_end()
        # Token that ends a turn of the history, and token that the policy samples to end its turn.
        self.history_end_id = find_end_of_turn_id(tokenizer, self._turn_end_text)
        self.sampled_closing_text, self.end_of_turn_id = find_reply_end_token(
            tokenizer, self.template
        )
        self.end_ids = find_stop_token_ids(tokenizer)
        self._text_encoder = ChatTextEncoder(tokenizer, self._collect_template_text())
        # Text up to the control token that closes an assistant turn. Empty if plain text closes it.
        self.turn_closing_text = self._text_encoder.find_control_text_at_start(self._turn_end_text)
        self.encode = self._text_encoder.encode
        self.encode_turn = lru_cache(MAX_CACHED_TEXTS)(self._encode_turn)

    def encode_first_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of ``messages`` with the generation prompt."""
        return list(
            self.encode(self.render_with_token_marks(self.adapt_messages_to_template(messages)))
        )

    def render_with_token_marks(
        self, messages: Sequence[Message], tools: Tools = (), *, add_generation_prompt: bool = True
    ) -> str:
        """Render ``messages`` with the chat template, as a text that ``encode`` tokenizes.

        Control tokens in contents are replaced by marks, which ``encode`` encodes as plain text.
        Raises the errors of the template (``RENDER_ERRORS``).
        """
        marked_messages = [self._mark_nested_control_tokens(message) for message in messages]
        return self.template.render(
            marked_messages,
            add_generation_prompt=add_generation_prompt,
            tools=self._mark_nested_control_tokens(tools),
        )

    def restore_control_tokens(self, marked_text: str) -> str:
        """Replace the marks of ``render_with_token_marks`` in ``marked_text`` by control tokens."""
        return self._text_encoder.restore_control_tokens(marked_text)

    def compute_added_prompt_ids(
        self, row_ids: Sequence[int], last_prompt: str, reply: str, next_prompt: str
    ) -> tuple[int, ...] | None:
        """Return the tokens that the next prompt adds to a row.

        ``row_ids`` are the tokens of the row: those of ``last_prompt`` and ``reply``. Both prompts
        are results of ``render_with_token_marks``. The next prompt continues the row if it begins
        with the text or with the tokens of the row. They can differ, because a policy can sample
        other tokens than the tokenizer writes for the same text. Equal text is not enough if a
        token of the prompt would cross the end of the row. Return None if the prompt does not
        continue the row.
        """
        # Compare marked texts, in which text of a user never equals a control token of the
        # template.
        if next_prompt.startswith(last_prompt):
            text_after_prompt = next_prompt[len(last_prompt) :]
            if self.restore_control_tokens(text_after_prompt).startswith(reply):
                reply_length = self._text_encoder.convert_to_marked_length(
                    text_after_prompt, len(reply)
                )
                added_ids = self._text_encoder.encode_tail_in_context(
                    next_prompt, len(last_prompt) + reply_length
                )
                if added_ids is not None:
                    return added_ids
        ids = self.encode(next_prompt)
        return ids[len(row_ids) :] if ids[: len(row_ids)] == tuple(row_ids) else None

    def merge_system_message(self, messages: Sequence[Message]) -> list[Message]:
        """Return ``messages`` with the system text in front of the first user message.

        They are unchanged if the template has a system role.
        """
        has_system = len(messages) > 1 and messages[0]["role"] == "system"
        if not has_system or self.template.renders_system_message:
            return list(messages)
        system_message, user_message, *later_messages = messages
        text = f"{system_message['content']}\n\n{user_message['content']}"
        return [{**user_message, "content": text}, *later_messages]

    def adapt_messages_to_template(self, messages: Sequence[Message]) -> list[Message]:
        """Return ``messages`` in the form that the chat template accepts.

        Without a system role, the system text is put before the first user message. Raises
        ``UnsupportedTemplateError`` if the template does not show each message once.
        """
        messages = self.merge_system_message(messages)
        self.template.split_pieces(tuple(message["role"] for message in messages))
        return messages

    def has_plain_text_only(self, messages: Sequence[Message]) -> bool:
        """Return True if no content of ``messages`` has a control token.

        A token or tag that ``escape_added_tokens`` has disabled counts as one. Only without control
        tokens do the tokens of ``encode_first_prompt`` equal those of ``apply_chat_template``.
        """
        texts = [message["content"] for message in messages]
        mark_control_tokens = self._text_encoder.mark_control_tokens
        return not any(
            TOKEN_SPLIT_CHARACTER in text or mark_control_tokens(text) != text for text in texts
        )

    def make_inter_turn_tokens(
        self, sampled_ids: Sequence[int], observation: str
    ) -> InterTurnTokens:
        """Return the template and observation tokens between the turn ``sampled_ids`` and the next.

        An end-of-turn token that the policy sampled is not repeated. A missing one is part of
        ``ids_before``.
        """
        text_before_observation, text_after_observation = self.template.render_between_turns()
        messages = make_placeholder_messages("user", "assistant", "user")
        messages[2]["content"] = self._text_encoder.mark_control_tokens(observation)
        text = self.template.render(messages)
        text_after_turn = text.partition(make_content_placeholder(1))[2]
        end_ids = (self.end_of_turn_id, self.history_end_id)
        has_sampled_end = bool(sampled_ids) and sampled_ids[-1] in end_ids
        if has_sampled_end and text_after_turn.startswith(self.turn_closing_text):
            # Encode the text together with the sampled end-of-turn token, then drop that token.
            closing_text = self.turn_closing_text.lstrip()
            ids, ids_before = (
                self.encode(closing_text + text[len(self.turn_closing_text) :])[1:]
                for text in (text_after_turn, text_before_observation)
            )
        else:
            ids, ids_before = map(
                self._encode_template_continuation, (text_after_turn, text_before_observation)
            )
        ids_after = self._encode_template_continuation(text_after_observation)
        observation_start, observation_end = len(ids_before), len(ids) - len(ids_after)
        if (
            observation_start > observation_end
            or ids[:observation_start] != ids_before
            or ids[observation_end:] != ids_after
        ):
            # Some token covers both template text and observation, so no split is possible.
            return InterTurnTokens(ids, (), ())
        return InterTurnTokens(ids_before, ids[observation_start:observation_end], ids_after)

    def _encode_template_continuation(self, text: str) -> tuple[int, ...]:
        """Return the ids of template ``text`` that follows other text."""
        return self.encode(text, is_continuation=self._text_encoder.pattern.match(text) is None)

    def _encode_turn(self, text: str, is_rendered: bool = True) -> tuple[int, ...]:
        """Return the ids of an assistant turn with ``text``, as they follow the generation prompt.

        The last id is the end-of-turn token. Without ``is_rendered`` the template does not render
        ``text``, because it may remove a thought. Raises ``UnsupportedTemplateError`` if the
        template begins the turn with another text, or if the tokenizer does not encode its end as
        one token. Raises ``ValueError`` if the tokenizer drops the whole ``text``.
        """
        messages = make_placeholder_messages("user", "assistant")
        prompt = self.template.render(messages[:1])
        marked_text = self._text_encoder.mark_control_tokens(text)
        messages[1]["content"] = marked_text
        conversation_text, closing_text = prompt + marked_text, ""
        if is_rendered:
            conversation_text = self.template.render(messages, add_generation_prompt=False)
            closing_text = self.template.render_conversation_end()
        if not (conversation_text.startswith(prompt) and conversation_text.endswith(closing_text)):
            raise UnsupportedTemplateError(
                "the chat template does not begin an assistant turn with its generation prompt, so "
                f"the turn {text[:80]!r} is not the continuation of any prompt; "
                "fix: use a chat template whose assistant turns begin with the generation prompt"
            )
        turn_text = conversation_text[len(prompt) : len(conversation_text) - len(closing_text)]
        ids = self._text_encoder.encode_following_text(
            prompt, turn_text + self.sampled_closing_text
        )
        if self.sampled_closing_text and ids[-1] != self.end_of_turn_id:
            raise UnsupportedTemplateError(
                "the tokenizer does not encode its end of turn "
                f"{self.sampled_closing_text.strip()!r} as one token after {text[-80:]!r}, so a "
                "policy cannot be trained to end such a turn"
            )
        if text.strip() and len(ids) == bool(self.sampled_closing_text):
            raise ValueError(f"the tokenizer has no token for the reply {text[:80]!r}")
        return ids

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the ids of text that continues other text, with control tokens as plain text."""
        return self.encode(self._text_encoder.mark_control_tokens(text), is_continuation=True)

    def encode_template_text(self, text: str) -> tuple[int, ...]:
        """Return the ids of text that continues other text; control tokens in it keep their ids."""
        return self.encode(text, is_continuation=True)

    def decode(self, sampled_ids: Sequence[int]) -> str:
        """Return the text of a sampled turn without its end tokens. Other special tokens stay."""
        return self.decode_exactly(strip_end_ids(sampled_ids, self.end_ids))

    def decode_exactly(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids`` with all special tokens."""
        # The clean-up of transformers would drop sampled spaces: text and tokens would differ.
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def escape_added_tokens(self, text: str) -> str:
        """Insert an invisible character into control tokens and tags, which are then plain text."""
        return self._added_token_pattern.sub(
            lambda match: f"{match[0][0]}{TOKEN_SPLIT_CHARACTER}{match[0][1:]}",
            remove_escape_characters(text),
        )

    def _mark_nested_control_tokens(self, content: object) -> Any:
        """Return ``content`` with the control tokens in all its texts marked, at any depth."""
        if isinstance(content, str):
            return self._text_encoder.mark_control_tokens(content)
        if isinstance(content, Mapping):
            return {key: self._mark_nested_control_tokens(item) for key, item in content.items()}
        if isinstance(content, list | tuple):
            return [self._mark_nested_control_tokens(item) for item in content]
        return content

    @cached_property
    def _added_token_pattern(self) -> re.Pattern[str]:
        """Pattern of every added token that is a control token or a tag, the longest first.

        Added tokens that are words are not part of it: the tokenizer of a small policy may add
        words of its environment.
        """
        token_contents = {
            token.content
            for token_id, token in self.tokenizer.added_tokens_decoder.items()
            if token_id in self._text_encoder.control_ids
            or TAG_LIKE_TOKEN_PATTERN.fullmatch(token.content)
        }
        # A token of one character cannot be split.
        texts = [text for text in token_contents if text.strip() and len(text) > 1]
        texts_longest_first = sorted(texts, key=lambda text: (-len(text), text))
        return re.compile("|".join(map(re.escape, texts_longest_first)) or "(?!)")

    def _collect_template_text(self) -> str:
        """Return all text that the template writes around the messages of a conversation."""
        template_pieces = self.template.split_pieces(("user",))
        texts = [piece for piece in template_pieces if isinstance(piece, str)]
        with contextlib.suppress(UnsupportedTemplateError):
            texts += self.template.render_between_turns()
        return "".join([*texts, self._turn_end_text, self.sampled_closing_text])


class PlainBridge:
    """Encoder of prompts and observations for a tokenizer that has no chat template.

    It has the methods of ``ChatBridge``. The tokenizer's ``decode`` is needed only for ``decode``.
    """

    end_of_turn_id: int | None = None

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.end_ids = find_stop_token_ids(tokenizer)
        # Only tokenizers of transformers have control tokens (<|im_end|>) that a text may contain.
        is_transformers = hasattr(tokenizer, "added_tokens_decoder")
        self._text_encoder = ChatTextEncoder(tokenizer, "") if is_transformers else None
        self._decode_options = (
            {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            if is_transformers
            else {}
        )

    def encode_first_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of the contents of ``messages``, joined by line breaks.

        The BOS token comes first if a tokenizer of transformers adds one.
        """
        text = "\n".join(message["content"] for message in messages)
        if self._text_encoder is None:
            return list(self._encode(text))
        return [
            *self._find_start_tokens(),
            *self._text_encoder.encode(self._text_encoder.mark_control_tokens(text)),
        ]

    def make_inter_turn_tokens(
        self,
        sampled_ids: Sequence[int],  # noqa: ARG002  nothing closes a turn here
        observation: str,
    ) -> InterTurnTokens:
        return InterTurnTokens((), self.encode_text(observation), ())

    def decode(self, sampled_ids: Sequence[int]) -> str:
        turn_ids = strip_end_ids(sampled_ids, self.end_ids)
        return self.tokenizer.decode(turn_ids, **self._decode_options)

    def encode_text(self, text: str) -> tuple[int, ...]:
        if self._text_encoder is None:
            return self._encode(text)
        return self._text_encoder.encode(
            self._text_encoder.mark_control_tokens(text), is_continuation=True
        )

    def encode_template_text(self, text: str) -> tuple[int, ...]:
        if self._text_encoder is None:
            return self._encode(text)
        return self._text_encoder.encode(text, is_continuation=True)

    def _find_start_tokens(self) -> list[int]:
        """Return the tokens that the tokenizer puts in front of text: BOS, or nothing."""
        ids_without_start = self._encode("x")
        ids = list(self.tokenizer("x", add_special_tokens=True)["input_ids"])
        for start in range(len(ids) - len(ids_without_start) + 1):
            if tuple(ids[start : start + len(ids_without_start)]) == ids_without_start:
                return ids[:start]
        return []

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
