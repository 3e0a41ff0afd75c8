"""Gamemasters: callables that get a prompt with the secret word and a question and return text.

``EmbeddedGamemaster`` uses the shipped table and no network. ``OpenAIGamemaster``
(``openai_gamemaster``) queries a server. The returned text is reduced to one of the three answers,
so it cannot reveal the word.

The embedded gamemaster converts a free-text yes/no question to lower case without articles and
punctuation. Then the first matching rule answers it:

1. A question that starts with what, which, who, where, when, why or how: "I don't know".
2. "starts with / ends with / contains (the letter) X": the spelling of the word decides.
3. "bigger / smaller (and similar words) than Y", where Y is a thing or a named size of the table:
   the sizes decide. Equal sizes give "I don't know".
4. A thing of the table by name ("is it a dog?"): yes for that thing. It is a question, not a guess.
5. Phrases of attributes, longest first, not overlapping. All of them must hold ("an animal that can
   swim"); with "or" in the question one is enough. Yes, no and "I don't know" combine as in
   three-valued logic.

"not" and "never" invert the answer; "isn't it ...?" does not. Unknown words are ignored. A question
that contains only unknown words gets "I don't know".
"""

import re
from collections.abc import Callable
from functools import cache

from agent_system.environments.env import EnvFailure
from agent_system.environments.env_package.twenty_questions.knowledge import Answer, load_knowledge

Gamemaster = Callable[[str], str]
SERVER_THREADS = 16  # concurrent requests to a server

PROMPT = """You are the gamemaster of a game of twenty questions. \
The player must guess a secret word.
Secret word: {word}
Question: {question}
Answer the question about the secret word truthfully with exactly one of: {answers}"""
_FIELDS = re.compile(
    r"^Secret word: (?P<word>[^\n]*)\nQuestion: (?P<question>[^\n]*)$", re.MULTILINE
)
_UNKNOWN = re.compile(
    r"\b(i (do not|don t|dont) know|unknown|unsure|not sure|maybe|sometimes|it depends|unclear)\b"
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


class GamemasterError(EnvFailure):
    """The gamemaster gave no answer. The trial or episode of the question is aborted."""

    def __init__(self, detail: str) -> None:
        super().__init__("error", f"gamemaster: {detail}")


def gamemaster_prompt(word: str, question: str) -> str:
    """Return the prompt for one question."""
    # Line breaks become spaces, so a question cannot imitate other fields.
    one_line = " ".join(question.split())
    return PROMPT.format(word=word, question=one_line, answers=", ".join(Answer))


def read_answer(text: str) -> Answer:
    """Return the answer in a gamemaster's reply: "I don't know" without a yes or no."""
    plain_text = " ".join(re.findall(r"[a-z]+", text.lower()))
    if _UNKNOWN.search(plain_text):
        return Answer.UNKNOWN
    match = re.search(r"\b(yes|no)\b", plain_text)
    return Answer.UNKNOWN if match is None else Answer.YES if match[1] == "yes" else Answer.NO


class EmbeddedGamemaster:
    """Deterministic gamemaster that answers from a table, by the rules above."""

    remote = False

    def __call__(self, prompt: str) -> str:
        """Answer a prompt of ``gamemaster_prompt``. Raises ``GamemasterError`` for others."""
        fields = _FIELDS.search(prompt)
        if fields is None:
            raise GamemasterError(
                "the embedded gamemaster accepts only prompts made by gamemaster_prompt()"
            )
        if fields["word"] not in load_knowledge().things:
            raise GamemasterError(
                f"the embedded gamemaster does not know the word {fields['word']!r}; allowed: "
                "words of knowledge.txt"
            )
        return answer_question(fields["word"], fields["question"])


def normalise_question(text: str) -> str:
    """Return ``text`` in lower case with letters and digits only, no articles, single spaces.

    An "a" at the end after "letter" or "with" is no article and is kept.
    """
    plain_text = " ".join(re.findall(r"[a-z0-9]+", text.lower()))
    if re.search(r"(letter|with) a$", plain_text):
        return " ".join(_ARTICLES.sub(" ", plain_text[:-1]).split()) + " a"
    return " ".join(_ARTICLES.sub(" ", plain_text).split())


def answer_question(word: str, question: str) -> Answer:
    """Return the answer to ``question`` about ``word``. Raises ``KeyError`` for an unknown word."""
    thing = load_knowledge().things[word]
    normalised = normalise_question(question)
    if _OPEN.search(normalised):
        return Answer.UNKNOWN
    # "isn't it" means the same as "is it": remove its "n't" before counting negations.
    normalised, negations = _NEGATION.subn(" ", _TAG_QUESTION.sub(" ", normalised))
    normalised = " ".join(normalised.split())
    result = (
        _answer_spelling(word, normalised)
        or _answer_size(thing.size, normalised)
        or _answer_attributes(word, normalised)
    )
    # Two negations cancel each other.
    return _OPPOSITE[result] if negations % 2 else result


def _answer_spelling(name: str, normalised: str) -> Answer | None:
    tests = {"starts": name.startswith, "ends": name.endswith, "contains": name.__contains__}
    for test_name, pattern in _SPELLING.items():
        if match := pattern.search(normalised):
            return Answer.YES if tests[test_name](match[1]) else Answer.NO
    return None


def _answer_size(size: int, normalised: str) -> Answer | None:
    match = _COMPARISON.search(normalised)
    if not match:
        return None
    table = load_knowledge()
    other_thing = table.things.get(match[2])
    other_size = other_thing.size if other_thing else table.sizes.get(match[2])
    if other_size is None or other_size == size:
        return Answer.UNKNOWN
    return Answer.YES if (size < other_size) == (match[1] in _SMALLER) else Answer.NO


def _answer_attributes(word: str, normalised: str) -> Answer:
    """Combine the answers about the phrases in three-valued logic: with "or", or else with "and".

    One answer that is decisive, yes for "or" and no for "and", decides. Otherwise the answer is "I
    don't know" if one answer is that or there are no answers, else the opposite.
    """
    table = load_knowledge()
    pattern, names = _phrase_pattern()
    answers = []
    for phrase in pattern.findall(normalised):
        name = names[phrase]
        if name in table.attributes:
            answers.append(table.get_answer(word, name))
        else:
            answers.append(Answer.YES if name == word else Answer.NO)
    decisive = Answer.YES if re.search(r"\bor\b", normalised) else Answer.NO
    if decisive in answers:
        return decisive
    return Answer.UNKNOWN if Answer.UNKNOWN in answers or not answers else _OPPOSITE[decisive]


@cache
def _phrase_pattern() -> tuple[re.Pattern[str], dict[str, str]]:
    """Return a pattern of all phrases, longest first, and the attribute or thing of each phrase."""
    table = load_knowledge()
    names = {normalise_question(thing): thing for thing in table.things}
    # A phrase that names both a thing and an attribute means the attribute.
    for attribute in table.attributes.values():
        names |= {normalise_question(phrase): attribute.name for phrase in attribute.phrases}
    longest_first = sorted(names, key=lambda phrase: (-len(phrase), phrase))
    return re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})\b"), names
