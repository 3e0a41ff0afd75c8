"""Random moves of games whose rules are unknown: variations of the moves that a text shows.

Rules and observations usually contain examples in brackets. Numbers and single letters in them are
replaced::

    "Write a move such as [2 3] or [A4]."  ->  [2 3], [A4]  ->  [5 1], [C0], ...
"""

import random
import re
import string

_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")
_VARIABLE_TOKENS = re.compile(r"\d+|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])")


def find_bracketed_moves(text: str) -> list[str]:
    return _BRACKETS.findall(text)


def vary_move(move: str, rng: random.Random) -> str:
    """Return ``move`` with other numbers and single letters; unchanged with probability 1/3."""

    def vary_token(match: re.Match[str]) -> str:
        token = match.group()
        if token.isdigit():
            return str(rng.randrange(max(10, 2 * int(token))) if int(token) < 10**6 else int(token))
        letters = string.ascii_lowercase[:8]
        return rng.choice(letters if token.islower() else letters.upper())

    return move if rng.random() < 1 / 3 else _VARIABLE_TOKENS.sub(vary_token, move)
