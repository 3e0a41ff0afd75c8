"""Games of TextArena: four with settings in ``env.textarena``, and all others by name.

The four need no download, have many different starts, and are deterministic after the start. The
others are used as TextArena registers them, without its wrappers. Facts about them are in
``games.yaml``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verl.config.settings.hints import did_you_mean

RAW_SUFFIX = "-raw"  # suffix of TextArena's names for games without wrappers
_TABLES = yaml.safe_load(Path(__file__).with_name("games.yaml").read_text(encoding="utf-8"))
EXCLUDED_GAMES: dict[str, str] = _TABLES["excluded"]
CONSTANT_MOVES: dict[str, tuple[str, int, int]] = _TABLES["constant_moves"]
SCRIPTED_ONLY: tuple[str, ...] = tuple(_TABLES["scripted_only"])


@dataclass(frozen=True)
class Game:
    """One game of TextArena.

    ``options`` are the names of its settings. ``state`` is the key of the game state that is the
    anchor. If it is empty, the text of an observation is the anchor.
    """

    env_id: str
    options: Sequence[str] = ()
    state: str = ""
    example: str = "[your move]"
    hints: str = ""  # examples of moves for the random opponent, if the rules show none
    # Values that are used for settings with the value null.
    defaults: Mapping[str, int] = field(default_factory=dict)
    # Maps TextArena's game to the moves that it accepts.
    moves: Callable[[Any], list[str]] | None = None


def _possible_guesses(game: Any) -> list[str]:
    return [
        str(n) for n in range(game.min_number, game.max_number + 1) if n not in game.guessed_numbers
    ]


def _possible_directions(game: Any) -> list[str]:
    row, column = game.state.game_state["player_pos"]
    board_cells = {(r, c) for r in range(game.size) for c in range(game.size)}
    return [
        name
        for name, (down, right) in game.actions.items()
        if (row + down, column + right) in board_cells
    ]


def _possible_switches(game: Any) -> list[str]:
    return [f"{row} {column}" for row in range(game.size) for column in range(game.size)]


# The prompts of Mastermind list no moves: hundreds of possible codes would fill most of the prompt.
_POSSIBLE_MOVES = {
    "GuessTheNumber": _possible_guesses,
    "FrozenLake": _possible_directions,
    "LightsOut": _possible_switches,
}
GAMES: dict[str, Game] = {
    name: Game(
        f"{name}-v0-raw", defaults={"max_turns": 20}, moves=_POSSIBLE_MOVES.get(name), **fields
    )
    for name, fields in _TABLES["puzzles"].items()
}


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
    return Game(name + RAW_SUFFIX, hints=_TABLES["move_hints"].get(stem, ""))


def list_games() -> list[str]:
    """Return the names of all available games. Raises ``ModuleNotFoundError``."""
    from textarena.envs.registration import ENV_REGISTRY

    raw_names = [
        name.removesuffix(RAW_SUFFIX) for name in ENV_REGISTRY if name.endswith(RAW_SUFFIX)
    ]
    excluded = tuple(EXCLUDED_GAMES)
    return [*GAMES, *sorted(name for name in raw_names if not name.startswith(excluded))]


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
    if name.startswith(tuple(_TABLES["trivial"])):
        return "an empty policy solves some episodes, because its opponent makes random errors"
    if name in _TABLES["duplicates"]:
        return f"it is the same game as {_TABLES['duplicates'][name]}"
    return ""
