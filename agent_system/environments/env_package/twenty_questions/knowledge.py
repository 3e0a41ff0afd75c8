"""Knowledge of the embedded gamemaster: things and attributes, read from ``knowledge.txt``."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

KNOWLEDGE_FILE = Path(__file__).with_name("knowledge.txt")
_THING = re.compile(r"(?P<name>[\w ]+?) = (?P<size>\d);(?P<attributes>.*)")


class Answer(StrEnum):
    """Answer of the gamemaster to a question."""

    YES = "Yes"
    NO = "No"
    UNKNOWN = "I don't know"


@dataclass(frozen=True, slots=True)
class Attribute:
    """Property of things, with the question that asks for it.

    A question that contains one of ``phrases`` is about this attribute. ``implies`` names the
    attributes that hold with it.
    """

    name: str
    question: str
    phrases: tuple[str, ...]
    implies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Thing:
    """Word to be guessed, with its size (1 to 6), the attributes that it has, and those for which
    the answer is "I don't know".
    """

    name: str
    size: int
    holds: frozenset[str]
    unsure: frozenset[str]


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Table of attributes and things.

    ``sizes`` contains the sizes of further things, which are no secret words but which a question
    can name ("is it bigger than a ...?").
    """

    attributes: Mapping[str, Attribute]
    things: Mapping[str, Thing]
    sizes: Mapping[str, int]

    def get_answer(self, word: str, attribute: str) -> Answer:
        """Return the answer to the question whether ``word`` has ``attribute``."""
        thing = self.things[word]
        if attribute in thing.holds:
            return Answer.YES
        return Answer.UNKNOWN if attribute in thing.unsure else Answer.NO


@cache
def load_knowledge() -> Knowledge:
    """Return the shipped table, parsed once per process."""
    return parse_knowledge(KNOWLEDGE_FILE.read_text(encoding="utf-8"))


def parse_knowledge(text: str) -> Knowledge:
    """Parse a table in the format of ``knowledge.txt``.

    Raises ``ValueError`` if a line is of none of the three kinds, an attribute is not defined, or a
    name occurs twice.
    """
    attributes: dict[str, Attribute] = {}
    things: dict[str, Thing] = {}
    sizes: dict[str, int] = {}
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("#"):
            continue
        if line.startswith("size "):
            size_text, names = line.removeprefix("size ").split("|")
            sizes |= dict.fromkeys(_split_list(names), int(size_text))
        elif "|" in line:
            attribute = _parse_attribute(line)
            _add_unique(attributes, attribute.name, attribute)
        elif match := _THING.fullmatch(line):
            thing = _parse_thing(match, attributes)
            _add_unique(things, thing.name, thing)
        else:
            raise ValueError(
                f"{line!r} is no line of a knowledge table; allowed: the three kinds that the head "
                "of knowledge.txt describes"
            )
    return Knowledge(attributes, things, sizes)


def _split_list(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _add_unique(table: dict, name: str, value: object) -> None:
    if name in table:
        raise ValueError(f"{name!r} is defined twice")
    table[name] = value


def _parse_attribute(line: str) -> Attribute:
    name, question, phrases, *implied = (cell.strip() for cell in line.split("|"))
    name_phrase = name.replace("_", " ")
    return Attribute(
        name,
        question,
        tuple(dict.fromkeys([name_phrase, *_split_list(phrases)])),
        tuple(" ".join(implied).split()),
    )


def _parse_thing(match: re.Match[str], attributes: Mapping[str, Attribute]) -> Thing:
    attribute_names = match["attributes"].split()
    unknown = [name for name in attribute_names if name.removeprefix("~") not in attributes]
    if unknown:
        raise ValueError(f"{match['name']}: these attributes are not defined: {', '.join(unknown)}")
    positive = [name for name in attribute_names if not name.startswith("~")]
    holds = frozenset(_with_implied(positive, attributes))
    # The thing has an attribute that another one implies, even if the line marks it as unsure.
    unsure = {name[1:] for name in attribute_names if name.startswith("~")} - holds
    return Thing(match["name"], int(match["size"]), holds, frozenset(unsure))


def _with_implied(names: Iterable[str], attributes: Mapping[str, Attribute]) -> Iterator[str]:
    for name in names:
        yield name
        yield from _with_implied(attributes[name].implies, attributes)


def unknown_words(words: Iterable[str]) -> list[str]:
    """Return those of ``words`` that the shipped table lacks, sorted."""
    return sorted(set(words) - set(load_knowledge().things))
