"""Knowledge of the embedded gamemaster: things and attributes, read from ``knowledge.yaml``."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from verl.utils.files import read_yaml_table


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
    """Return the tables of ``knowledge.yaml``, with all implied attributes."""
    tables = read_yaml_table(__file__, "knowledge.yaml")
    attributes = {
        name: Attribute(
            entry["question"],
            (name.replace("_", " "), *entry["phrases"]),
            tuple(entry.get("implies", ())),
        )
        for name, entry in tables["attributes"].items()
    }
    things = {}
    for name, entry in tables["things"].items():
        true_attributes = frozenset(_add_implied_attributes(entry["attributes"], attributes))
        # An implied attribute is true, even if the table marks it as uncertain.
        uncertain_attributes = frozenset(entry.get("uncertain", ())) - true_attributes
        things[name] = Thing(entry["size"], true_attributes, uncertain_attributes)
    sizes_by_name = {name: size for size, names in tables["sizes"].items() for name in names}
    return Knowledge(attributes, things, sizes_by_name)


def _add_implied_attributes(
    attribute_names: Iterable[str], attributes: Mapping[str, Attribute]
) -> Iterator[str]:
    for name in attribute_names:
        yield name
        yield from _add_implied_attributes(attributes[name].implies, attributes)


def find_unknown_words(words: Iterable[str]) -> list[str]:
    """Return the ``words`` that are missing in ``knowledge.yaml``, sorted."""
    return sorted(set(words) - set(load_knowledge().things))
