"""Which games of TextArena there are: four that take settings of ours, and all others by name.

The four need no download, differ from start to start and draw nothing after the start. The others
are played as TextArena registers them, without its wrappers.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.config.settings.hints import did_you_mean

RAW = "-raw"  # ends TextArena's names of games without wrappers
_KEY = "it talks to a judge over the network"
_WORDS = "it needs a download of word lists"
_IMPORT = "its module does not import with Python 3.11"
_FILES = "TextArena does not ship its files"
_MANY = "it needs more than two players"
_SLOW = "a start takes seconds to minutes"
# Beginnings of names, and why the game is not offered.
LEFT_OUT: dict[str, str] = {
    "BabyAiText": _FILES,
    "CharacterConclave": _MANY,
    "Checkers": _IMPORT,
    "Chess": _IMPORT,
    "Codenames": _MANY,
    "Debate": _KEY,
    "DontSayIt": _WORDS,
    "GuessWho": _KEY,
    "Hangman": _WORDS,
    "IteratedStagHunt": _IMPORT,
    "Klondike": _IMPORT,
    "LetterAuction": _WORDS,
    "ReverseTicTacToe": _IMPORT,
    "ScenarioPlanning": _KEY,
    "ScorableGames": _FILES,
    "SecretMafia": _MANY,
    "SettlersOfCatan": _MANY,
    "Sokoban": _SLOW,
    "SpellingBee": _WORDS,
    "Stratego": "a move can break it",
    "Sudoku-v0-hard": _SLOW,
    "Taboo": _MANY,
    "ThreePlayer": _MANY,
    "TwentyQuestions": _KEY,
    "UltimateTexasHoldem": _IMPORT,
    "UsedCar": _FILES,
    "Word": _WORDS,
}


# Games in which a move that is said in every turn wins most plays against moves at random: it, and
# how many it won of how many. They are listed with it; an opponent of the user's own may be better.
CONSTANTS: dict[str, tuple[str, int, int]] = {
    "ConnectFour-v0": ("[0]", 24, 32),
    "ConnectFour-v0-blind": ("[col 2]", 23, 32),
    "ConnectFour-v0-large": ("[col 1]", 32, 32),
    "IndianPoker-v0": ("[check]", 23, 32),
    "IndianPoker-v0-extreme": ("[check]", 27, 32),
    "IndianPoker-v0-long": ("[check]", 23, 32),
    "IndianPoker-v0-medium": ("[check]", 27, 32),
    "IndianPoker-v0-short": ("[check]", 24, 32),
    "IteratedPrisonersDilemma-v0": ("[Defect]", 32, 32),
    "IteratedTwoThirdsAverage-v0": ("[0]", 32, 32),
    "MarketEntryGame-v0": ("[E]", 32, 32),
    "MemoryGame-v0-hard": ("[0 1 1 0]", 7, 8),
    "Poker-v0": ("[Call]", 32, 32),
    "Poker-v0-long": ("[Call]", 8, 8),
    "Poker-v0-small": ("[Call]", 32, 32),
    "PublicGoodsGame-v0": ("[0]", 8, 8),
    "Surround-v0-large": ("[up]", 7, 8),
}
NAMED_TWICE = {"PigDice-v0-100": "PigDice-v0", "PigDice-v0-500": "PigDice-v0-long"}
EMPTY_WINS = ("SimpleBlindAuction", "TruthAndDeception")


@dataclass(frozen=True)
class Game:
    """``options`` are the settings that TextArena's game takes, ``state`` the key of what its
    anchor is made of; without one the text of an observation is the anchor.
    """

    env_id: str
    options: tuple[str, ...] = ()
    state: str = ""
    example: str = "[your move]"
    hints: str = ""  # moves that its rules describe and do not show, for the random opponent
    # Of our settings, where they say nothing else.
    defaults: Mapping[str, int] = field(default_factory=dict)
    moves: Callable[[Any], list[str]] | None = None  # TextArena's game -> what it would accept


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


# The random opponent finds no moves that these accept; they need one of the user's own.
SCRIPTED_ONLY = (
    "Alquerque",
    "Breakthrough",
    "ColonelBlotto",
    "LinesOfAction",
    "NewRecruit",
    "SantoriniBaseFixed",
    "Tak",
    "TwoDollar",
)
HINTS = {
    "Briscola": "[play 1]",
    "Chopsticks": "[attack 0 1] [attack 1 0] [attack 0 0] [attack 1 1]",
    "GermanWhist": "[play 1]",
    "Golf": "[draw] [take] [discard] [swap 0 1]",
    "IteratedTwoThirdsAverage": "[30]",
    "Othello": "[2 3]",
}
TURNS = {"max_turns": 20}
GAMES: dict[str, Game] = {
    "GuessTheNumber": Game(
        "GuessTheNumber-v0-raw",
        ("max_number", "max_turns"),
        state="guess_history",
        example="[7]",
        defaults=TURNS,
        moves=_guesses,
    ),
    "FrozenLake": Game(
        "FrozenLake-v0-raw",
        ("size", "num_holes"),
        state="player_pos",
        example="[right]",
        defaults=TURNS,
        moves=_ways,
    ),
    "LightsOut": Game(
        "LightsOut-v0-raw",
        ("size", "max_turns"),
        state="grid",
        example="[0 1]",
        defaults=TURNS,
        moves=_switches,
    ),
    # No list of moves: a code is one of hundreds, and to list them would be most of the prompt.
    "Mastermind": Game(
        "Mastermind-v0-raw",
        ("code_length", "num_numbers", "max_turns"),
        state="history",
        example="[2 1 4 5]",
        defaults=TURNS,
    ),
}  # fmt: skip


def game_of(name: str) -> Game:
    """The game of this name. Raises ``ValueError`` where it is not offered."""
    if name in GAMES:
        return GAMES[name]
    why = next((why for start, why in LEFT_OUT.items() if name.startswith(start)), "")
    known = names()
    if why or name not in known:
        raise ValueError(
            f"env.textarena.game={name!r}: {why or 'TextArena has no such game'}"
            f"{did_you_mean(name, known)}; allowed: {', '.join(known)}; "
            "fix: env.textarena.game=GuessTheNumber"
        )
    stem = name.partition("-")[0]
    return Game(name + RAW, hints=HINTS.get(stem, ""))


def names() -> list[str]:
    """The games that are offered. Raises ``ModuleNotFoundError`` without TextArena."""
    from textarena.envs.registration import ENV_REGISTRY

    raw = sorted(name.removesuffix(RAW) for name in ENV_REGISTRY if name.endswith(RAW))
    return [*GAMES, *(name for name in raw if not name.startswith(tuple(LEFT_OUT)))]


def playable() -> list[str]:
    """The games that need nothing further: names without those of ``unlisted``."""
    return [name for name in names() if not _why_unlisted(name)]


def unlisted() -> dict[str, str]:
    """Games that are offered and not listed, with the reason."""
    return {name: why for name in names() if (why := _why_unlisted(name))}


def remarks() -> dict[str, str]:
    """Games that a constant wins, with the constant."""
    return {
        name: f"the constant {move} wins {won} of {plays} plays against moves at random"
        for name, (move, won, plays) in CONSTANTS.items()
    }


def _why_unlisted(name: str) -> str:
    if name.startswith(SCRIPTED_ONLY):
        return "moves at random are not accepted: it needs an opponent of your own"
    if name.startswith(EMPTY_WINS):
        return "a policy that says nothing wins some plays: its opponent errs at random"
    if name in NAMED_TWICE:
        return f"it is the same game as {NAMED_TWICE[name]}"
    return ""
