"""TextArena: games for one, and games for two against a random or user-provided opponent.

In games for two, the policy moves first in every other task. A task is the start of a game.
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

from agent_system.environments.chat_prompts import ChatPrompts, project_action
from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.textarena import games, opponent
from agent_system.environments.env_package.textarena.settings import TextArenaSettings
from agent_system.environments.package import EnvPackage
from agent_system.environments.prompts import Prompts
from agent_system.environments.tasks import get_task_number_range
from agent_system.reward_manager.scores import is_full_score
from verl.utils.seeds import derive_seed

NAME = "textarena"
RULES_ALONE = """\
You play a puzzle in text, alone. Its rules come first; each turn you see what your last move \
did. Write one move a turn, in square brackets, inside the action tags. A move against the \
rules is refused; two in a row end the game."""
RULES_AGAINST = """\
You play a game in text against an opponent. Its rules come first; each turn you see what \
happened since your last one. Write one move a turn, as the rules say, inside the action tags. A \
move against the rules is refused; two in a row lose the game."""
STARTS_PER_TASK = 20  # starts drawn per task, because small games repeat starts
MAX_OPPONENT_MOVES = 50  # maximum number of opponent moves between two moves of the policy


class TextArenaEnv:
    """Environment with reward 1.0 for success, else 0.0. ``info["score"]`` is TextArena's reward.

    TextArena's reward is not used as the reward, because it can be positive without success, even
    after a violation of the rules.
    """

    placement = "inline"  # for the four puzzles; the settings of other games choose a process

    def __init__(self, settings: TextArenaSettings) -> None:
        import textarena

        self._make = textarena.make
        self.settings = settings
        self.game_entry = games.game_of(settings.game)
        self._options = {
            key: self.game_entry.defaults[key] if value is None else value
            for key in self.game_entry.options
            for value in [getattr(settings, key)]
        }
        self.max_turns = settings.max_turns or self.game_entry.defaults.get("max_turns")
        self.opponent = opponent.load_opponent(settings)
        self.game: Any = None
        self.seat = 0
        self._opponent_rng = random.Random()
        self._random_state: Any = None  # state of Python's global generator, which TextArena uses
        self._opponent_texts: list[str] = []  # texts for the opponent
        self.turns = 0
        self.seat_count = self._count_seats()

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start ``task``. ``seed`` determines all randomness after the start."""
        self.seat = task["number"] % self.seat_count
        self.turns = 0
        self._opponent_texts = []
        self._opponent_rng = random.Random(derive_seed(NAME, "opponent", seed))
        with self._use_game_random_state():
            # Some games draw random numbers in their constructor.
            random.seed(task["number"])
            self.game = self._make(self.game_entry.env_id, **self._options)
            self.game.reset(num_players=self.seat_count, seed=task["number"])
            random.seed(derive_seed(NAME, "chance", seed))
            self._move_opponent()
        return self._make_observation("")

    def step(self, action: str) -> Step:
        """Apply ``action``, with or without brackets.

        The episode is done when TextArena ends it or after ``max_turns`` valid moves.
        """
        # TextArena reads only text in brackets, which a policy may forget.
        move = action if "[" in action else f"[{action}]"
        with self._use_game_random_state():
            try:
                self.game.step(move)
            except opponent.GAME_ERRORS:
                # The state of the game may be inconsistent, so the episode ends.
                info = {"won": False, "is_action_valid": False, "score": 0.0}
                observation = Observation("The game cannot read this move: it is lost.", info=info)
                return observation, 0.0, True, info
            state = self.game.state
            # The first invalid move is refused. A second one in a row ends the game.
            is_violation = opponent.is_rule_violated(state, self.seat)
            self.turns += not is_violation
            if not is_violation:
                self._move_opponent()
        is_over = state.done
        score = _as_score((state.rewards or {}).get(self.seat)) if is_over else 0.0
        won = is_over and not is_violation and self._is_success(score)
        done = is_over or self.turns >= (self.max_turns or self.turns + 1)
        observation = self._make_observation(
            state.game_info[self.seat].get("reason") or "" if is_over else ""
        )
        observation.info |= {"won": won, "is_action_valid": not is_violation, "score": score}
        return observation, float(won), done, observation.info

    def start_hash(self) -> str:
        """Return a hash (12 hexadecimal digits) of the game state. Call it after ``reset``."""
        text = json.dumps(self.game.state.game_state, sort_keys=True, default=str)
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def close(self) -> None:
        pass  # no resources are in use

    def _count_seats(self) -> int:
        with self._use_game_random_state():
            try:
                self._make(self.game_entry.env_id, **self._options).reset(num_players=2, seed=0)
            except (AssertionError, ValueError, ZeroDivisionError):
                return 1  # games for one raise these errors
        return 2

    @contextlib.contextmanager
    def _use_game_random_state(self) -> Iterator[None]:
        """Give Python's global random generator the state of this game, and restore it afterwards.

        TextArena seeds and uses the global generator. Other code must not depend on its draws, nor
        disturb them.
        """
        global_state = random.getstate()
        if self._random_state is not None:
            random.setstate(self._random_state)
        try:
            # Some games print messages.
            with contextlib.redirect_stdout(None):
                yield
            self._random_state = random.getstate()
        finally:
            random.setstate(global_state)

    def _move_opponent(self) -> None:
        """Let the opponent move until it is the policy's turn or the game is over."""
        state = self.game.state
        for _ in range(MAX_OPPONENT_MOVES):
            if state.done or state.current_player_id == self.seat:
                return
            text = _join_messages(self.game.get_observation()[1], state.current_player_id)
            self._opponent_texts.append(text)
            if self.opponent is not None:
                move = self.opponent(text, self._opponent_rng)
            else:
                move = opponent.random_move(
                    self.game, [*self._opponent_texts, self.game_entry.hints], self._opponent_rng
                )
            self.game.step(move)

    def _is_success(self, score: float) -> bool:
        if self.seat_count == 1:
            return is_full_score(score)
        return score > 0.0 and score == max(map(_as_score, self.game.state.rewards.values()))

    def _make_observation(self, last: str) -> Observation:
        state = self.game.state
        # Set the policy's seat as current: a game may have ended on the opponent's turn.
        state.current_player_id = self.seat
        _, messages = self.game.get_observation()
        text = "\n".join([_join_messages(messages, self.seat), last]).strip()
        info: dict[str, Any] = {"won": False}
        if self.game_entry.moves is not None:
            info["admissible_actions"] = [f"[{move}]" for move in self.game_entry.moves(self.game)]
        anchor = (
            json.dumps(state.game_state[self.game_entry.state]) if self.game_entry.state else None
        )
        return Observation(text, anchor=anchor, info=info)


def _as_score(reward: Any) -> float:
    """Convert a reward of TextArena to a finite number, else 0.

    Some games return the reason of a defeat instead of a number.
    """
    is_number = isinstance(reward, int | float) and math.isfinite(reward)
    return float(reward) if is_number else 0.0


def _join_messages(messages: list[tuple[int, str, Any]], reader: int) -> str:
    """Return the messages that ``reader`` (a seat) did not write, as one text.

    Those of ``reader`` are already in the prompt as turns of the policy.
    """
    return "\n".join(str(text).strip() for speaker, text, _ in messages if speaker != reader)


def list_tasks(settings: TextArenaSettings, split: str) -> list[Task]:
    """Return up to ``train_games`` or ``val_games`` distinct starts.

    Raises ``ValueError`` if the game is not available.
    """
    games.game_of(settings.game)
    if settings.game not in games.GAMES:
        numbers = get_task_number_range(split, settings.train_games, settings.val_games)
        return [_make_task(settings, number, str(number)) for number in numbers]
    env = TextArenaEnv(settings)
    task_count = settings.val_games if split == "val" else settings.train_games
    tasks_by_hash: dict[str, Task] = {}
    for start_number in range(STARTS_PER_TASK * task_count):
        try:
            env.reset({"number": start_number})
        except ZeroDivisionError:
            # LightsOut divides by the number of lights that are on, which may be 0.
            continue
        name = env.start_hash()
        # Choose the split by the content of a start. Different numbers often give the same start,
        # which would then be in both splits.
        if (int(name, 16) % 4 == 0) == (split == "val"):
            tasks_by_hash.setdefault(name, _make_task(settings, start_number, name))
        if len(tasks_by_hash) == task_count:
            break
    return list(tasks_by_hash.values())


def _make_task(settings: TextArenaSettings, number: int, name: str) -> Task:
    source = f"{NAME}/{settings.game}"
    return {"task_id": f"{source}/{name}", "data_source": source, "number": number}


def make_prompts(settings: TextArenaSettings) -> Prompts:
    # The first observation gives the rules of the game.
    env = TextArenaEnv(settings)
    rules = RULES_ALONE if env.seat_count == 1 else RULES_AGAINST
    example = env.game_entry.example
    return ChatPrompts(rules, example, list_actions=settings.list_actions, keep_first=True)


PACKAGE = EnvPackage(
    name=NAME,
    settings=TextArenaSettings,
    make=TextArenaEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    project=project_action,
    variants=games.listed_games,
    unlisted=games.unlisted_games,
    remarks=games.game_remarks,
)
