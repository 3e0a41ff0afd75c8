"""Knowledge of the embedded gamemaster: things and attributes, read from ``knowledge.txt``."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

KNOWLEDGE_FILE = Path(__file__).with_name("knowledge.txt")


class Answer(StrEnum):
    """Answer of the gamemaster to a yes/no question."""

    YES = "Yes"
    NO = "No"
    UNKNOWN = "I don't know"


@dataclass(frozen=True, slots=True)
class Attribute:
    """Property of things, with the question that asks for it.

    A question that contains one of ``phrases`` is about this attribute. A thing with
    this attribute also has the attributes in ``implies``.
    """

    question: str
    phrases: tuple[str, ...]
    implies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Thing:
    """Thing whose name is a possible secret word.

    ``size`` is from 1 (fits in a closed hand) to 6 (larger than a car), for comparisons. For
    ``uncertain_attributes`` the answer is "I don't know", for attributes in neither set it is no.
    """

    size: int
    true_attributes: frozenset[str]
    uncertain_attributes: frozenset[str]


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Table of attributes and things.

    ``sizes_by_name`` has the sizes (1 to 6) of things that are never the secret word. A question
    can compare the secret word with them ("is it bigger than a ...?").
    """

    attributes: Mapping[str, Attribute]
    things: Mapping[str, Thing]
    sizes_by_name: Mapping[str, int]

    def get_answer(self, word: str, attribute: str) -> Answer:
        """Return the answer to the question "Does ``word`` have ``attribute``?"."""
        thing = self.things[word]
        if attribute in thing.true_attributes:
            return Answer.YES
        return Answer.UNKNOWN if attribute in thing.uncertain_attributes else Answer.NO


@cache
def load_knowledge() -> Knowledge:
    """Return the table of ``knowledge.txt``, whose head describes its three kinds of lines."""
    attributes: dict[str, Attribute] = {}
    things: dict[str, Thing] = {}
    sizes_by_name: dict[str, int] = {}
    for line in KNOWLEDGE_FILE.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("size "):
            size_text, name_list = line.removeprefix("size ").split("|")
            sizes_by_name |= dict.fromkeys(_split_list(name_list), int(size_text))
        elif "|" in line:
            name, attribute = _parse_attribute(line)
            attributes[name] = attribute
        else:
            name, thing = _parse_thing(line, attributes)
            things[name] = thing
    return Knowledge(attributes, things, sizes_by_name)


def _split_list(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _parse_attribute(line: str) -> tuple[str, Attribute]:
    name, question, phrase_list, *implied_names = (cell.strip() for cell in line.split("|"))
    phrases = (name.replace("_", " "), *_split_list(phrase_list))
    return name, Attribute(question, phrases, tuple(" ".join(implied_names).split()))


def _parse_thing(line: str, attributes: Mapping[str, Attribute]) -> tuple[str, Thing]:
    name, _, description = line.partition(" = ")
    size_text, _, attribute_list = description.partition(";")
    attribute_names = attribute_list.split()
    stated_attribute_names = [name for name in attribute_names if not name.startswith("~")]
    true_attributes = frozenset(_add_implied_attributes(stated_attribute_names, attributes))
    # An implied attribute is true, even if the line marks it as uncertain.
    uncertain_attributes = {
        name[1:] for name in attribute_names if name.startswith("~")
    } - true_attributes
    return name, Thing(int(size_text), true_attributes, frozenset(uncertain_attributes))


def _add_implied_attributes(
    attribute_names: Iterable[str], attributes: Mapping[str, Attribute]
) -> Iterator[str]:
    for name in attribute_names:
        yield name
        yield from _add_implied_attributes(attributes[name].implies, attributes)


def find_unknown_words(words: Iterable[str]) -> list[str]:
    """Return the ``words`` that are missing in ``knowledge.txt``, sorted."""
    return sorted(set(words) - set(load_knowledge().things))
