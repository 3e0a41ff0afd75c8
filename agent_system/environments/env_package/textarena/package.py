"""TextArena: its games for one player, and its games for two against a random or scripted opponent.

In games for two the policy sits on either seat by turns. A task is a start of a game. Four puzzles
are split by what a start holds: every fourth one (by hash) belongs to validation. Of the others the
splits have other seeds. What is left to chance after the start, the opponent's draws included,
follows from the environment seed.
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
GAME = -1  # who speaks, in TextArena's observations
TRIES = 20  # starts drawn per task wanted: small games repeat themselves
REPLIES = 50  # moves of the opponent between two of the policy's, at most


class TextArenaEnv:
    """One game at a time. Reward is 1.0 when it is won, else 0.0; ``info["score"]`` is what
    TextArena itself gives.

    TextArena's own rewards are not passed on: they pay for a near miss, also when it is followed by
    a broken rule.
    """

    placement = "inline"  # the four puzzles; other games by their settings in processes

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
        self._chance: Any = None  # state of Python's generator, which TextArena draws from
        self._read: list[str] = []  # by the opponent
        self.turns = 0
        self.players = self._count_players()

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start ``task``; ``seed`` decides what is drawn after the start."""
        self.seat = task["number"] % self.players
        self.turns = 0
        self._read = []
        self._dice = random.Random(derive_seed(NAME, "opponent", seed))
        with self._own_chance():
            # Some games draw while they are made.
            random.seed(task["number"])
            self.game = self._make(self.kind.env_id, **self._options)
            self.game.reset(num_players=self.players, seed=task["number"])
            random.seed(derive_seed(NAME, "chance", seed))
            self._let_others_move()
        return self._observe("")

    def step(self, action: str) -> Step:
        """Play ``action``, with or without brackets; done when TextArena says so or ``max_turns``
        are played.
        """
        # TextArena reads only what stands in brackets, and a policy easily forgets them.
        move = action if "[" in action else f"[{action}]"
        with self._own_chance():
            if not self._accepts(move):
                return self._unreadable()
            state = self.game.state
            # A first broken rule is an error that the next good move forgives; the second in a row
            # ends the game and is noted as an invalid move.
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
        """Step the game; False where it raises on what was said."""
        try:
            self.game.step(move)
        except UNREADABLE:
            return False
        return True

    def _unreadable(self) -> Step:
        """End a game that raised: its state may be changed by half."""
        observation = Observation("The game cannot read this move: it is lost.")
        observation.info |= {"won": False, "is_action_valid": False, "score": 0.0}
        return observation, 0.0, True, observation.info

    def start_hash(self) -> str:
        """Hash (12 hexadecimal digits) of all that the game holds, after ``reset`` of its start."""
        text = json.dumps(self.game.state.game_state, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def close(self) -> None:
        """Nothing to free."""

    def _count_players(self) -> int:
        with self._own_chance():
            try:
                self._make(self.kind.env_id, **self._options).reset(num_players=2, seed=0)
            except (AssertionError, ValueError, ZeroDivisionError):
                return 1  # said by games that are for one
        return 2

    @contextlib.contextmanager
    def _own_chance(self) -> Iterator[None]:
        """Python's process-wide generator, which TextArena seeds and draws from, is this game's
        meanwhile: nobody else's draws may follow from it, nor disturb it.
        """
        before = random.getstate()
        if self._chance is not None:
            random.setstate(self._chance)
        try:
            # Some games print what they do.
            with contextlib.redirect_stdout(None):
                yield
            self._chance = random.getstate()
        finally:
            random.setstate(before)

    def _let_others_move(self) -> None:
        """The opponent plays until it is the policy's turn again, or the game is over."""
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
        # A game that is over may have ended on the opponent's turn.
        state.current_player_id = self.seat
        _, messages = self.game.get_observation()
        text = "\n".join([_text(messages, self.seat), last]).strip()
        info: dict[str, Any] = {"won": False}
        if self.kind.moves is not None:
            info["admissible_actions"] = [f"[{move}]" for move in self.kind.moves(self.game)]
        anchor = json.dumps(state.game_state[self.kind.state]) if self.kind.state else None
        return Observation(text, anchor=anchor, info=info)


def _as_score(paid: Any) -> float:
    """Return a reward of TextArena; 0 where it is none, or not finite: some games put the reason of
    a loss in its place.
    """
    number = isinstance(paid, int | float) and math.isfinite(paid)
    return float(paid) if number else 0.0


def _text(messages: list[tuple[int, str, Any]], reader: int) -> str:
    """What others say: the reader's own words are in the prompt already, as turns."""
    return "\n".join(str(text).strip() for speaker, text, _ in messages if speaker != reader)


def tasks(settings: TextArenaSettings, split: str) -> list[Task]:
    """Up to ``train_games`` or ``val_games`` different starts. Raises ``ValueError`` where the game
    is not offered.
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
            # LightsOut divides by the lights that are on, and a start may have none.
            continue
        name = env.start_hash()
        # A share of the numbers would not do: different numbers often start the same game, and then
        # the same start could be trained on and validated. The content decides, whatever its number
        # is.
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
    """How to write a move; the game's own rules are its first observation."""
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
