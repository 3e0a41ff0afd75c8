"""Gamemasters: callables that get a prompt with a secret word and a question, and return a text.

``EmbeddedGamemaster`` uses ``knowledge.yaml`` and no network. ``OpenAIGamemaster`` (module
``openai_gamemaster``) queries a server. The game reads only one of three answers from the returned
text, so that it cannot reveal the word.

The embedded gamemaster converts a free-text yes/no question to lower case without articles and
punctuation. Then the first matching rule answers it:

1. A question that starts with what, which, who, where, when, why or how: "I don't know".
2. "starts with", "ends with" or "contains (the letter)" X: answer by the spelling of the word.
3. "bigger than", "smaller than" or a similar comparison with a thing of the table: answer by the
   sizes in the table. Equal sizes give "I don't know".
4. The name of a thing of the table ("is it a dog?"): yes if it is the secret word. This does not
   count as a guess.
5. Phrases of attributes ("an animal that can swim"): yes if the thing has all of them. With "or" in
   the question, one attribute suffices. Longer phrases are searched first, and phrases do not
   overlap. Yes, no and "I don't know" are combined by three-valued logic.

"not" and "never" invert the answer, but "isn't it ...?" does not. Unknown words are ignored. If a
question contains only unknown words, the answer is "I don't know".
"""

import re
from collections.abc import Callable
from functools import cache

from agent_system.environments.env import EnvFailure
from agent_system.environments.env_package.twenty_questions.knowledge import Answer, load_knowledge

Gamemaster = Callable[[str], str]
MAX_SERVER_REQUESTS = 16  # maximum number of concurrent requests to a server

PROMPT = """You are the gamemaster of a game of twenty questions. \
The player must guess a secret word.
Secret word: {word}
Question: {question}
Answer the question about the secret word truthfully with exactly one of: {answers}"""
_PROMPT_FIELDS_PATTERN = re.compile(
    r"^Secret word: (?P<word>[^\n]*)\nQuestion: (?P<question>[^\n]*)$", re.MULTILINE
)
_UNKNOWN_ANSWER_PATTERN = re.compile(
    r"\b(i (do not|don t|dont) know|unknown|unsure|not sure|maybe|sometimes|it depends|unclear)\b"
)
_OPEN_QUESTION_PATTERN = re.compile(r"^(what|which|who|whose|where|when|why|how)\b")
_NEGATED_VERB_PATTERN = re.compile(
    r"\b(is|are|does|do|can|has|have|was|would|could)n t\b|\bcan t\b"
)
_NEGATION_PATTERN = re.compile(r"\b(not|never|cannot)\b")
_ARTICLE_PATTERN = re.compile(r"\b(a|an|the|any|some)\b")
_LETTER_REGEX = r"(?: letter)? ([a-z])$"
_SPELLING_PATTERNS = {
    "starts": re.compile(
        r"\b(?:start|starts|begin|begins|starting|beginning) with" + _LETTER_REGEX
    ),
    "ends": re.compile(r"\b(?:end|ends|ending) (?:with|in)" + _LETTER_REGEX),
    "contains": re.compile(r"\b(?:contain|contains|have|has|include|includes)(?: letter) ([a-z])$"),
}
_COMPARISON_PATTERN = re.compile(
    r"\b(bigger|larger|heavier|taller|smaller|lighter|shorter) than (?:average |normal )?([\w ]+?)$"
)
_SMALLER_WORDS = frozenset({"smaller", "lighter", "shorter"})
_OPPOSITE_ANSWERS = {Answer.YES: Answer.NO, Answer.NO: Answer.YES, Answer.UNKNOWN: Answer.UNKNOWN}


class GamemasterError(EnvFailure):
    """Error: the gamemaster gave no answer. The trial or episode is aborted."""

    def __init__(self, detail: str) -> None:
        super().__init__("error", f"gamemaster: {detail}")


def build_gamemaster_prompt(word: str, question: str) -> str:
    # Replace line breaks by spaces, so that a question cannot imitate other fields of the prompt.
    one_line_question = " ".join(question.split())
    return PROMPT.format(word=word, question=one_line_question, answers=", ".join(Answer))


def read_answer(text: str) -> Answer:
    """Return the answer in the reply of a gamemaster. Without yes or no it is "I don't know"."""
    plain_text = " ".join(re.findall(r"[a-z]+", text.lower()))
    if _UNKNOWN_ANSWER_PATTERN.search(plain_text):
        return Answer.UNKNOWN
    match = re.search(r"\b(yes|no)\b", plain_text)
    return Answer.UNKNOWN if match is None else Answer.YES if match[1] == "yes" else Answer.NO


class EmbeddedGamemaster:
    """Deterministic gamemaster that applies the module's rules to ``knowledge.yaml``."""

    remote = False  # True if a call waits for a server

    def __call__(self, prompt: str) -> str:
        """Answer the question in ``prompt``, a text made by ``build_gamemaster_prompt``.

        Raises ``GamemasterError`` for other texts and for unknown words.
        """
        prompt_fields = _PROMPT_FIELDS_PATTERN.search(prompt)
        if prompt_fields is None:
            raise GamemasterError(
                "the embedded gamemaster accepts only prompts made by build_gamemaster_prompt()"
            )
        if prompt_fields["word"] not in load_knowledge().things:
            raise GamemasterError(
                f"the embedded gamemaster does not know the word {prompt_fields['word']!r}; "
                "allowed: words of knowledge.yaml"
            )
        return answer_question(prompt_fields["word"], prompt_fields["question"])


def normalize_question(text: str) -> str:
    """Return the words of ``text`` in lower case, without punctuation and articles.

    An "a" at the end after "letter" or "with" is a letter and is kept.
    """
    plain_text = " ".join(re.findall(r"[a-z0-9]+", text.lower()))
    if re.search(r"(letter|with) a$", plain_text):
        return " ".join(_ARTICLE_PATTERN.sub(" ", plain_text[:-1]).split()) + " a"
    return " ".join(_ARTICLE_PATTERN.sub(" ", plain_text).split())


def answer_question(word: str, question: str) -> Answer:
    thing = load_knowledge().things[word]
    normalized_question = normalize_question(question)
    if _OPEN_QUESTION_PATTERN.search(normalized_question):
        return Answer.UNKNOWN
    # Remove "isn't" and similar verbs before counting negations: "isn't it" means "is it".
    normalized_question, negation_count = _NEGATION_PATTERN.subn(
        " ", _NEGATED_VERB_PATTERN.sub(" ", normalized_question)
    )
    normalized_question = " ".join(normalized_question.split())
    answer = (
        _answer_spelling_question(word, normalized_question)
        or _answer_size_question(thing.size, normalized_question)
        or _answer_attribute_question(word, normalized_question)
    )
    # Two negations cancel each other.
    return _OPPOSITE_ANSWERS[answer] if negation_count % 2 else answer


def _answer_spelling_question(secret_word: str, normalized_question: str) -> Answer | None:
    check_by_relation = {
        "starts": secret_word.startswith,
        "ends": secret_word.endswith,
        "contains": secret_word.__contains__,
    }
    for relation, pattern in _SPELLING_PATTERNS.items():
        if match := pattern.search(normalized_question):
            return Answer.YES if check_by_relation[relation](match[1]) else Answer.NO
    return None


def _answer_size_question(secret_word_size: int, normalized_question: str) -> Answer | None:
    match = _COMPARISON_PATTERN.search(normalized_question)
    if not match:
        return None
    knowledge = load_knowledge()
    other_thing = knowledge.things.get(match[2])
    other_size = other_thing.size if other_thing else knowledge.sizes_by_name.get(match[2])
    if other_size is None or other_size == secret_word_size:
        return Answer.UNKNOWN
    return (
        Answer.YES if (secret_word_size < other_size) == (match[1] in _SMALLER_WORDS) else Answer.NO
    )


def _answer_attribute_question(word: str, normalized_question: str) -> Answer:
    """Return the answer to a question about attributes and things, in three-valued logic.

    The answers about all phrases are combined by "or" if the question contains it, else by "and".
    The result is "I don't know" if no phrase is known, or if an unknown answer leaves it open.
    """
    knowledge = load_knowledge()
    pattern, names_by_phrase = _make_phrase_pattern()
    answers = []
    for phrase in pattern.findall(normalized_question):
        name = names_by_phrase[phrase]
        if name in knowledge.attributes:
            answers.append(knowledge.get_answer(word, name))
        else:
            answers.append(Answer.YES if name == word else Answer.NO)
    decisive_answer = Answer.YES if re.search(r"\bor\b", normalized_question) else Answer.NO
    if decisive_answer in answers:
        return decisive_answer
    return (
        Answer.UNKNOWN
        if Answer.UNKNOWN in answers or not answers
        else _OPPOSITE_ANSWERS[decisive_answer]
    )


@cache
def _make_phrase_pattern() -> tuple[re.Pattern[str], dict[str, str]]:
    """Return a pattern that finds the known phrases, and the attribute or thing of each."""
    knowledge = load_knowledge()
    names_by_phrase = {normalize_question(thing): thing for thing in knowledge.things}
    # A phrase that is the name of a thing and of an attribute means the attribute.
    for name, attribute in knowledge.attributes.items():
        names_by_phrase |= dict.fromkeys(map(normalize_question, attribute.phrases), name)
    phrases_longest_first = sorted(names_by_phrase, key=lambda phrase: (-len(phrase), phrase))
    return re.compile(rf"\b({'|'.join(map(re.escape, phrases_longest_first))})\b"), names_by_phrase
