"""Opponents of the policy in games for two: random or user-provided.

The random opponent knows no rules. It takes moves in brackets from the texts that it has received,
and replaces digits and single letters in them at random. It tries such moves on a copy of the game
until the copy accepts one.
"""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

from agent_system.environments.env_package.textarena.settings import TextArenaSettings
from agent_system.environments.random_moves import find_bracketed_moves, vary_move
from agent_system.reward_manager.custom import load_function
from verl.utils.seeds import preserve_random_state

# Function that maps the text since the last move, and a random generator, to a move.
Opponent = Callable[[str, random.Random], str]
# Errors that games raise for moves that they cannot read.
GAME_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
MAX_DRAWN_MOVES = 60  # maximum number of moves that are tried on a copy of the game
FALLBACK_MOVE = "I see. What do you offer?"  # used if no received text contains a move in brackets


def load_opponent(settings: TextArenaSettings) -> Opponent | None:
    """Load the user-provided opponent. Return None if there is none."""
    user_function = settings.opponent
    if user_function.path is None:
        return None
    return load_function(user_function.path, user_function.name or "move", "env.textarena.opponent")


def draw_move(game: object, received_texts: Sequence[str], rng: random.Random) -> str:
    """Return a random move for the side of the game whose turn it is.

    It varies an example of a move in ``received_texts``, the texts that this side has received.
    ``game`` accepts it, unless there is no example or ``game`` refused ``MAX_DRAWN_MOVES`` moves.
    """
    example_moves = list(
        dict.fromkeys(move for text in received_texts for move in find_bracketed_moves(text))
    )
    if not example_moves:
        return FALLBACK_MOVE
    move = ""
    for _ in range(MAX_DRAWN_MOVES):
        move = vary_move(rng.choice(example_moves), rng)
        if is_move_accepted(game, move):
            break
    return move


def is_move_accepted(game: Any, move: str) -> bool:
    """Return True if a copy of ``game`` accepts ``move``."""
    game_copy = copy.deepcopy(game)
    seat = game_copy.state.current_player_id
    with preserve_random_state():  # the copy may draw random numbers
        try:
            game_copy.step(move)
        except GAME_ERRORS:
            return False
    return not is_rule_violated(game_copy.state, seat)


def is_rule_violated(state: Any, seat: int) -> bool:
    """Return True if the game refused the last move of side ``seat``, or ended because of it."""
    is_refused = state.error_count > 0 and state.current_player_id == seat
    return bool(is_refused or state.game_info[seat]["invalid_move"])
