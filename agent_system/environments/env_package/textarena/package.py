"""TextArena: guess a number, cross a frozen lake, put out the lights, break a code.

These are the single-player games of TextArena that need no download, differ from start to start and
draw nothing after the start. A task is a start of a game, named by what it holds, and every fourth
start (by hash) belongs to validation.
"""

import hashlib
import json
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from agent_system.environments.base import EnvPackage, Observation, Prompts, Task
from agent_system.environments.chat_prompts import ChatPrompts, project
from agent_system.environments.env_package.textarena.settings import TextArenaSettings

NAME = "textarena"
RULES = """\
You play a puzzle in text, alone. Its rules come first; each turn you see what your last move \
did. Write one move a turn, in square brackets, inside the action tags. A move against the \
rules is refused; two in a row end the game."""
GAME = -1  # who speaks, in TextArena's observations
TRIES = 20  # starts drawn per task wanted: small games repeat themselves


@dataclass(frozen=True)
class Game:
    """``options`` are the settings that TextArena's game takes, ``state`` the key of what its
    anchor is made of.
    """

    env_id: str
    options: tuple[str, ...]
    state: str
    example: str
    moves: Callable[[Any], list[str]] | None = None  # TextArena's game -> the moves it would accept


class _NumberGame(Protocol):
    """What GuessTheNumber says of its numbers."""

    min_number: int
    max_number: int
    guessed_numbers: Collection[int]


class _SquareGame(Protocol):
    """What games on a square say of it."""

    size: int


class _LakeGame(_SquareGame, Protocol):
    """What FrozenLake says besides; ``actions`` are (down, right) by name."""

    actions: Mapping[str, tuple[int, int]]
    state: Any


def _guesses(game: _NumberGame) -> list[str]:
    return [
        str(n) for n in range(game.min_number, game.max_number + 1) if n not in game.guessed_numbers
    ]


def _ways(game: _LakeGame) -> list[str]:
    row, column = game.state.game_state["player_pos"]
    inside = {(r, c) for r in range(game.size) for c in range(game.size)}
    return [
        name
        for name, (down, right) in game.actions.items()
        if (row + down, column + right) in inside
    ]


def _switches(game: _SquareGame) -> list[str]:
    return [f"{row} {column}" for row in range(game.size) for column in range(game.size)]


GAMES = {
    "GuessTheNumber": Game(
        "GuessTheNumber-v0-raw",
        ("max_number", "max_turns"),
        state="guess_history",
        example="[7]",
        moves=_guesses,
    ),
    "FrozenLake": Game(
        "FrozenLake-v0-raw",
        ("size", "num_holes"),
        state="player_pos",
        example="[right]",
        moves=_ways,
    ),
    "LightsOut": Game(
        "LightsOut-v0-raw",
        ("size", "max_turns"),
        state="grid",
        example="[0 1]",
        moves=_switches,
    ),
    # No list of moves: a code is one of hundreds, and to list them would be most of the prompt.
    "Mastermind": Game(
        "Mastermind-v0-raw",
        ("code_length", "num_numbers", "max_turns"),
        state="history",
        example="[2 1 4 5]",
    ),
}  # fmt: skip


class TextArenaEnv:
    """One game at a time. Reward is 1.0 when it is won, else 0.0; ``info["score"]`` is what
    TextArena itself gives.

    TextArena's own rewards are not passed on: they pay for a near miss, also when it is followed by
    a broken rule.
    """

    placement = "inline"

    def __init__(self, settings: TextArenaSettings) -> None:
        import textarena

        self._make = textarena.make
        self.settings = settings
        self.kind = GAMES[settings.game]
        self._options = {key: getattr(settings, key) for key in self.kind.options}
        self.game: Any = None

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start ``task``, which says everything: ``seed`` changes nothing."""
        del seed  # the task says it all
        self.game = self._make(self.kind.env_id, **self._options)
        # TextArena draws from Python's process-wide generator and seeds it; nobody else's draws may
        # follow from which game was started last.
        before = random.getstate()
        try:
            self.game.reset(num_players=1, seed=task["number"])
        finally:
            random.setstate(before)
        return self._observe("")

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Play ``action``, with or without brackets; done when TextArena says so or ``max_turns``
        are played.
        """
        # TextArena reads only what stands in brackets, and a policy easily forgets them.
        move = action if "[" in action else f"[{action}]"
        over, _ = self.game.step(move)
        state = self.game.state
        # A first broken rule is an error that the next good move forgives; the second in a row ends
        # the game and is noted as an invalid move. Rewards exist only once the game is over.
        broken = state.error_count > 0 or state.game_info[0]["invalid_move"]
        score = state.rewards[0] if over else 0.0
        won = over and not broken and score >= 1.0
        done = over or state.turn >= self.settings.max_turns
        observation = self._observe(state.game_info[0].get("reason") or "" if over else "")
        observation.info |= {"won": won, "is_action_valid": not broken, "score": float(score)}
        return observation, float(won), done, observation.info

    def start_hash(self) -> str:
        """Hash (12 hexadecimal digits) of all that the game holds, after ``reset`` of its start."""
        text = json.dumps(self.game.state.game_state, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def close(self) -> None:
        """Nothing to free."""

    def _observe(self, last: str) -> Observation:
        _, messages = self.game.get_observation()
        # Only what the game says: the player's own words are in the prompt already, as turns.
        said = [text.strip() for speaker, text, _ in messages if speaker == GAME]
        info: dict[str, Any] = {"won": False}
        if self.kind.moves is not None:
            info["admissible_actions"] = [f"[{move}]" for move in self.kind.moves(self.game)]
        anchor = json.dumps(self.game.state.game_state[self.kind.state])
        return Observation("\n".join([*said, last]).strip(), anchor=anchor, info=info)


def tasks(settings: TextArenaSettings, split: str) -> list[Task]:
    """Up to ``train_games`` or ``val_games`` different starts."""
    env = TextArenaEnv(settings)
    source = f"{NAME}/{settings.game}"
    wanted = settings.val_games if split == "val" else settings.train_games
    found: dict[str, Task] = {}
    for number in range(TRIES * wanted):
        try:
            env.reset({"number": number})
        except ZeroDivisionError:
            # LightsOut divides by the lights that are on, and a start may have none.
            continue
        name = env.start_hash()
        # A share of the numbers would not do: different numbers often start the same game, and then
        # the same start could be trained on and validated. The content decides, whatever its number
        # is.
        if (int(name, 16) % 4 == 0) == (split == "val"):
            found.setdefault(
                name, {"task_id": f"{source}/{name}", "data_source": source, "number": number}
            )
        if len(found) == wanted:
            break
    return list(found.values())


def prompts(settings: TextArenaSettings) -> Prompts:
    """How to write a move; the game's own rules are its first observation."""
    example = GAMES[settings.game].example
    return ChatPrompts(RULES, example, list_actions=settings.list_actions, keep_first=True)


PACKAGE = EnvPackage(
    name=NAME,
    settings=TextArenaSettings,
    make=TextArenaEnv,
    tasks=tasks,
    prompts=prompts,
    project=project,
    variants=TextArenaSettings.choices,
)
