"""Games of TextArena: four puzzles, and all other games by name.

The four puzzles (``GAMES``) have their own settings in ``env.textarena``. They need no download,
have many different starts, and are deterministic after the start. All other games have the settings
with which TextArena registers them, without its wrappers. ``games.yaml`` contains facts about them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl.config.settings.errors import UserError
from verl.config.settings.hints import did_you_mean
from verl.utils.files import read_yaml_table

RAW_SUFFIX = "-raw"  # suffix of TextArena's names for games without wrappers
_TABLES = read_yaml_table(__file__, "games.yaml")
EXCLUDED_GAMES: dict[str, str] = _TABLES["excluded"]
SUCCESSFUL_CONSTANT_MOVES: dict[str, tuple[str, int, int]] = _TABLES["constant_moves"]
GAMES_WITHOUT_RANDOM_OPPONENT: tuple[str, ...] = tuple(_TABLES["scripted_only"])


@dataclass(frozen=True)
class GameDescription:
    """One game of TextArena.

    ``options`` are the names of the settings that the game uses. ``state`` is a key of TextArena's
    game state, whose value is the anchor. If ``state`` is "", the text of an observation is the
    anchor.
    """

    env_id: str
    options: Sequence[str] = ()
    state: str = ""
    example: str = "[your move]"  # example of a move
    example_moves: str = ""  # moves that the random opponent varies, if the rules show none
    max_turns: int | None = None  # number of valid moves after which the game ends; replaces null
    # Function that returns the moves that a TextArena game accepts.
    list_moves: Callable[[Any], list[str]] | None = None


def _list_possible_guesses(game: Any) -> list[str]:
    return [
        str(number)
        for number in range(game.min_number, game.max_number + 1)
        if number not in game.guessed_numbers
    ]


def _list_directions(game: Any) -> list[str]:
    row, column = game.state.game_state["player_pos"]
    valid_indices = range(game.size)
    return [
        name
        for name, (row_offset, column_offset) in game.actions.items()
        if row + row_offset in valid_indices and column + column_offset in valid_indices
    ]


def _list_switches(game: Any) -> list[str]:
    return [f"{row} {column}" for row in range(game.size) for column in range(game.size)]


# Mastermind is missing: its hundreds of possible codes would fill most of a prompt.
_MOVE_LISTERS = {
    "GuessTheNumber": _list_possible_guesses,
    "FrozenLake": _list_directions,
    "LightsOut": _list_switches,
}
GAMES: dict[str, GameDescription] = {
    name: GameDescription(
        f"{name}-v0-raw", max_turns=20, list_moves=_MOVE_LISTERS.get(name), **fields
    )
    for name, fields in _TABLES["puzzles"].items()
}


def get_game_description(name: str) -> GameDescription:
    """Return the game with this name. Raises ``ValueError`` if it is not available."""
    if name in GAMES:
        return GAMES[name]
    reason = next(
        (reason for prefix, reason in EXCLUDED_GAMES.items() if name.startswith(prefix)), ""
    )
    game_names = list_games()
    if reason or name not in game_names:
        raise UserError(
            f"env.textarena.game={name!r}: {reason or 'TextArena has no such game'}"
            f"{did_you_mean(name, game_names)}; allowed: {', '.join(game_names)}; "
            "fix: env.textarena.game=GuessTheNumber",
            "unknown_name",
        )
    base_name = name.partition("-")[0]
    return GameDescription(
        name + RAW_SUFFIX, example_moves=_TABLES["move_hints"].get(base_name, "")
    )


def list_games() -> list[str]:
    """Return the names of all available games. Needs textarena."""
    from textarena.envs.registration import ENV_REGISTRY

    available_names = [
        name.removesuffix(RAW_SUFFIX) for name in ENV_REGISTRY if name.endswith(RAW_SUFFIX)
    ]
    excluded_prefixes = tuple(EXCLUDED_GAMES)
    return [
        *GAMES,
        *sorted(name for name in available_names if not name.startswith(excluded_prefixes)),
    ]


def list_variants() -> list[str]:
    """Return the available games without those of ``explain_unlisted_games``."""
    return [name for name in list_games() if not _explain_unlisted(name)]


def explain_unlisted_games() -> dict[str, str]:
    """Return the reason of each available game that the command ``list`` omits."""
    return {name: reason for name in list_games() if (reason := _explain_unlisted(name))}


def list_game_remarks() -> dict[str, str]:
    """Return a remark for each game in which the same move in all turns often succeeds."""
    return {
        name: f"the constant move {move} solves {success_count} of {episode_count} episodes "
        "against random moves"
        for name, (move, success_count, episode_count) in SUCCESSFUL_CONSTANT_MOVES.items()
    }


def _explain_unlisted(name: str) -> str:
    if name.startswith(GAMES_WITHOUT_RANDOM_OPPONENT):
        return "it does not accept random moves: it needs a user-provided opponent"
    if name.startswith(tuple(_TABLES["trivial"])):
        return "an empty policy solves some episodes, because its opponent makes random errors"
    if name in _TABLES["duplicates"]:
        return f"it is the same game as {_TABLES['duplicates'][name]}"
    return ""
