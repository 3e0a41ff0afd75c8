"""Gamemasters: callables that get a prompt with the secret word and a question and return text.

``EmbeddedGamemaster`` uses the shipped table and no network. ``OpenAIGamemaster``
(``openai_gamemaster``) queries a server. The returned text is reduced to one of the three answers,
so it cannot reveal the word.
"""

import re
from collections.abc import Callable

from agent_system.environments.env_package.twenty_questions.knowledge import Answer, load_knowledge
from agent_system.environments.env_package.twenty_questions.questions import answer_question
from agent_system.environments.pool.failure import EnvFailure

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
    """Deterministic gamemaster that answers from a table, by the rules of ``questions``."""

    remote = False

    def __call__(self, prompt: str) -> str:
        """Answer a prompt of ``gamemaster_prompt``.

        Raises ``GamemasterError`` for any other prompt and for an unknown word.
        """
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
