"""Token ids of rendered conversations, in which only the chat template produces control tokens.

    contents ── mark ──▶ template ──▶ text ── encode ──▶ ids

A rendered text is encoded as a whole, as ``apply_chat_template(tokenize=True)`` does. Encoding it
in pieces would give different tokens if the tokenizer adds a space before each text.

If a message content contained the text of a control token (``<|im_end|>``), it would end the
message's turn. Such a text is therefore "marked" before rendering: it is replaced by the index of
the control token between two ``MARK`` characters. ``ChatTextEncoder.encode`` then encodes it as
ordinary letters.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

# Tags of the policy's replies, which may be added tokens. They are not control tokens.
TAG = re.compile(r"</?(level|think|action)>")
# Added tokens of a tokenizer that are not control tokens: tags and byte-fallback tokens.
ORDINARY_TOKEN = re.compile(rf"{TAG.pattern}|<0x[0-9A-F]{{2}}>")
# Both characters are noncharacters of Unicode, which do not occur in text.
# TOKEN_SPLIT_CHARACTER splits an added token, so that its text is encoded as other tokens. MARK
# encloses the index of a control token.
TOKEN_SPLIT_CHARACTER = "\ufdd0"
MARK = "\ufdd1"
MARKED_INDEX = re.compile(f"{MARK}([0-9]+){MARK}")
WORD_PATTERN = re.compile(r"\s*\S+|\s+\Z")
# Characters that stand for the space before a word in the tokens of a vocabulary.
SPACE_CHARACTERS = ("\u2581", "\u0120")
# Prefixes with which a text is encoded as a continuation; the prefix's tokens are then removed.
# They are tried in this order. No vocabulary merges TOKEN_SPLIT_CHARACTER with the text after it.
CONTINUATION_PREFIXES = (TOKEN_SPLIT_CHARACTER, ".", "x", "0")
# Size of the cache of encoded texts. Prompts and observations repeat within a group.
MAX_CACHED_TEXTS = 2048


class TextEncoder:
    """Encoder of texts without BOS and EOS, either alone or as a continuation of another text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, **options: bool) -> list[int]:
        """Return the token ids of ``text``; ``options`` are passed to the tokenizer."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, **options))

    def encode_continuation(self, text: str, **options: bool) -> list[int]:
        """Return the token ids of ``text`` after another text, without an added space."""
        if not text or not self.adds_space:
            return self.encode(text, **options)
        unknown_id = getattr(self._tokenizer, "unk_token_id", None)
        for prefix in CONTINUATION_PREFIXES:
            prefix_ids = self.encode(prefix, **options)
            ids_with_prefix = self.encode(prefix + text, **options)
            # Skip a prefix that is unknown: adjacent unknown characters become one token.
            if ids_with_prefix[: len(prefix_ids)] == prefix_ids and unknown_id not in prefix_ids:
                return ids_with_prefix[len(prefix_ids) :]
        return self.encode(text, **options)

    @cached_property
    def adds_space(self) -> bool:
        """Return True if the tokenizer adds a space before a text."""
        letter_ids = self.encode("x")
        return bool(letter_ids) and str(
            self._tokenizer.convert_ids_to_tokens(letter_ids[0])
        ).startswith(SPACE_CHARACTERS)


class ChatTextEncoder:
    """Encoder of texts that a chat template has rendered, for a Hugging Face ``tokenizer``.

    ``example_conversation`` is a rendered example conversation that contains all texts of the
    template. Control tokens are the special tokens of the tokenizer, and the added tokens that
    occur in ``example_conversation``.
    """

    def __init__(self, tokenizer: Any, example_conversation: str) -> None:
        self._encoder = TextEncoder(tokenizer)
        # The unknown token is not a control token, even if it is a special token.
        unknown_id = getattr(tokenizer, "unk_token_id", None)
        self._control_tokens = {
            token.content: (token_id, token)
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip()
            and token_id != unknown_id
            and not ORDINARY_TOKEN.fullmatch(token.content)
            if token.special or token.content in example_conversation
        }
        self._control_texts = list(self._control_tokens)
        self.control_ids = frozenset(token_id for token_id, _ in self._control_tokens.values())
        texts_longest_first = sorted(self._control_tokens, key=lambda text: (-len(text), text))
        # "(?!)" never matches. It is used if there are no control tokens.
        self.pattern = re.compile(f"({'|'.join(map(re.escape, texts_longest_first)) or '(?!)'})")
        self.encode = lru_cache(MAX_CACHED_TEXTS)(self._encode)

    def mark_control_tokens(self, content: str) -> str:
        """Replace the text of each control token in ``content`` by its index between ``MARK``s."""
        if MARK not in content and not self.pattern.search(content):
            return content
        return self.pattern.sub(
            lambda match: f"{MARK}{self._control_texts.index(match[0])}{MARK}",
            content.replace(MARK, ""),
        )

    def restore_control_tokens(self, marked_text: str) -> str:
        """Replace each mark in ``marked_text`` by the text of its control token."""
        return MARKED_INDEX.sub(self._get_control_text, marked_text)

    def convert_to_marked_length(self, marked_text: str, length: int) -> int:
        """Return the length of the part of ``marked_text`` that stands for ``length`` characters.

        Each mark in ``marked_text`` stands for the longer text of a control token, which
        ``restore_control_tokens`` inserts. A mark is included as a whole or not at all.
        """
        marked_end = restored_end = 0
        for match in MARKED_INDEX.finditer(marked_text):
            text_end = (
                restored_end + match.start() - marked_end + len(self._get_control_text(match))
            )
            if text_end > length:
                break
            marked_end, restored_end = match.end(), text_end
        return marked_end + length - restored_end

    def find_control_text_at_start(self, text: str) -> str:
        """Return the control token at the start of ``text``, with white space before it, or ""."""
        match = self.pattern.match(text, len(text) - len(text.lstrip()))
        return text[: match.end()] if match else ""

    def encode_tail_in_context(self, marked_text: str, start: int) -> tuple[int, ...] | None:
        """Return the token ids of ``marked_text[start:]`` in the encoding of ``marked_text``.

        Returns None if a token covers text on both sides of ``start``. Only the text from the last
        control token before ``start`` on is encoded, because no token crosses a control token.
        """
        control_starts = [match.start() for match in self.pattern.finditer(marked_text, 0, start)]
        context_start = control_starts[-1] if control_starts else 0
        context_ids = self.encode(marked_text[context_start:start])
        context_and_tail_ids = self.encode(marked_text[context_start:])
        return (
            context_and_tail_ids[len(context_ids) :]
            if context_and_tail_ids[: len(context_ids)] == context_ids
            else None
        )

    def encode_following_text(self, preceding_text: str, text: str) -> tuple[int, ...]:
        """Return the token ids of ``text``, which follows the text ``preceding_text``.

        The ids can be appended to those of ``preceding_text``. Message contents in both texts must
        be marked with ``mark_control_tokens``.
        """
        ids = self.encode_tail_in_context(preceding_text + text, len(preceding_text))
        return self.encode(text, is_continuation=True) if ids is None else ids

    def _encode(self, marked_text: str, is_continuation: bool = False) -> tuple[int, ...]:
        """Return the token ids of a rendered text.

        Control tokens in message contents must be marked with ``mark_control_tokens``. With
        ``is_continuation`` the text is encoded as the continuation of another text.
        """
        if TOKEN_SPLIT_CHARACTER not in marked_text:
            unmarked_text = MARKED_INDEX.sub(self._get_control_text, marked_text)
            token_ids = (
                self._encoder.encode_continuation(unmarked_text)
                if is_continuation
                else self._encoder.encode(unmarked_text)
            )
            encoded_control_ids = [token for token in token_ids if token in self.control_ids]
            expected_control_ids = [
                self._control_tokens[text][0] for text in self.pattern.findall(marked_text)
            ]
            # If no message content has marked control tokens, accept missing control tokens. A
            # tokenizer may not recognise a control token inside a word.
            if encoded_control_ids == expected_control_ids or (
                MARK not in marked_text
                and _is_subsequence(encoded_control_ids, expected_control_ids)
            ):
                return tuple(token_ids)
        return tuple(self._encode_in_pieces(marked_text, is_continuation))

    def _encode_in_pieces(self, marked_text: str, is_continuation: bool) -> list[int]:
        """Return the token ids of a text. Encode each piece between control tokens alone.

        Message contents then cannot produce control tokens. Control tokens that they contain must
        be marked with ``mark_control_tokens``.
        """
        # The pattern has a group: split() returns the template's control tokens at odd positions.
        pieces = self.pattern.split(marked_text)
        ids: list[int] = []
        for piece_index, piece in enumerate(pieces):
            if piece_index % 2:
                ids.append(self._control_tokens[piece][0])
                continue
            text = piece
            # Remove white space next to a control token if the tokenizer would also remove it.
            if piece_index and self._control_tokens[pieces[piece_index - 1]][1].rstrip:
                text = text.lstrip()
            if (
                piece_index + 1 < len(pieces)
                and self._control_tokens[pieces[piece_index + 1]][1].lstrip
            ):
                text = text.rstrip()
            is_continuing_text = (
                is_continuation if piece_index == 0 else self._omits_space_after_control
            )
            for fragment in MARKED_INDEX.sub(self._split_control_text, text).split(
                TOKEN_SPLIT_CHARACTER
            ):
                ids.extend(self._encode_as_plain_text(fragment, is_continuing_text))
                is_continuing_text = is_continuing_text or bool(fragment)
        return ids

    def _encode_as_plain_text(self, text: str, is_continuation: bool) -> list[int]:
        """Return the token ids of ``text``, none of which is a control token."""
        encode_text = self._encoder.encode_continuation if is_continuation else self._encoder.encode
        ids = encode_text(text, split_special_tokens=True)
        if self.control_ids.isdisjoint(ids):
            return ids
        # A tokenizer that normalises text can find a control token in another spelling. Then
        # encode each word, or each letter of a single word, separately.
        words = WORD_PATTERN.findall(text)
        text_parts = words if len(words) > 1 else list(text)
        if len(text_parts) < 2:
            return ids
        first_part, *further_parts = text_parts
        return [
            *self._encode_as_plain_text(first_part, is_continuation),
            *(
                token
                for text_part in further_parts
                for token in self._encode_as_plain_text(text_part, is_continuation=True)
            ),
        ]

    @cached_property
    def _omits_space_after_control(self) -> bool:
        """Return True if the tokenizer adds spaces, but not before a text after a control token."""
        if not self._control_texts or not self._encoder.adds_space:
            return False
        return self._encoder.encode(f"{self._control_texts[0]}x y")[1:] != self._encoder.encode(
            "x y"
        )

    def _get_control_text(self, match: re.Match[str]) -> str:
        return self._control_texts[int(match[1])]

    def _split_control_text(self, match: re.Match[str]) -> str:
        text = self._get_control_text(match)
        # The option ``split_special_tokens`` splits special tokens. Split other added tokens here,
        # with ``TOKEN_SPLIT_CHARACTER`` after the first character.
        return (
            text
            if self._control_tokens[text][1].special
            else f"{text[0]}{TOKEN_SPLIT_CHARACTER}{text[1:]}"
        )


def _is_subsequence(subsequence: Sequence[int], sequence: Iterable[int]) -> bool:
    remaining_sequence = iter(sequence)
    return all(token in remaining_sequence for token in subsequence)
