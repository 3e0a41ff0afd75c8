"""Games of TextArena: four with settings in ``env.textarena``, and all others by name.

The four need no download, have many different starts, and are deterministic after the start. The
others are used as TextArena registers them, without its wrappers.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.config.settings.hints import did_you_mean

RAW_SUFFIX = "-raw"  # suffix of TextArena's names for games without wrappers
_KEY = "it calls a language model over the network"
_WORDS = "it needs a download of word lists"
_IMPORT = "its module cannot be imported with Python 3.11"
_FILES = "TextArena does not include its files"
_MANY = "it needs more than two players"
_SLOW = "a start takes seconds to minutes"
# Prefixes of names, and the reason why the game is not available.
EXCLUDED_GAMES: dict[str, str] = {
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
    "Stratego": "a move can make it fail",
    "Sudoku-v0-hard": _SLOW,
    "Taboo": _MANY,
    "ThreePlayer": _MANY,
    "TwentyQuestions": _KEY,
    "UltimateTexasHoldem": _IMPORT,
    "UsedCar": _FILES,
    "Word": _WORDS,
}


# Games in which a constant move usually succeeds against a random opponent: the move, the number of
# successes and the number of episodes. Such games need a user-provided opponent.
CONSTANT_MOVES: dict[str, tuple[str, int, int]] = {
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
DUPLICATE_NAMES = {"PigDice-v0-100": "PigDice-v0", "PigDice-v0-500": "PigDice-v0-long"}
TRIVIAL_GAMES = ("SimpleBlindAuction", "TruthAndDeception")


@dataclass(frozen=True)
class Game:
    """One game of TextArena.

    ``options`` are the names of its settings. ``state`` is the key of the game state that is the
    anchor. If it is empty, the text of an observation is the anchor.
    """

    env_id: str
    options: tuple[str, ...] = ()
    state: str = ""
    example: str = "[your move]"
    hints: str = ""  # examples of moves for the random opponent, if the rules show none
    # Values that are used for settings with the value null.
    defaults: Mapping[str, int] = field(default_factory=dict)
    # Maps TextArena's game to the moves that it accepts.
    moves: Callable[[Any], list[str]] | None = None


class _NumberGame(Protocol):
    """Attributes of GuessTheNumber that list its numbers."""

    min_number: int
    max_number: int
    guessed_numbers: Collection[int]


class _SquareGame(Protocol):
    """Attribute of games on a square board."""

    size: int


class _LakeGame(_SquareGame, Protocol):
    """Attributes of FrozenLake. ``actions`` maps names to (down, right)."""

    actions: Mapping[str, tuple[int, int]]
    state: Any


def _possible_guesses(game: _NumberGame) -> list[str]:
    return [
        str(n) for n in range(game.min_number, game.max_number + 1) if n not in game.guessed_numbers
    ]


def _possible_directions(game: _LakeGame) -> list[str]:
    row, column = game.state.game_state["player_pos"]
    board_cells = {(r, c) for r in range(game.size) for c in range(game.size)}
    return [
        name
        for name, (down, right) in game.actions.items()
        if (row + down, column + right) in board_cells
    ]


def _possible_switches(game: _SquareGame) -> list[str]:
    return [f"{row} {column}" for row in range(game.size) for column in range(game.size)]


# Games whose move format the random opponent cannot produce. They need a user-provided opponent.
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
MOVE_HINTS = {
    "Briscola": "[play 1]",
    "Chopsticks": "[attack 0 1] [attack 1 0] [attack 0 0] [attack 1 1]",
    "GermanWhist": "[play 1]",
    "Golf": "[draw] [take] [discard] [swap 0 1]",
    "IteratedTwoThirdsAverage": "[30]",
    "Othello": "[2 3]",
}
DEFAULT_TURNS = {"max_turns": 20}
GAMES: dict[str, Game] = {
    "GuessTheNumber": Game(
        "GuessTheNumber-v0-raw",
        ("max_number", "max_turns"),
        state="guess_history",
        example="[7]",
        defaults=DEFAULT_TURNS,
        moves=_possible_guesses,
    ),
    "FrozenLake": Game(
        "FrozenLake-v0-raw",
        ("size", "num_holes"),
        state="player_pos",
        example="[right]",
        defaults=DEFAULT_TURNS,
        moves=_possible_directions,
    ),
    "LightsOut": Game(
        "LightsOut-v0-raw",
        ("size", "max_turns"),
        state="grid",
        example="[0 1]",
        defaults=DEFAULT_TURNS,
        moves=_possible_switches,
    ),
    # The prompts list no moves: hundreds of possible codes would fill most of the prompt.
    "Mastermind": Game(
        "Mastermind-v0-raw",
        ("code_length", "num_numbers", "max_turns"),
        state="history",
        example="[2 1 4 5]",
        defaults=DEFAULT_TURNS,
    ),
}  # fmt: skip


def game_of(name: str) -> Game:
    """Return the game of this name. Raises ``ValueError`` if it is not available."""
    if name in GAMES:
        return GAMES[name]
    why = next((why for prefix, why in EXCLUDED_GAMES.items() if name.startswith(prefix)), "")
    game_names = list_games()
    if why or name not in game_names:
        raise ValueError(
            f"env.textarena.game={name!r}: {why or 'TextArena has no such game'}"
            f"{did_you_mean(name, game_names)}; allowed: {', '.join(game_names)}; "
            "fix: env.textarena.game=GuessTheNumber"
        )
    stem = name.partition("-")[0]
    return Game(name + RAW_SUFFIX, hints=MOVE_HINTS.get(stem, ""))


def list_games() -> list[str]:
    """Return the names of all available games. Raises ``ModuleNotFoundError``."""
    from textarena.envs.registration import ENV_REGISTRY

    raw_names = sorted(
        name.removesuffix(RAW_SUFFIX) for name in ENV_REGISTRY if name.endswith(RAW_SUFFIX)
    )
    return [*GAMES, *(name for name in raw_names if not name.startswith(tuple(EXCLUDED_GAMES)))]


def listed_games() -> list[str]:
    """Return the names of all available games except those of ``unlisted_games``.

    They need no user-provided opponent, and no constant move usually succeeds in them.
    """
    return [name for name in list_games() if not _why_unlisted(name)]


def unlisted_games() -> dict[str, str]:
    """Return the available games that are not listed, with the reasons."""
    return {name: why for name in list_games() if (why := _why_unlisted(name))}


def game_remarks() -> dict[str, str]:
    """Return a remark for each game in which a constant move usually succeeds."""
    return {
        name: f"the constant move {move} solves {count} of {total} episodes against random moves"
        for name, (move, count, total) in CONSTANT_MOVES.items()
    }


def _why_unlisted(name: str) -> str:
    if name.startswith(SCRIPTED_ONLY):
        return "it does not accept random moves: it needs a user-provided opponent"
    if name.startswith(TRIVIAL_GAMES):
        return "an empty policy solves some episodes, because its opponent makes random errors"
    if name in DUPLICATE_NAMES:
        return f"it is the same game as {DUPLICATE_NAMES[name]}"
    return ""
