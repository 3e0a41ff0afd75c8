"""TextArena: games for one, and games for two against a random or user-provided opponent.

In games for two, the seat of the policy alternates between tasks. A task is the start of a game.
For the four puzzles, the split depends on a hash of the start: one in four belongs to validation.
For other games, the splits use different seeds. All randomness after the start, including that of
the opponent, depends on the environment seed.
"""

import contextlib
import hashlib
import json
import math
import random
from collections.abc import Iterator
from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts, project
from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.textarena.games import (
    GAMES,
    game_of,
    playable,
    remarks,
    unlisted,
)
from agent_system.environments.env_package.textarena.opponent import (
    UNREADABLE,
    broken_rule,
    random_move,
    scripted,
)
from agent_system.environments.env_package.textarena.settings import TextArenaSettings
from agent_system.environments.package import EnvPackage
from agent_system.environments.prompts import Prompts
from agent_system.reward_manager.scores import is_full
from verl.utils.seeds import derive_seed

NAME = "textarena"
ALONE = """\
You play a puzzle in text, alone. Its rules come first; each turn you see what your last move \
did. Write one move a turn, in square brackets, inside the action tags. A move against the \
rules is refused; two in a row end the game."""
AGAINST = """\
You play a game in text against an opponent. Its rules come first; each turn you see what \
happened since your last one. Write one move a turn, as the rules say, inside the action tags. A \
move against the rules is refused; two in a row lose the game."""
GAME = -1  # speaker id of the game in TextArena's observations
TRIES = 20  # starts drawn per task, because small games repeat starts
REPLIES = 50  # maximum number of opponent moves between two moves of the policy


class TextArenaEnv:
    """Environment with reward 1.0 for success, else 0.0. ``info["score"]`` is TextArena's reward.

    TextArena's reward is not used as the reward, because it is positive for a near miss, even if a
    rule violation follows.
    """

    placement = "inline"  # for the four puzzles; the settings of other games choose a process

    def __init__(self, settings: TextArenaSettings) -> None:
        import textarena

        self._make = textarena.make
        self.settings = settings
        self.kind = game_of(settings.game)
        given = {key: getattr(settings, key) for key in self.kind.options}
        self._options = {k: v if v is not None else self.kind.defaults[k] for k, v in given.items()}
        self.max_turns = settings.max_turns or self.kind.defaults.get("max_turns")
        self.opponent = scripted(settings)
        self.game: Any = None
        self.seat = 0
        self._dice = random.Random()
        self._chance: Any = None  # state of Python's global generator, which TextArena uses
        self._read: list[str] = []  # texts for the opponent
        self.turns = 0
        self.players = self._count_players()

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start ``task``. ``seed`` determines all randomness after the start."""
        self.seat = task["number"] % self.players
        self.turns = 0
        self._read = []
        self._dice = random.Random(derive_seed(NAME, "opponent", seed))
        with self._own_chance():
            # Some games draw random numbers in their constructor.
            random.seed(task["number"])
            self.game = self._make(self.kind.env_id, **self._options)
            self.game.reset(num_players=self.players, seed=task["number"])
            random.seed(derive_seed(NAME, "chance", seed))
            self._let_others_move()
        return self._observe("")

    def step(self, action: str) -> Step:
        """Apply ``action``, with or without brackets.

        The episode is done when TextArena ends it or after ``max_turns`` valid moves.
        """
        # TextArena reads only text in brackets, which a policy may forget.
        move = action if "[" in action else f"[{action}]"
        with self._own_chance():
            if not self._accepts(move):
                return self._unreadable()
            state = self.game.state
            # The first invalid move is refused. A second one in a row ends the game.
            broken = broken_rule(state, self.seat)
            self.turns += not broken
            if not broken:
                self._let_others_move()
        over = state.done
        score = self._score() if over else 0.0
        won = over and not broken and self._wins(score)
        done = over or self.turns >= (self.max_turns or self.turns + 1)
        observation = self._observe(state.game_info[self.seat].get("reason") or "" if over else "")
        observation.info |= {"won": won, "is_action_valid": not broken, "score": score}
        return observation, float(won), done, observation.info

    def _accepts(self, move: str) -> bool:
        """Step the game. Return False if it raises because it cannot read the move."""
        try:
            self.game.step(move)
        except UNREADABLE:
            return False
        return True

    def _unreadable(self) -> Step:
        """End a game that raised an error: its state may be inconsistent."""
        observation = Observation("The game cannot read this move: it is lost.")
        observation.info |= {"won": False, "is_action_valid": False, "score": 0.0}
        return observation, 0.0, True, observation.info

    def start_hash(self) -> str:
        """Return a hash (12 hexadecimal digits) of the game state. Call it after ``reset``."""
        text = json.dumps(self.game.state.game_state, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def close(self) -> None:
        """Do nothing: no resources are in use."""

    def _count_players(self) -> int:
        with self._own_chance():
            try:
                self._make(self.kind.env_id, **self._options).reset(num_players=2, seed=0)
            except (AssertionError, ValueError, ZeroDivisionError):
                return 1  # games for one raise these errors
        return 2

    @contextlib.contextmanager
    def _own_chance(self) -> Iterator[None]:
        """Give Python's global random generator the state of this game, and restore it afterwards.

        TextArena seeds and uses the global generator. Other code must not depend on its draws, nor
        disturb them.
        """
        before = random.getstate()
        if self._chance is not None:
            random.setstate(self._chance)
        try:
            # Some games print messages.
            with contextlib.redirect_stdout(None):
                yield
            self._chance = random.getstate()
        finally:
            random.setstate(before)

    def _let_others_move(self) -> None:
        """Let the opponent move until it is the policy's turn or the game is over."""
        state = self.game.state
        for _ in range(REPLIES):
            if state.done or state.current_player_id == self.seat:
                return
            text = _text(self.game.get_observation()[1], state.current_player_id)
            self._read.append(text)
            if self.opponent is not None:
                move = self.opponent(text, self._dice)
            else:
                move = random_move(self.game, [*self._read, self.kind.hints], self._dice)
            self.game.step(move)

    def _score(self) -> float:
        return _as_score((self.game.state.rewards or {}).get(self.seat))

    def _wins(self, score: float) -> bool:
        if self.players == 1:
            return is_full(score)
        return score > 0.0 and score == max(map(_as_score, self.game.state.rewards.values()))

    def _observe(self, last: str) -> Observation:
        state = self.game.state
        # Select the policy: a game may have ended on the opponent's turn.
        state.current_player_id = self.seat
        _, messages = self.game.get_observation()
        text = "\n".join([_text(messages, self.seat), last]).strip()
        info: dict[str, Any] = {"won": False}
        if self.kind.moves is not None:
            info["admissible_actions"] = [f"[{move}]" for move in self.kind.moves(self.game)]
        anchor = json.dumps(state.game_state[self.kind.state]) if self.kind.state else None
        return Observation(text, anchor=anchor, info=info)


def _as_score(paid: Any) -> float:
    """Convert a reward of TextArena to a finite number, else 0.

    Some games return the reason of a defeat instead of a number.
    """
    number = isinstance(paid, int | float) and math.isfinite(paid)
    return float(paid) if number else 0.0


def _text(messages: list[tuple[int, str, Any]], reader: int) -> str:
    """Return the messages of others. Those of ``reader`` are already in the prompt as turns."""
    return "\n".join(str(text).strip() for speaker, text, _ in messages if speaker != reader)


def tasks(settings: TextArenaSettings, split: str) -> list[Task]:
    """Return up to ``train_games`` or ``val_games`` distinct starts.

    Raises ``ValueError`` if the game is not available.
    """
    game_of(settings.game)
    if settings.game not in GAMES:
        return _by_seed(settings, split)
    env = TextArenaEnv(settings)
    wanted = settings.val_games if split == "val" else settings.train_games
    found: dict[str, Task] = {}
    for number in range(TRIES * wanted):
        try:
            env.reset({"number": number})
        except ZeroDivisionError:
            # LightsOut divides by the number of lights that are on, which may be 0.
            continue
        name = env.start_hash()
        # Choose the split by the content of a start. Different numbers often give the same start,
        # which would then be in both splits.
        if (int(name, 16) % 4 == 0) == (split == "val"):
            found.setdefault(name, _task(settings, name, number))
        if len(found) == wanted:
            break
    return list(found.values())


def _by_seed(settings: TextArenaSettings, split: str) -> list[Task]:
    first = 0 if split == "val" else settings.val_games
    count = settings.val_games if split == "val" else settings.train_games
    return [_task(settings, str(number), number) for number in range(first, first + count)]


def _task(settings: TextArenaSettings, name: str, number: int) -> Task:
    source = f"{NAME}/{settings.game}"
    return {"task_id": f"{source}/{name}", "data_source": source, "number": number}


def prompts(settings: TextArenaSettings) -> Prompts:
    """Return prompts that explain how to write a move. The first observation gives the rules."""
    env = TextArenaEnv(settings)
    rules = ALONE if env.players == 1 else AGAINST
    return ChatPrompts(rules, env.kind.example, list_actions=settings.list_actions, keep_first=True)


PACKAGE = EnvPackage(
    name=NAME,
    settings=TextArenaSettings,
    make=TextArenaEnv,
    tasks=tasks,
    prompts=prompts,
    project=project,
    variants=playable,
    unlisted=unlisted,
    remarks=remarks,
)
