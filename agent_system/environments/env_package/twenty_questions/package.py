"""Twenty questions as an environment package: ``env.env_name=twenty_questions``.

Keys of ``env.twenty_questions``: ``words`` (list; default: the shipped table), ``max_steps``,
``gamemaster`` (``embedded`` or ``openai``) and, for the latter, ``base_url``, ``model``,
``api_key_env``, ``timeout_s``, ``attempts``.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from agent_system.environments.base import EnvPackage, Observation, Task
from agent_system.environments.chat_prompts import ChatPrompts
from agent_system.environments.env_package.twenty_questions import game
from agent_system.environments.env_package.twenty_questions.expert import EXPERT
from agent_system.environments.env_package.twenty_questions.gamemaster import (
    SERVER_THREADS,
    EmbeddedGamemaster,
    Gamemaster,
)
from agent_system.environments.env_package.twenty_questions.knowledge import knowledge
from agent_system.environments.sections import read_section, setting

RULES = """We play twenty questions. Find out my word with yes/no questions. I answer Yes, No or I don't know.
Guess with the word in square brackets: [word]. A wrong guess ends the game."""
PLAIN = "Answer with one question or your guess between tags: <action>Is it alive?</action>"
LEVELS = """First choose how much to think, then think, then ask or guess:
<level>1</level><action>question or [word]</action> asks at once.
<level>2</level><think>what do I know?</think><action>question or [word]</action> reads the situation.
<level>3</level><think>what did I ask?</think><action>question or [word]</action> also reflects on what was asked.
<level>4</level><think>what is my plan?</think><action>question or [word]</action> also plans and weighs options."""

_ASKING = ThreadPoolExecutor(
    SERVER_THREADS, thread_name_prefix="gamemaster"
)  # starts a thread when it is needed


@dataclass(frozen=True)
class GameSettings:
    """``env.twenty_questions`` without ``words``; all but ``gamemaster`` are of the server that
    ``openai`` names.
    """

    gamemaster: str = setting("embedded", choices=("embedded", "openai"))
    base_url: str = setting("")
    model: str = setting("")
    api_key_env: str = setting("OPENAI_API_KEY")
    timeout_s: float = setting(6.0, low=0)  # all attempts together are within env.step_timeout_s
    attempts: int = setting(4, low=1)


def read_settings(section: Mapping[str, Any]) -> tuple[GameSettings, list[str]]:
    """Settings and secret words of ``section``.

    Raises ``ValueError`` for unknown keys, and for words that the embedded gamemaster does not
    know.
    """
    settings = read_section(
        GameSettings, {k: v for k, v in section.items() if k != "words"}, "twenty_questions"
    )
    words = [str(word) for word in section.get("words") or ()]
    if settings.gamemaster == "embedded":
        check_words(words)
    return settings, words


def make_gamemaster(settings: GameSettings) -> Gamemaster:
    """The gamemaster that the settings name.

    Raises ``ValueError`` for a server without address or model.
    """
    if settings.gamemaster == "embedded":
        return EmbeddedGamemaster()
    from agent_system.environments.env_package.twenty_questions.openai_gamemaster import (
        OpenAIGamemaster,
    )

    server = asdict(settings)
    del server["gamemaster"]
    return OpenAIGamemaster(**server)


def check_words(words: Sequence[str]) -> None:
    """Raise ``ValueError`` unless the embedded gamemaster knows all ``words``."""
    unknown = sorted(set(words) - set(knowledge().things))
    if unknown:
        raise ValueError(
            f"the embedded gamemaster does not know {', '.join(unknown)}; take words of knowledge.txt, or a gamemaster "
            "that knows them"
        )


class TwentyQuestionsGame:
    """One game; reward 1 for the right guess.

    A server as gamemaster is asked without blocking the caller's loop.
    """

    placement = "inline"

    def __init__(self, section: dict[str, Any]) -> None:
        self.gamemaster = make_gamemaster(read_settings(section)[0])
        self.max_steps = int(section.get("max_steps") or game.MAX_STEPS)
        self.state: game.State = {}
        if getattr(self.gamemaster, "remote", False):
            self.step = self._step_elsewhere

    def reset(self, task: Task, seed: int) -> Observation:
        """Think of ``task["solution"]``; the seed changes nothing, the task says it all."""
        self.state = game.new_game(task["solution"], self.max_steps)
        return self._look()

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Answer a question or a guess; a coroutine function where a server is asked."""
        return self._seen(*game.play(self.state, action, self.gamemaster))

    async def _step_elsewhere(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        loop = asyncio.get_running_loop()
        return self._seen(
            *await loop.run_in_executor(_ASKING, game.play, self.state, action, self.gamemaster)
        )

    def _seen(self, state: game.State, reward: float, done: bool, info: dict[str, Any]) -> tuple:
        self.state = state
        return self._look(), reward, done, info

    def _look(self) -> Observation:
        """The reply; the anchor is all that is known so far, in whatever order it was asked."""
        known = sorted(
            f"{action} {reply.partition('.')[0]}" for action, reply in self.state["turns"]
        )
        return Observation(
            self.state["reply"], anchor=" | ".join([str(self.state["left"]), *known])
        )

    def close(self) -> None:
        """Close the connection to a server."""
        if getattr(self.gamemaster, "remote", False):
            self.gamemaster.close()


class TwentyQuestionsPrompts(ChatPrompts):
    """Rules and replies, with words of their own for how to answer: a move is a question or a
    guess.
    """

    def __init__(self, section: Mapping[str, Any] | None = None) -> None:
        super().__init__(RULES, example="Is it alive?")

    def system(self, levels: bool) -> str | None:
        """Rules and answer format."""
        return f"{RULES}\n{LEVELS if levels else PLAIN}"


def tasks(section: dict[str, Any], split: str) -> list[Task]:
    """One task per word; a quarter of the words is held out for ``val``.

    Raises ``ValueError`` for a wrong section.
    """
    _, words = read_settings(section)
    return [
        {"task_id": f"twenty_questions/{word}", "data_source": "twenty_questions", "solution": word}
        for word in game.words_of(split, words)
    ]


def project(text: str) -> tuple[str, bool]:
    """The question or ``[guess]`` in ``text``, and whether it stood between action tags and says
    something.
    """
    move = game.read_move(text)
    return (
        move.question if move.guess is None else f"[{move.guess}]"
    ), move.valid and "<action>" in text


PACKAGE = EnvPackage(
    "twenty_questions",
    TwentyQuestionsGame,
    tasks,
    TwentyQuestionsPrompts,
    project,
    expert=EXPERT,
)
