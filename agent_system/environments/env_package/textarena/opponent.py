"""Who plays the other seat of a game for two.

The random opponent knows no rules. It takes the moves in brackets that it has read, exchanges
digits and single letters in them, and tries them on a copy of the game until one is accepted.
"""

import copy
import random
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from agent_system.environments.env_package.textarena.settings import TextArenaSettings
from agent_system.reward_manager.custom import load_function

# What was read since the last move, and a generator to draw from -> a move.
Opponent = Callable[[str, random.Random], str]
_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")
_PARTS = re.compile(r"\d+|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])")
# What games raise on moves that they cannot read.
UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
TRIES = 60  # moves tried on a copy
FREE = "I see. What do you offer?"  # said where no move was ever shown


def scripted(settings: TextArenaSettings) -> Opponent | None:
    """The opponent of the user's own; None where the random one plays."""
    own = settings.opponent
    if own.path is None:
        return None
    return load_function(own.path, own.name or "move", "env.textarena.opponent")


def random_move(game: Any, read: Sequence[str], dice: random.Random) -> str:
    """A move that ``game`` accepts from the player whose turn it is, if one is found among
    ``TRIES``; ``read`` is all that this player has read.
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
    """Whether ``game`` takes ``move`` as a valid one; the game stays as it is."""
    tried = copy.deepcopy(game)
    player = tried.state.current_player_id
    # What the copy draws must not be missing in the game.
    before = random.getstate()
    try:
        tried.step(move)
    except UNREADABLE:
        return False
    finally:
        random.setstate(before)
    return not broken_rule(tried.state, player)


def broken_rule(state: Any, player: int) -> bool:
    """Whether the last move of ``player`` was refused, or has ended the game by being so."""
    refused = state.error_count > 0 and state.current_player_id == player
    return bool(refused or state.game_info[player]["invalid_move"])


def _varied(move: str, dice: random.Random) -> str:
    def other(part: re.Match[str]) -> str:
        old = part.group()
        if old.isdigit():
            return str(dice.randrange(max(10, 2 * int(old))) if int(old) < 10**6 else int(old))
        letters = string.ascii_lowercase[:8]
        return dice.choice(letters if old.islower() else letters.upper())

    # As it was shown in one of three cases: a word like [check] has nothing to exchange.
    return move if dice.random() < 1 / 3 else _PARTS.sub(other, move)
