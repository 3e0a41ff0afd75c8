"""What the embedded gamemaster knows: things and their attributes, read from ``knowledge.txt``
beside this module.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("knowledge.txt")
_THING = re.compile(r"(?P<name>[\w ]+?) = (?P<size>\d);(?P<attributes>.*)")


class Answer:
    """The three answers of the game."""

    YES = "Yes"
    NO = "No"
    UNKNOWN = "I don't know"


ANSWERS = (Answer.YES, Answer.NO, Answer.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Attribute:
    """A property with the question that asks for it and the phrases by which a question is known to
    mean it.
    """

    name: str
    question: str
    phrases: tuple[str, ...]
    implies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Thing:
    """A word to be guessed: what holds for it, what one cannot say, and its size (1 to 6)."""

    name: str
    size: int
    holds: frozenset[str]
    unsure: frozenset[str]


@dataclass(frozen=True, eq=False)
class Knowledge:
    """The table, compared by identity.

    ``sizes`` gives the size of things that are only compared with.
    """

    attributes: Mapping[str, Attribute]
    things: Mapping[str, Thing]
    sizes: Mapping[str, int] = field(default_factory=dict)

    def answer(self, word: str, attribute: str) -> str:
        """Whether ``attribute`` holds for ``word``: one of ``ANSWERS``.

        Raises ``KeyError`` for unknown names.
        """
        thing = self.things[word]
        if self.attributes[attribute].name in thing.holds:
            return Answer.YES
        return Answer.UNKNOWN if attribute in thing.unsure else Answer.NO

    def consistent(self, words: Iterable[str], attribute: str, answer: str) -> list[str]:
        """Those of ``words`` for which the question about ``attribute`` has this answer."""
        return [word for word in words if self.answer(word, attribute) == answer]


@cache
def knowledge() -> Knowledge:
    """The shipped table."""
    return parse(FILE.read_text(encoding="utf-8"))


def parse(text: str) -> Knowledge:
    """Read a table in the format of ``knowledge.txt``.

    Raises:
        ValueError: A line that is none of the three kinds, an attribute that is not defined, or a
            name that occurs twice.
    """
    attributes: dict[str, Attribute] = {}
    things: dict[str, Thing] = {}
    sizes: dict[str, int] = {}
    for line in _lines(text):
        if line.startswith("size "):
            number, names = line.removeprefix("size ").split("|")
            sizes |= dict.fromkeys(_listed(names), int(number))
        elif "|" in line:
            attribute = _attribute(line)
            _add(attributes, attribute.name, attribute)
        elif match := _THING.fullmatch(line):
            thing = _thing(match, attributes)
            _add(things, thing.name, thing)
        else:
            raise ValueError(f"not a line of a knowledge table: {line!r}")
    return Knowledge(attributes, things, sizes)


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        line = line.strip()
        if line and not line.startswith("#"):
            yield line


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _add(table: dict, name: str, value: object) -> None:
    if name in table:
        raise ValueError(f"{name!r} is defined twice")
    table[name] = value


def _attribute(line: str) -> Attribute:
    name, question, phrases, *implied = (part.strip() for part in line.split("|"))
    spoken = name.replace("_", " ")
    return Attribute(
        name,
        question,
        tuple(dict.fromkeys([spoken, *_listed(phrases)])),
        tuple(" ".join(implied).split()),
    )


def _thing(match: re.Match[str], attributes: Mapping[str, Attribute]) -> Thing:
    named = match["attributes"].split()
    unknown = [name for name in named if name.removeprefix("~") not in attributes]
    if unknown:
        raise ValueError(f"{match['name']}: attributes that are not defined: {', '.join(unknown)}")
    holds = set(_implied((name for name in named if not name.startswith("~")), attributes))
    # What is implied holds for certain, also where a line calls it unsure.
    unsure = {name[1:] for name in named if name.startswith("~")} - holds
    return Thing(match["name"], int(match["size"]), frozenset(holds), frozenset(unsure))


def _implied(names: Iterable[str], attributes: Mapping[str, Attribute]) -> Iterator[str]:
    for name in names:
        yield name
        yield from _implied(attributes[name].implies, attributes)


def unknown_words(words: Iterable[str]) -> list[str]:
    """Those of ``words`` that the table does not hold, sorted."""
    return sorted(set(words) - set(knowledge().things))
