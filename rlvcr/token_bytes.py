"""Bytes of every token id, to locate text in sampled tokens without tokenizing it again."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

# Text with all cases that occur in turns: tags, digits, and words with and without a space before.
_PROBE_TEXT = "<level>3</level><think>I see 2 desks.</think><action>go to desk 1</action>"


class Tokenizer(Protocol):
    """Methods of a transformers tokenizer that ``TokenBytes`` uses.

    The return type is Any, because transformers returns a text or a list of texts depending on the
    argument. With the arguments used here, ``decode`` returns a text. ``convert_ids_to_tokens``
    returns a text, or None for an unknown id.
    """

    def get_added_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, clean_up_tokenization_spaces: bool) -> Any: ...

    def convert_ids_to_tokens(self, ids: int) -> Any: ...


def _build_byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level BPE vocabulary stands for."""
    # Byte alphabet of GPT-2, which all byte-level vocabularies of transformers use.
    printable_bytes = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable_bytes}
    other_bytes = [byte for byte in range(256) if byte not in printable_bytes]
    for index, byte in enumerate(other_bytes):
        alphabet[chr(256 + index)] = byte
    return alphabet


_BYTE_ALPHABET = _build_byte_alphabet()


def _decode_byte_level(token: str) -> bytes:
    return bytes(_BYTE_ALPHABET[character] for character in token)


def _decode_sentence_piece(token: str) -> bytes:
    # Tokens such as <0x0A> stand for single bytes.
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()  # SentencePiece writes a space as U+2581


class TokenBytes:
    """Callable that returns the bytes of each token id, cached, for one transformers tokenizer.

    Supports byte-level BPE and SentencePiece vocabularies, and others by decoding single tokens.
    Raises ``ValueError`` if none of these methods reproduces a test text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added_tokens = {i: text.encode() for text, i in tokenizer.get_added_vocab().items()}
        self._bytes_by_id: dict[int, bytes] = {}
        self._convert_id = self._choose_converter()

    def __call__(self, token_ids: Iterable[int]) -> list[bytes]:
        return [self._get_bytes(int(i)) for i in token_ids]

    def _get_bytes(self, token_id: int) -> bytes:
        cached_bytes = self._bytes_by_id.get(token_id)
        if cached_bytes is not None:
            return cached_bytes
        # The text of an added token is literal. It does not use the alphabet of the vocabulary.
        added_bytes = self._added_tokens.get(token_id)
        id_bytes = self._convert_id(token_id) if added_bytes is None else added_bytes
        self._bytes_by_id[token_id] = id_bytes
        return id_bytes

    def _choose_converter(self) -> Callable[[int], bytes]:
        def make_vocabulary_converter(
            convert_token: Callable[[str], bytes],
        ) -> Callable[[int], bytes]:
            # An id that is not in the vocabulary (padding of the embedding matrix) has no bytes.
            return lambda i: convert_token(self._tokenizer.convert_ids_to_tokens(i) or "")

        def decode_one_id(i: int) -> bytes:
            return self._tokenizer.decode([i], clean_up_tokenization_spaces=False).encode()

        probe_ids = self._tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)
        for convert_id in (
            make_vocabulary_converter(_decode_byte_level),
            make_vocabulary_converter(_decode_sentence_piece),
            decode_one_id,
        ):
            try:
                text = b"".join(self._added_tokens.get(i) or convert_id(i) for i in probe_ids)
            except KeyError:  # a character outside the byte-level alphabet
                continue
            # SentencePiece adds a space before a text.
            if text in (_PROBE_TEXT.encode(), b" " + _PROBE_TEXT.encode()):
                return convert_id
        raise ValueError(
            f"{type(self._tokenizer).__name__}: the bytes of its tokens cannot be determined; "
            "allowed: byte-level BPE, SentencePiece, or tokens that decode one by one"
        )
