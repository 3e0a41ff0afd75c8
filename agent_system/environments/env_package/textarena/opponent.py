"""Opponents of the policy in games for two: random or user-provided.

The random opponent knows no rules. It takes moves in brackets from the texts that it has read and
replaces digits and single letters in them. It tries the results on a copy of the game until one is
accepted.
"""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

from agent_system.environments.env_package.textarena.settings import TextArenaSettings
from agent_system.environments.random_moves import find_moves, vary_move
from agent_system.reward_manager.custom import load_function

# Maps the text since the last move, and a random generator, to a move.
Opponent = Callable[[str, random.Random], str]
# Errors of games for moves that they cannot read.
GAME_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
TRIES = 60  # maximum number of moves tried on a copy
FALLBACK_MOVE = "I see. What do you offer?"  # move if no text so far contains one in brackets


def load_opponent(settings: TextArenaSettings) -> Opponent | None:
    """Load the user-provided opponent. Return None if there is none."""
    user_function = settings.opponent
    if user_function.path is None:
        return None
    return load_function(user_function.path, user_function.name or "move", "env.textarena.opponent")


def random_move(game: Any, received_texts: Sequence[str], rng: random.Random) -> str:
    """Return a random move for the seat whose turn it is.

    ``read`` are all texts that this seat has received. The game accepts the move, unless ``TRIES``
    random moves in a row were refused.
    """
    example_moves = list(
        dict.fromkeys(move for text in received_texts for move in find_moves(text))
    )
    if not example_moves:
        return FALLBACK_MOVE
    move = ""
    for _ in range(TRIES):
        move = vary_move(rng.choice(example_moves), rng)
        if is_accepted(game, move):
            break
    return move


def is_accepted(game: Any, move: str) -> bool:
    """Return True if ``game`` accepts ``move``. It is tried on a copy of the game."""
    game_copy = copy.deepcopy(game)
    seat = game_copy.state.current_player_id
    # The copy must not change the random state of the game.
    random_state = random.getstate()
    try:
        game_copy.step(move)
    except GAME_ERRORS:
        return False
    finally:
        random.setstate(random_state)
    return not is_rule_violated(game_copy.state, seat)


def is_rule_violated(state: Any, seat: int) -> bool:
    """Return True if the game refused the last move of ``seat``, or ended because of it."""
    refused = state.error_count > 0 and state.current_player_id == seat
    return bool(refused or state.game_info[seat]["invalid_move"])
