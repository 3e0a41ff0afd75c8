"""Free-text yes/no questions, as the embedded gamemaster understands them.

A question is lower-cased and stripped of articles and punctuation; then the first rule that fits
answers it:

1. A question that starts with what, which, who, where, when, why or how has no yes or no: "I don't
   know".
2. "starts with / ends with / contains (the letter) X": the spelling of the word.
3. "bigger / smaller (and the like) than Y", Y a thing of the table or one of its sizes: by size, "I
   don't know" for equal ones.
4. A thing of the table by name ("is it a dog?"): whether it is that thing. It is a question, not a
   guess.
5. Phrases of attributes, longest first, not overlapping. Several of them must all hold ("an animal
   that can swim"); with "or" between them one is enough. Yes, no and "I don't know" combine as in
   three-valued logic.

"not" and "never" turn the answer round, "isn't it ...?" does not. Words that no rule knows are
passed over, and a question of such words alone is answered "I don't know".
"""

import re
from collections.abc import Iterable
from functools import cache

from agent_system.environments.env_package.twenty_questions.knowledge import (
    Answer,
    Knowledge,
    knowledge,
)

_OPEN = re.compile(r"^(what|which|who|whose|where|when|why|how)\b")
_TAG_QUESTION = re.compile(r"\b(is|are|does|do|can|has|have|was|would|could)n t\b|\bcan t\b")
_NEGATION = re.compile(r"\b(not|never|cannot)\b")
_ARTICLES = re.compile(r"\b(a|an|the|any|some)\b")
_LETTER = r"(?: letter)? ([a-z])$"
_SPELLING = {
    "starts": re.compile(r"\b(?:start|starts|begin|begins|starting|beginning) with" + _LETTER),
    "ends": re.compile(r"\b(?:end|ends|ending) (?:with|in)" + _LETTER),
    "contains": re.compile(r"\b(?:contain|contains|have|has|include|includes)(?: letter) ([a-z])$"),
}
_COMPARISON = re.compile(
    r"\b(bigger|larger|heavier|taller|smaller|lighter|shorter) than (?:average |normal )?([\w ]+?)$"
)
_SMALLER = frozenset({"smaller", "lighter", "shorter"})
_OPPOSITE = {Answer.YES: Answer.NO, Answer.NO: Answer.YES, Answer.UNKNOWN: Answer.UNKNOWN}


def normalise(text: str) -> str:
    """Lower case, letters and digits only, no articles, single spaces.

    "The letter A" keeps its letter.
    """
    words = " ".join(re.findall(r"[a-z0-9]+", text.lower()))
    if re.search(r"(letter|with) a$", words):
        return " ".join(_ARTICLES.sub(" ", words[:-1]).split()) + " a"
    return " ".join(_ARTICLES.sub(" ", words).split())


def answer(word: str, question: str, table: Knowledge | None = None) -> str:
    """The answer to ``question`` about ``word``, one of ``knowledge.ANSWERS``. Raises ``KeyError``
    for a word unknown.

    ``table`` defaults to the shipped knowledge.
    """
    table = knowledge() if table is None else table
    thing = table.things[word]
    asked = normalise(question)
    if _OPEN.search(asked):
        return Answer.UNKNOWN
    # "isn't it" asks the same as "is it", so it goes before negations are counted.
    asked, negations = _NEGATION.subn(" ", _TAG_QUESTION.sub(" ", asked))
    asked = " ".join(asked.split())
    found = (
        _spelling(thing.name, asked)
        or _size(thing.size, asked, table)
        or _attributes(word, asked, table)
    )
    # Two negations cancel each other.
    return _OPPOSITE[found] if negations % 2 else found


def _spelling(name: str, asked: str) -> str | None:
    tests = {"starts": name.startswith, "ends": name.endswith, "contains": name.__contains__}
    for kind, pattern in _SPELLING.items():
        if match := pattern.search(asked):
            return Answer.YES if tests[kind](match[1]) else Answer.NO
    return None


def _size(size: int, asked: str, table: Knowledge) -> str | None:
    match = _COMPARISON.search(asked)
    if not match:
        return None
    other = table.things[match[2]].size if match[2] in table.things else table.sizes.get(match[2])
    if other is None or other == size:
        return Answer.UNKNOWN
    return Answer.YES if (size < other) == (match[1] in _SMALLER) else Answer.NO


def _attributes(word: str, asked: str, table: Knowledge) -> str:
    pattern, names = _phrases(table)
    found = [names[match] for match in pattern.findall(asked)]
    answers = [_one(word, name, table) for name in found]
    either = re.search(r"\bor\b", asked) is not None
    return combine(answers, Answer.YES if either else Answer.NO)


def combine(answers: Iterable[str], decisive: str) -> str:
    """``decisive`` if it is among ``answers``, else "I don't know" if that is or there are none,
    else the opposite.
    """
    answers = list(answers)
    if decisive in answers:
        return decisive
    return Answer.UNKNOWN if Answer.UNKNOWN in answers or not answers else _OPPOSITE[decisive]


def _one(word: str, name: str, table: Knowledge) -> str:
    if name in table.attributes:
        return table.answer(word, name)
    return Answer.YES if name == word else Answer.NO


@cache
def _phrases(table: Knowledge) -> tuple[re.Pattern[str], dict[str, str]]:
    """Phrases, longest first, and what each means: an attribute, or a thing whose name is no
    attribute's phrase.
    """
    names = {normalise(thing): thing for thing in table.things}
    # Attributes come later and replace things of the same name: the question then asks for the
    # kind.
    for attribute in table.attributes.values():
        names |= {normalise(phrase): attribute.name for phrase in attribute.phrases}
    longest_first = sorted(names, key=lambda phrase: (-len(phrase), phrase))
    return re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})\b"), names
