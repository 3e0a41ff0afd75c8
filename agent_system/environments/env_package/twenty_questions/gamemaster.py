"""Gamemasters: a callable that gets a prompt with the secret word and a question, and returns text
with an answer.

``EmbeddedGamemaster`` knows the shipped table and needs no network. ``OpenAIGamemaster``
(``openai_gamemaster``) asks a server. Whatever a gamemaster returns is read as one of the three
answers, so it cannot give the word away.
"""

import re
from collections.abc import Callable

from agent_system.environments.env_package.twenty_questions.knowledge import (
    ANSWERS,
    Answer,
    Knowledge,
    knowledge,
)
from agent_system.environments.env_package.twenty_questions.questions import answer
from agent_system.environments.pool.failure import EnvFailure

Gamemaster = Callable[[str], str]
SERVER_THREADS = 16  # questions asked of a server at a time

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
    """The gamemaster gave no answer; the trial or episode that asked is aborted."""

    def __init__(self, detail: str) -> None:
        super().__init__("error", f"gamemaster: {detail}")


def gamemaster_prompt(word: str, question: str) -> str:
    """The prompt for one question; line breaks in ``question`` cannot forge its fields."""
    one_line = " ".join(question.split())
    return PROMPT.format(word=word, question=one_line, answers=", ".join(ANSWERS))


def read_answer(text: str) -> str:
    """One of ``ANSWERS`` from a gamemaster's reply; "I don't know" where it holds neither a yes nor
    a no.
    """
    words = " ".join(re.findall(r"[a-z]+", text.lower()))
    if _UNKNOWN.search(words):
        return Answer.UNKNOWN
    found = re.search(r"\b(yes|no)\b", words)
    return Answer.UNKNOWN if found is None else Answer.YES if found[1] == "yes" else Answer.NO


class EmbeddedGamemaster:
    """Answers from a knowledge table; see ``questions`` for what it understands.

    Deterministic, no network.
    """

    remote = False

    def __init__(self, table: Knowledge | None = None) -> None:
        self.table = knowledge() if table is None else table

    def __call__(self, prompt: str) -> str:
        """The answer to a prompt of ``gamemaster_prompt``.

        Raises ``GamemasterError`` for anything else.
        """
        fields = _FIELDS.search(prompt)
        if fields is None:
            raise GamemasterError("the embedded one reads prompts of gamemaster_prompt only")
        if fields["word"] not in self.table.things:
            raise GamemasterError(f"the embedded one does not know the word {fields['word']!r}")
        return answer(fields["word"], fields["question"], self.table)
