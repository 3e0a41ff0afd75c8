"""Opponents of the policy in games for two: random or user-provided.

The random opponent knows no rules. It takes moves in brackets from the texts that it has read and
replaces digits and single letters in them. It tries the results on a copy of the game until one is
accepted.
"""

import copy
import random
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from agent_system.environments.env_package.textarena.settings import TextArenaSettings
from agent_system.reward_manager.custom import load_function

# Maps the text since the last move, and a random generator, to a move.
Opponent = Callable[[str, random.Random], str]
_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")
_PARTS = re.compile(r"\d+|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])")
# Errors of games for moves that they cannot read.
UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
TRIES = 60  # maximum number of moves tried on a copy
FREE = "I see. What do you offer?"  # move if no text has contained a move in brackets


def scripted(settings: TextArenaSettings) -> Opponent | None:
    """Load the user-provided opponent. Return None if there is none."""
    own = settings.opponent
    if own.path is None:
        return None
    return load_function(own.path, own.name or "move", "env.textarena.opponent")


def random_move(game: Any, read: Sequence[str], dice: random.Random) -> str:
    """Return a random move for the seat whose turn it is.

    ``read`` are all texts for this seat. The move is valid unless none of ``TRIES`` random moves
    was accepted.
    """
    shown = list(dict.fromkeys(move for text in read for move in _BRACKETS.findall(text)))
    if not shown:
        return FREE
    move = ""
    for _ in range(TRIES):
        move = _varied(dice.choice(shown), dice)
        if accepted(game, move):
            break
    return move


def accepted(game: Any, move: str) -> bool:
    """Return True if ``game`` accepts ``move``. The game does not change."""
    tried = copy.deepcopy(game)
    player = tried.state.current_player_id
    # The copy must not change the random state of the game.
    before = random.getstate()
    try:
        tried.step(move)
    except UNREADABLE:
        return False
    finally:
        random.setstate(before)
    return not broken_rule(tried.state, player)


def broken_rule(state: Any, player: int) -> bool:
    """Return True if the last move of a seat was refused, or ended the game as invalid."""
    refused = state.error_count > 0 and state.current_player_id == player
    return bool(refused or state.game_info[player]["invalid_move"])


def _varied(move: str, dice: random.Random) -> str:
    def other(part: re.Match[str]) -> str:
        old = part.group()
        if old.isdigit():
            return str(dice.randrange(max(10, 2 * int(old))) if int(old) < 10**6 else int(old))
        letters = string.ascii_lowercase[:8]
        return dice.choice(letters if old.islower() else letters.upper())

    # Keep the move unchanged in one of three cases.
    return move if dice.random() < 1 / 3 else _PARTS.sub(other, move)
