"""Bytes of tokens in vocabularies written by hand, one of each kind."""

import re
import string
from collections.abc import Callable, Sequence

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from rlvcr.token_bytes import TokenBytes
from tests.helpers.refusals import mentions

START = "<s>"
CHARACTERS = [*string.ascii_letters, *string.digits, *"<>/. "]


class HandMadeTokenizer:
    """Tokenizer of ``entries`` and ``added`` texts, where an id is an index into both lists.

    ``spell`` converts a text to the form of the entries; ``decoded`` returns the text of one entry.
    """

    def __init__(
        self,
        entries: Sequence[str],
        spell: Callable[[str], str] = str,
        added: Sequence[str] = (),
        decoded: Callable[[str], str] = lambda _: "?",
    ) -> None:
        self.added = [START, *added]
        self.entries = [*entries, *self.added]
        self.spell = spell
        self.decoded = decoded
        self.looked_up: list[int] = []

    def ids(self, *entries: str) -> list[int]:
        return [self.entries.index(entry) for entry in entries]

    def get_added_vocab(self) -> dict[str, int]:
        return dict(zip(self.added, self.ids(*self.added), strict=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids_of_text = self.ids(START) if add_special_tokens else []
        # Prefer the longest entry.
        ordered = sorted(self.entries, key=len, reverse=True)
        either = re.compile("|".join(re.escape(entry) for entry in ordered))
        for part in re.split(f"({'|'.join(self.added)})", text):
            spelled = part if part in self.added else self.spell(part)
            ids_of_text += self.ids(*either.findall(spelled))
        return ids_of_text

    def decode(
        self, token_ids: list[int], *, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        text = "".join(self.decoded(self.entries[i]) for i in token_ids)
        return text if clean_up_tokenization_spaces is False else text.replace(" .", ".")

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        self.looked_up.append(ids)
        return self.entries[ids] if ids < len(self.entries) else None


def byte_level(added=()):
    entries = [*CHARACTERS, *"ĠĊÃ©", "Ġdesk"]
    return HandMadeTokenizer(entries, lambda text: text.replace(" ", "Ġ"), added)


def sentence_piece(entries=(), start="▁"):
    spell = lambda text: (start if text.startswith("<level>") else "") + text.replace(" ", "▁")  # noqa: E731
    return HandMadeTokenizer([*CHARACTERS, "▁", "▁desks", *entries], spell)


def test_byte_level_alphabet_equals_that_of_tokenizers():
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = HandMadeTokenizer(alphabet, lambda text: text.replace(" ", "Ġ"))
    read_bytes = TokenBytes(tokenizer)
    assert sorted(read_bytes(tokenizer.ids(*alphabet))) == [bytes([byte]) for byte in range(256)]
    cut = ByteLevel(add_prefix_space=False, use_regex=False)
    for point in range(0x800):
        text = chr(point)
        ((spelled, _),) = cut.pre_tokenize_str(text)
        assert b"".join(read_bytes(tokenizer.ids(*spelled))) == text.encode()


def test_byte_level_tokens():
    tokenizer = byte_level()
    read_bytes = TokenBytes(tokenizer)
    ids = tokenizer.ids("a", "Ġdesk", "Ċ", "Ã", "©")
    assert read_bytes(ids) == [b"a", b" desk", b"\n", b"\xc3", b"\xa9"]


def test_sentence_piece_tokens():
    """Only an entry of exactly the form <0x0A> is a byte."""
    texts = ["<0xE9>", "<0x0A>", "<0x0A0>", "<0x0A;", ";0x0A>", "things"]
    tokenizer = sentence_piece(texts)
    read_bytes = TokenBytes(tokenizer)
    assert read_bytes(tokenizer.ids(*texts)) == [
        *(b"\xe9", b"\n"),
        *(b"<0x0A0>", b"<0x0A;", b";0x0A>", b"things"),
    ]
    assert read_bytes(tokenizer.ids("▁desks", "▁")) == [b" desks", b" "]


def test_sentence_piece_may_add_no_space_before_the_text():
    tokenizer = sentence_piece(start="")
    assert TokenBytes(tokenizer)(tokenizer.ids("▁desks")) == [b" desks"]


def test_other_vocabularies_are_decoded_per_token():
    entries = [f"#{ord(character)}" for character in CHARACTERS]
    tokenizer = HandMadeTokenizer(
        [*entries, "#."],
        lambda text: "".join(f"#{ord(character)}" for character in text),
        decoded=lambda entry: " ." if entry == "#." else chr(int(entry[1:])),
    )
    read_bytes = TokenBytes(tokenizer)
    # With clean-up the space would be removed, which would shift all later positions by one.
    assert read_bytes(tokenizer.ids("#97", "#.")) == [b"a", b" ."]


def test_added_token_is_its_text_in_every_vocabulary():
    """The byte-level alphabet has no space, but an added token may have one."""
    tokenizer = byte_level(added=["see 2", "ĠĠ"])
    read_bytes = TokenBytes(tokenizer)
    assert read_bytes(tokenizer.ids("see 2", "ĠĠ")) == [b"see 2", "ĠĠ".encode()]


def test_id_without_an_entry_has_no_bytes():
    assert TokenBytes(byte_level())([10_000]) == [b""]
    assert TokenBytes(sentence_piece())([10_000]) == [b""]


def test_token_is_looked_up_once():
    tokenizer = byte_level()
    read_bytes = TokenBytes(tokenizer)
    tokenizer.looked_up.clear()
    ids = tokenizer.ids("a", "b", "a")
    assert read_bytes(ids) == read_bytes(ids) == [b"a", b"b", b"a"]
    assert tokenizer.looked_up == ids[:2]


def test_tokenizer_that_changes_the_text_is_refused():
    tokenizer = HandMadeTokenizer(CHARACTERS, str.lower, decoded=str)
    with pytest.raises(ValueError, check=mentions("HandMadeTokenizer")):
        TokenBytes(tokenizer)
