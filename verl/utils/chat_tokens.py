"""Token ids of rendered conversations, in which only the chat template produces control tokens.

    contents ── mark ──▶ template ──▶ text ── encode ──▶ ids

A rendered text is encoded as a whole, as ``apply_chat_template(tokenize=True)`` does. Encoding it
in pieces gives different tokens if the tokenizer puts a space before a text. A control token
(``<|im_end|>``) in a message content would end its turn. Before rendering, it is therefore replaced
by its number between two ``MARK`` characters ("marked"), and then encoded as ordinary letters. A
tag in the text of an environment is also encoded as letters.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

# Tags of the policy's replies. In prompts they are encoded as the same tokens.
TAG = re.compile(r"</?(level|think|action)>")
# Added tokens that are not control tokens: these tags and byte-fallback tokens.
NO_CONTROL = re.compile(rf"{TAG.pattern}|<0x[0-9A-F]{{2}}>")
# Unicode noncharacters, which no ordinary text contains. CUT is put inside the text of an added
# token, so that it is not encoded as this token. MARK encloses the number of a control token.
CUT = "\ufdd0"
MARK = "\ufdd1"
MARKED = re.compile(f"{MARK}([0-9]+){MARK}")
WORD = re.compile(r"\s*\S+|\s+\Z")
# Characters of vocabularies for the space before a word.
SPACES = ("\u2581", "\u0120")
# Texts that may precede a text while it is encoded, so that it is not at the start. No vocabulary
# merges the first one with the text after it.
CONTEXTS = (CUT, ".", "x", "0")
# Number of texts in the cache: prompts and observations repeat within a group.
ENCODED_TEXTS = 2048


class TextEncoder:
    """Encoder of texts that stand alone or continue another text, without added BOS or EOS."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, **options: bool) -> list[int]:
        """Return the token ids of ``text``; ``options`` are passed to the tokenizer."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, **options))

    def encode_inside(self, text: str, **options: bool) -> list[int]:
        """Return the token ids of ``text`` as the continuation of another text."""
        if not text or not self.puts_space:
            return self.encode(text, **options)
        unknown = getattr(self._tokenizer, "unk_token_id", None)
        for context in CONTEXTS:
            context_ids = self.encode(context, **options)
            ids_with_context = self.encode(context + text, **options)
            # Tokenizers merge adjacent unknown characters into one token.
            if ids_with_context[: len(context_ids)] == context_ids and unknown not in context_ids:
                return ids_with_context[len(context_ids) :]
        return self.encode(text, **options)

    @cached_property
    def puts_space(self) -> bool:
        """True if the tokenizer puts a space before a text."""
        ids = self.encode("x")
        return bool(ids) and str(self._tokenizer.convert_ids_to_tokens(ids[0])).startswith(SPACES)


class ChatTokens:
    """Encoder of the rendered texts of a chat template for a Hugging Face ``tokenizer``.

    ``frame`` is a rendered conversation with all texts that the template adds to messages. Added
    tokens of the tokenizer in it are control tokens, even if they are not special tokens.
    """

    def __init__(self, tokenizer: Any, frame: str) -> None:
        self._encoder = TextEncoder(tokenizer)
        # The token of unknown characters is no control token, even if it is a special token.
        unknown = getattr(tokenizer, "unk_token_id", None)
        self._added = {
            token.content: (token_id, token)
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip()
            and token_id != unknown
            and not NO_CONTROL.fullmatch(token.content)
            if token.special or token.content in frame
        }
        self._order = list(self._added)
        self.control_ids = frozenset(number for number, _ in self._added.values())
        longest_first = sorted(self._added, key=lambda text: (-len(text), text))
        # If there is no control token, the pattern never matches.
        self.pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self.encode = lru_cache(ENCODED_TEXTS)(self._encode)

    def mark_control_tokens(self, content: str) -> str:
        """Replace each control token in ``content`` by its number between ``MARK`` characters."""
        if MARK not in content and not self.pattern.search(content):
            return content
        return self.pattern.sub(
            lambda match: f"{MARK}{self._order.index(match[0])}{MARK}", content.replace(MARK, "")
        )

    def restore_control_tokens(self, marked: str) -> str:
        """Return ``marked`` with the texts of the control tokens that were marked in it."""
        return MARKED.sub(self._get_control_text, marked)

    def find_marked_length(self, marked: str, length: int) -> int:
        """Return the length of the start of ``marked`` whose restored text has length ``length``.

        A marked control token is included as a whole or not at all.
        """
        marked_end = restored_end = 0
        for match in MARKED.finditer(marked):
            text_end = (
                restored_end + match.start() - marked_end + len(self._get_control_text(match))
            )
            if text_end > length:
                break
            marked_end, restored_end = match.end(), text_end
        return marked_end + length - restored_end

    def find_leading_control_text(self, text: str) -> str:
        """Return ``text`` up to its first control token, "" if other text precedes it."""
        match = self.pattern.match(text, len(text) - len(text.lstrip()))
        return text[: match.end()] if match else ""

    def encode_from(self, marked: str, start: int) -> tuple[int, ...] | None:
        """Return the token ids of ``marked[start:]`` as a part of ``marked``.

        None if a token covers text on both sides of ``start``. Text before the last control token
        in front of ``start`` is not encoded, because no token crosses a control token.
        """
        control_starts = [match.start() for match in self.pattern.finditer(marked, 0, start)]
        context_start = control_starts[-1] if control_starts else 0
        context_ids = self.encode(marked[context_start:start])
        ids = self.encode(marked[context_start:])
        return ids[len(context_ids) :] if ids[: len(context_ids)] == context_ids else None

    def continue_text(self, before: str, text: str) -> tuple[int, ...]:
        """Return the token ids of ``text`` after ``before``, whose token ids do not change.

        Message contents in both texts have passed ``mark_control_tokens``.
        """
        control_starts = [match.start() for match in self.pattern.finditer(before)]
        context = before[control_starts[-1] :] if control_starts else before
        context_ids, ids_with_context = self.encode(context), self.encode(context + text)
        if ids_with_context[: len(context_ids)] == context_ids:
            return ids_with_context[len(context_ids) :]
        return self.encode(text, inside=True)

    def _encode(self, marked: str, inside: bool = False) -> tuple[int, ...]:
        """Return the ids of a text with markers of control tokens.

        With ``inside`` the text is tokenized as the continuation of another one.
        """
        if CUT not in marked:
            unmarked = MARKED.sub(self._get_control_text, marked)
            token_ids = (
                self._encoder.encode_inside(unmarked) if inside else self._encoder.encode(unmarked)
            )
            encoded_controls = [token for token in token_ids if token in self.control_ids]
            expected_controls = [self._added[text][0] for text in self.pattern.findall(marked)]
            # A tokenizer may ignore a control token that is part of a longer word.
            if encoded_controls == expected_controls or (
                MARK not in marked and _is_subsequence(encoded_controls, expected_controls)
            ):
                return tuple(token_ids)
        return tuple(self._encode_in_pieces(marked, inside))

    def _encode_in_pieces(self, marked: str, inside: bool) -> list[int]:
        """Return the ids of ``marked``, encoded in pieces so that no content is a control token."""
        # The pattern has a group, so split() puts the template's control tokens at the odd places.
        pieces = self.pattern.split(marked)
        ids: list[int] = []
        for piece_index, piece in enumerate(pieces):
            if piece_index % 2:
                ids.append(self._added[piece][0])
                continue
            text = piece
            # The tokenizer also removes the white space next to such a token.
            if piece_index and self._added[pieces[piece_index - 1]][1].rstrip:
                text = text.lstrip()
            if piece_index + 1 < len(pieces) and self._added[pieces[piece_index + 1]][1].lstrip:
                text = text.rstrip()
            follows = inside if piece_index == 0 else self._continues_after_control
            for fragment in MARKED.sub(self._cut_control_text, text).split(CUT):
                ids.extend(self._encode_as_letters(fragment, follows))
                follows = follows or bool(fragment)
        return ids

    def _encode_as_letters(self, text: str, follows: bool) -> list[int]:
        """Return the ids of ``text`` without any control token.

        ``follows`` means that the text continues another text, so no space is put before it.
        """
        encode = self._encoder.encode_inside if follows else self._encoder.encode
        ids = encode(text, split_special_tokens=True)
        if self.control_ids.isdisjoint(ids):
            return ids
        # A tokenizer that normalises text can find a control token in a different spelling.
        words = WORD.findall(text)
        text_parts = words if len(words) > 1 else list(text)
        if len(text_parts) < 2:
            return ids
        first_part, *rest = text_parts
        return [
            *self._encode_as_letters(first_part, follows),
            *(token for part in rest for token in self._encode_as_letters(part, follows=True)),
        ]

    @cached_property
    def _continues_after_control(self) -> bool:
        """True if the tokenizer puts no space before a text that follows a control token."""
        if not self._order or not self._encoder.puts_space:
            return False
        return self._encoder.encode(f"{self._order[0]}x y")[1:] != self._encoder.encode("x y")

    def _get_control_text(self, match: re.Match[str]) -> str:
        return self._order[int(match[1])]

    def _cut_control_text(self, match: re.Match[str]) -> str:
        text = self._get_control_text(match)
        # ``split_special_tokens`` splits special tokens. Cut other tokens after one character.
        return text if self._added[text][1].special else f"{text[0]}{CUT}{text[1:]}"


def _is_subsequence(subsequence: Sequence[int], others: Iterable[int]) -> bool:
    remaining_tokens = iter(others)
    return all(token in remaining_tokens for token in subsequence)
