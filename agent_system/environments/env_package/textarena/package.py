"""TextArena: games for one, and games for two against a random or user-provided opponent.

A task is the start of a game. In games for two, the policy moves first in every second task. For
the four puzzles, a hash of the start determines the split: one start in four belongs to validation.
For other games, the splits use different seeds. After the start, all randomness depends on the
environment seed, also that of the opponent.
"""

import contextlib
import json
import math
import random
from collections.abc import Iterator
from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts
from agent_system.environments.env import Env, Observation, Prompts, Step, Task
from agent_system.environments.env_package.textarena import games, opponent
from agent_system.environments.env_package.textarena.settings import TextArenaSettings
from agent_system.environments.package import EnvPackage
from agent_system.environments.tasks import get_task_number_range, hash_json
from agent_system.reward_manager.scores import is_full_score
from verl.utils.seeds import derive_seed, preserve_random_state

NAME = "textarena"
RULES_ALONE = """\
You play a puzzle in text, alone. Its rules come first; each turn you see what your last move \
did. Write one move a turn, in square brackets, inside the action tags. A move against the \
rules is refused; two in a row end the game."""
RULES_AGAINST_OPPONENT = """\
You play a game in text against an opponent. Its rules come first; each turn you see what \
happened since your last one. Write one move a turn, as the rules say, inside the action tags. A \
move against the rules is refused; two in a row lose the game."""
STARTS_PER_TASK = 20  # random starts per task: small games repeat starts, and tasks must differ
MAX_OPPONENT_MOVES = 50  # maximum number of opponent moves between two moves of the policy


class TextArenaEnv(Env):
    """Environment with reward 1.0 for success, else 0.0. ``info["score"]`` is TextArena's reward.

    TextArena's reward is not used for training, because it can be positive without success, even
    after a violation of the rules.
    """

    # Default placement, which the four puzzles use. ``TextArenaSettings.chosen_placement`` selects
    # ``process`` for all other games.
    placement = "inline"

    def __init__(self, settings: TextArenaSettings) -> None:
        import textarena

        self._make_textarena_game = textarena.make
        self.settings = settings
        self.game_description = games.get_game_description(settings.game)
        self.max_turns = settings.max_turns or self.game_description.max_turns
        option_values = {**dict(settings), "max_turns": self.max_turns}
        self._game_options = {key: option_values[key] for key in self.game_description.options}
        self.opponent = opponent.load_opponent(settings)
        self.game: Any = None
        self.seat = 0
        self._opponent_rng = random.Random()
        self._game_random_state: Any = None  # state of Python's generator in this game
        self._opponent_texts: list[str] = []  # all texts that the opponent has received
        self.turn_count = 0
        self.seat_count = self._count_seats()

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start ``task``. ``seed`` determines all randomness after the start."""
        self.seat = task["number"] % self.seat_count
        self.turn_count = 0
        self._opponent_texts = []
        self._opponent_rng = random.Random(derive_seed(NAME, "opponent", seed))
        with self._use_game_random_state():
            # Some games draw random numbers in their constructor.
            random.seed(task["number"])
            self.game = self._make_textarena_game(
                self.game_description.env_id, **self._game_options
            )
            self.game.reset(num_players=self.seat_count, seed=task["number"])
            random.seed(derive_seed(NAME, "chance", seed))
            self._apply_opponent_moves()
        return self._make_observation("")

    def step(self, action: str) -> Step:
        """Apply ``action``, with or without brackets.

        The episode is done when TextArena ends it or after ``max_turns`` valid moves.
        """
        # Add brackets if the policy forgot them: TextArena reads only moves in brackets.
        move = action if "[" in action else f"[{action}]"
        with self._use_game_random_state():
            try:
                self.game.step(move)
            except opponent.GAME_ERRORS:
                # End the episode: after this error the state of the game may be inconsistent.
                info = {"won": False, "is_action_valid": False, "score": 0.0}
                observation = Observation("The game cannot read this move: it is lost.", info=info)
                return observation, 0.0, True, info
            state = self.game.state
            # The first invalid move is refused. A second one in a row ends the game.
            is_violation = opponent.is_rule_violated(state, self.seat)
            self.turn_count += not is_violation
            if not is_violation:
                self._apply_opponent_moves()
        is_over = state.done
        score = _convert_score((state.rewards or {}).get(self.seat)) if is_over else 0.0
        won = is_over and not is_violation and self._is_success(score)
        done = is_over or self.turn_count >= (self.max_turns or self.turn_count + 1)
        observation = self._make_observation(
            state.game_info[self.seat].get("reason") or "" if is_over else ""
        )
        observation.info |= {"won": won, "is_action_valid": not is_violation, "score": score}
        return observation, float(won), done, observation.info

    def compute_start_hash(self) -> str:
        """Return a hash (12 hexadecimal digits) of the state after ``reset``."""
        return hash_json(self.game.state.game_state, digest_size=6)

    def _count_seats(self) -> int:
        with self._use_game_random_state():
            try:
                self._make_textarena_game(self.game_description.env_id, **self._game_options).reset(
                    num_players=2, seed=0
                )
            except (AssertionError, ValueError, ZeroDivisionError):
                return 1  # games with one seat raise these errors if they start with two
        return 2

    @contextlib.contextmanager
    def _use_game_random_state(self) -> Iterator[None]:
        """Set Python's global random generator to the state of this game for a ``with`` block.

        TextArena seeds and uses the global generator. The game and all other code must not affect
        the random numbers of each other.
        """
        # Hide messages that some games print.
        with preserve_random_state(), contextlib.redirect_stdout(None):
            if self._game_random_state is not None:
                random.setstate(self._game_random_state)
            yield
            self._game_random_state = random.getstate()

    def _apply_opponent_moves(self) -> None:
        state = self.game.state
        for _ in range(MAX_OPPONENT_MOVES):
            if state.done or state.current_player_id == self.seat:
                return
            text = _join_messages(self.game.get_observation()[1], state.current_player_id)
            self._opponent_texts.append(text)
            if self.opponent is not None:
                move = self.opponent(text, self._opponent_rng)
            else:
                move = opponent.draw_move(
                    self.game,
                    [*self._opponent_texts, self.game_description.example_moves],
                    self._opponent_rng,
                )
            self.game.step(move)

    def _is_success(self, score: float) -> bool:
        if self.seat_count == 1:
            return is_full_score(score)
        return score > 0.0 and score == max(map(_convert_score, self.game.state.rewards.values()))

    def _make_observation(self, last_message: str) -> Observation:
        state = self.game.state
        # Read the messages for the policy's seat, even if the game ended on the opponent's turn.
        state.current_player_id = self.seat
        _, messages = self.game.get_observation()
        text = "\n".join([_join_messages(messages, self.seat), last_message]).strip()
        info: dict[str, Any] = {"won": False}
        if self.game_description.list_moves is not None:
            info["admissible_actions"] = [
                f"[{move}]" for move in self.game_description.list_moves(self.game)
            ]
        state_key = (
            json.dumps(state.game_state[self.game_description.state])
            if self.game_description.state
            else None
        )
        return Observation(text, anchor=state_key, info=info)


def _convert_score(reward: Any) -> float:
    """Return a reward of TextArena as a finite number, or 0.0: some games return a text."""
    is_number = isinstance(reward, int | float) and math.isfinite(reward)
    return float(reward) if is_number else 0.0


def _join_messages(messages: list[tuple[int, str, Any]], seat: int) -> str:
    """Join all messages except those of side ``seat``, which are turns of the policy."""
    return "\n".join(str(text).strip() for writer_seat, text, _ in messages if writer_seat != seat)


def list_tasks(settings: TextArenaSettings, split: str) -> list[Task]:
    """Return one task per distinct start, up to ``train_games`` or ``val_games``."""
    games.get_game_description(settings.game)
    if settings.game not in games.GAMES:
        task_numbers = get_task_number_range(split, settings.train_games, settings.val_games)
        return [_make_task(settings, number, str(number)) for number in task_numbers]
    env = TextArenaEnv(settings)
    task_count = settings.val_games if split == "val" else settings.train_games
    tasks_by_hash: dict[str, Task] = {}
    for start_number in range(STARTS_PER_TASK * task_count):
        try:
            env.reset({"number": start_number})
        except ZeroDivisionError:
            # Skip the start: LightsOut divides by the number of lights that are on, which may be 0.
            continue
        start_hash = env.compute_start_hash()
        # The content of a start determines its split: different numbers often give the same start.
        if (int(start_hash, 16) % 4 == 0) == (split == "val"):
            tasks_by_hash.setdefault(start_hash, _make_task(settings, start_number, start_hash))
        if len(tasks_by_hash) == task_count:
            break
    return list(tasks_by_hash.values())


def _make_task(settings: TextArenaSettings, number: int, start_hash: str) -> Task:
    data_source = f"{NAME}/{settings.game}"
    return {"task_id": f"{data_source}/{start_hash}", "data_source": data_source, "number": number}


def make_prompts(settings: TextArenaSettings) -> Prompts:
    # The rules of the game itself are part of the first observation.
    env = TextArenaEnv(settings)
    rules = RULES_ALONE if env.seat_count == 1 else RULES_AGAINST_OPPONENT
    example = env.game_description.example
    return ChatPrompts(rules, example, list_actions=settings.list_actions, keep_first=True)


PACKAGE = EnvPackage(
    name=NAME,
    settings=TextArenaSettings,
    make=TextArenaEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    variants=games.list_variants,
    unlisted=games.explain_unlisted_games,
    remarks=games.list_game_remarks,
)
