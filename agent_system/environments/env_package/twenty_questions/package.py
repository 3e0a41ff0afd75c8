"""Twenty questions as an environment package: ``env.env_name=twenty_questions``.

Keys of ``env.twenty_questions``: ``words`` (list; default: the shipped table), ``max_steps``, ``gamemaster``
(``embedded`` or ``openai``) and, for the latter, ``base_url``, ``model``, ``api_key_env``, ``timeout_s``, ``attempts``.
"""

import asyncio
import difflib
from collections.abc import Sequence
from typing import Any

from agent_system.environments.base import EnvPackage, Observation, Task
from agent_system.environments.env_package.twenty_questions import game
from agent_system.environments.env_package.twenty_questions.gamemaster import EmbeddedGamemaster, Gamemaster
from agent_system.environments.env_package.twenty_questions.knowledge import knowledge

SERVER_KEYS = ("base_url", "model", "api_key_env", "timeout_s", "attempts")
KEYS = ("words", "max_steps", "gamemaster", *SERVER_KEYS, "placement", "seed")

RULES = """We play twenty questions. Find out my word with yes/no questions. I answer Yes, No or I don't know.
Guess with the word in square brackets: [word]. A wrong guess ends the game."""
PLAIN = "Answer with one question or your guess between tags: <action>Is it alive?</action>"
LEVELS = """First choose how much to think, then think, then ask or guess:
<level>1</level><action>question or [word]</action> asks at once.
<level>2</level><think>what do I know?</think><action>question or [word]</action> reads the situation.
<level>3</level><think>what did I ask?</think><action>question or [word]</action> also reflects on what was asked.
<level>4</level><think>what is my plan?</think><action>question or [word]</action> also plans and weighs options."""


def make_gamemaster(section: dict[str, Any]) -> Gamemaster:
    """The gamemaster that ``section`` names. Raises ``ValueError`` for one that does not exist or unknown keys."""
    check_section(section)
    name = section.get("gamemaster") or "embedded"
    if name == "embedded":
        return EmbeddedGamemaster()
    if name != "openai":
        raise ValueError(f"env.twenty_questions.gamemaster={name!r}: allowed are embedded and openai")
    from agent_system.environments.env_package.twenty_questions.openai_gamemaster import OpenAIGamemaster

    given = {key: section[key] for key in SERVER_KEYS if section.get(key) is not None}
    return OpenAIGamemaster(given.pop("base_url", ""), given.pop("model", ""), **given)


def check_section(section: dict[str, Any]) -> None:
    """Raise ``ValueError`` for an unknown key, or for words that the embedded gamemaster does not know."""
    for key in section:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"env.twenty_questions.{key}: unknown key{hint} There are: {', '.join(KEYS)}")
    if (section.get("gamemaster") or "embedded") == "embedded":
        check_words(section.get("words") or ())


def check_words(words: Sequence[str]) -> None:
    """Raise ``ValueError`` unless the embedded gamemaster knows all ``words``."""
    unknown = sorted(set(words) - set(knowledge().things))
    if unknown:
        raise ValueError(
            f"the embedded gamemaster does not know {', '.join(unknown)}; take words of knowledge.txt, or a gamemaster "
            "that knows them"
        )


class TwentyQuestionsGame:
    """One game; reward 1 for the right guess. A server as gamemaster is asked without blocking the caller's loop."""

    placement = "inline"

    def __init__(self, section: dict[str, Any]) -> None:
        self.gamemaster = make_gamemaster(section)
        self.max_steps = int(section.get("max_steps") or game.MAX_STEPS)
        self.state: game.State = {}

    def reset(self, task: Task, seed: int) -> Observation:
        """Think of ``task["solution"]``; the seed changes nothing, the task says it all."""
        self.state = game.new_game(task["solution"], self.max_steps)
        return self._look()

    def step(self, action: str) -> Any:
        """Answer a question or a guess: (observation, reward, done, info), or a coroutine of that for a server."""
        if getattr(self.gamemaster, "remote", False):
            return self._step_elsewhere(action)
        return self._seen(*game.play(self.state, action, self.gamemaster))

    async def _step_elsewhere(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        return self._seen(*await asyncio.to_thread(game.play, self.state, action, self.gamemaster))

    def _seen(self, state: game.State, reward: float, done: bool, info: dict[str, Any]) -> tuple:
        self.state = state
        return self._look(), reward, done, info

    def _look(self) -> Observation:
        """The reply; the anchor is all that is known so far, in whatever order it was asked."""
        known = sorted(f"{action} {reply.partition('.')[0]}" for action, reply in self.state["turns"])
        return Observation(self.state["reply"], anchor=" | ".join([str(self.state["left"]), *known]))

    def close(self) -> None:
        """Nothing to free."""


class TwentyQuestionsPrompts:
    """Rules first, replies after; the same texts with and without thinking levels but for how to answer."""

    asks_for_levels = True

    def __init__(self, section: dict[str, Any] | None = None) -> None:
        del section

    def system(self, levels: bool) -> str | None:
        """Rules and answer format."""
        return f"{RULES}\n{LEVELS if levels else PLAIN}"

    def first(self, observation: Observation, levels: bool) -> str:
        """The opening as it is."""
        return observation.text

    def turn(self, observation: Observation) -> str:
        """The reply as it is."""
        return observation.text

    def window(
        self, first: Observation, history: Sequence[tuple[str, str]], observation: Observation, levels: bool
    ) -> str:
        """The remembered questions, each after what was said before it, then the last reply."""
        past = "".join(f"{seen}\nYou: {action}\n" for seen, action in history)
        return f"{past}{observation.text}"


def tasks(section: dict[str, Any], split: str) -> list[Task]:
    """One task per word; a quarter of the words is held out for ``val``. Raises ``ValueError`` for a wrong section."""
    check_section(section)
    return [
        {"task_id": f"twenty_questions/{word}", "data_source": "twenty_questions", "solution": word}
        for word in game.words_of(split, section.get("words"))
    ]


def project(text: str) -> tuple[str, bool]:
    """The question or ``[guess]`` in ``text``, and whether it stood between action tags and says something."""
    move = game.read_move(text)
    return (move.question if move.guess is None else f"[{move.guess}]"), move.valid and "<action>" in text


PACKAGE = EnvPackage("twenty_questions", TwentyQuestionsGame, tasks, TwentyQuestionsPrompts, project)
