"""The bytes every token id stands for, so that text can be found in sampled tokens without
re-tokenising anything.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

# Holds what parsing depends on: tags beside text, digits, words with and without a space before.
_PROBE = "<level>3</level><think>I see 2 desks.</think><action>go to desk 1</action>"


class Tokenizer(Protocol):
    """What the codec needs of a tokenizer of transformers.

    What is Any is a text or a list of them there: a text for one list of ids or one id, None for an
    id without an entry.
    """

    def get_added_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, clean_up_tokenization_spaces: bool) -> Any: ...

    def convert_ids_to_tokens(self, ids: int) -> Any: ...


def _byte_level_alphabet() -> dict[str, int]:
    """Byte of each character of byte-level BPE vocabularies: printable bytes are themselves, the
    others follow 255.
    """
    # GPT-2's table, which the byte-level vocabularies of transformers share.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    for number, byte in enumerate(others):
        alphabet[chr(256 + number)] = byte
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    return bytes(_ALPHABET[character] for character in token)


def _sentence_piece(token: str) -> bytes:
    # <0x0A>: a byte that no other token holds.
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()  # the mark that stands for a space


class TokenBytes:
    """``token_bytes(ids)`` gives the bytes of each id, remembered; made for one tokenizer of
    transformers.

    Byte-level BPE and SentencePiece-like vocabularies are understood, others through decoding
    single tokens. Raises ``ValueError`` if none of these reproduces a probe text, because offsets
    would then be wrong.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {i: text.encode() for text, i in tokenizer.get_added_vocab().items()}
        self._cache: dict[int, bytes] = {}
        self._piece = self._choose()

    def __call__(self, token_ids: Iterable[int]) -> list[bytes]:
        return [self._of(int(i)) for i in token_ids]

    def _of(self, token_id: int) -> bytes:
        known = self._cache.get(token_id)
        if known is not None:
            return known
        # Added tokens stand in no vocabulary's alphabet: their text is what they are.
        added = self._added.get(token_id)
        found = self._piece(token_id) if added is None else added
        self._cache[token_id] = found
        return found

    def _choose(self) -> Callable[[int], bytes]:
        def vocabulary(convert: Callable[[str], bytes]) -> Callable[[int], bytes]:
            # An id without an entry (padding of the embedding matrix) stands for nothing.
            return lambda i: convert(self._tokenizer.convert_ids_to_tokens(i) or "")

        def decoding(i: int) -> bytes:
            return self._tokenizer.decode([i], clean_up_tokenization_spaces=False).encode()

        probe_ids = self._tokenizer.encode(_PROBE, add_special_tokens=False)
        for piece in (vocabulary(_byte_level), vocabulary(_sentence_piece), decoding):
            try:
                text = b"".join(self._added.get(i) or piece(i) for i in probe_ids)
            except KeyError:  # a character outside the byte-level alphabet
                continue
            # SentencePiece puts a space before a text.
            if text in (_PROBE.encode(), b" " + _PROBE.encode()):
                return piece
        raise ValueError(
            f"{type(self._tokenizer).__name__}: cannot tell which text each token stands for"
        )
