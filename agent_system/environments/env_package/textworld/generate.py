"""Script that makes games: ``python -m ...textworld.generate FOLDER SPEC COUNTS PROCESSES``.

Module ``store`` starts it as a process with a fixed ``PYTHONHASHSEED``, because the generator
iterates over sets. It writes every game to ``FOLDER/<hash>.json``. The hash is that of the source
code that the compiler reads. The last line on standard output is JSON: the hashes of each split. No
game is in two splits.
"""

import functools
import hashlib
import json
import multiprocessing
import sys
from collections.abc import Callable, Collection
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from verl.utils.files import atomic_write
from verl.utils.seeds import derive_seed

GAMES_PER_TASK = 4  # maximum number of draws per game that is needed, because games may be equal


def generate_textworld_game(spec: dict[str, Any], split: str, game_number: int) -> Any:
    """Draw game ``game_number`` of ``split``.

    ``spec`` has the kind of game (``game``), ``game_seed`` and the ``settings`` of this kind.
    """
    import textworld
    from textworld.challenges import CHALLENGES

    # Use at most 31 bits, because NumPy's generators accept only seeds below 2**32.
    seed = derive_seed("textworld", spec["game_seed"], split, game_number) % 2**31
    options = textworld.GameOptions()
    options.seeds = seed
    settings = dict(spec["settings"])
    if spec["game"] == "simple":
        settings["test"] = split == "val"  # validation games contain other foods
    if spec["game"] == "cooking":
        # If no ingredients must be taken, TextWorld refuses a recipe seed. The seed must then be 0.
        settings |= {"recipe_seed": 1 + seed % 10_000 if settings["take"] else 0}
        settings |= {"split": "valid" if split == "val" else "train"}
    return CHALLENGES[f"tw-{spec['game']}"][1](settings, options)


def compute_content_hash(game: Any) -> str:
    """Return a hash (16 hexadecimal digits) of the Inform 7 source code of ``game``."""
    from textworld.generator.inform7 import generate_inform7_source

    return hashlib.blake2b(generate_inform7_source(game).encode(), digest_size=8).hexdigest()


def write_game(split_and_number: tuple[str, int], spec: dict[str, Any], folder: Path) -> str:
    """Draw a game and return its hash. Write the game to ``folder`` unless it exists there."""
    from textworld.generator.game import Game

    serialized_game = generate_textworld_game(spec, *split_and_number).serialize()
    # Hash the game as it is read from a file, which can differ from the drawn game.
    game_hash = compute_content_hash(Game.deserialize(serialized_game))
    path = folder / f"{game_hash}.json"
    if not path.exists():
        # Several processes may write the same file, because they write the same content.
        with atomic_write(path) as file:
            json.dump(serialized_game, file, sort_keys=True)
    return game_hash


def make_games(
    folder: Path, spec: dict[str, Any], counts_by_split: dict[str, int], processes: int
) -> dict[str, list[str]]:
    """Write distinct games and return their hashes by split.

    A split has fewer games than ``counts_by_split`` requests if the settings allow only few.
    """
    hashes_by_split: dict[str, list[str]] = {}
    write_numbered_game = functools.partial(write_game, spec=spec, folder=folder)
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        # Validation comes first. If there are too few games, only training has fewer.
        for split, count in counts_by_split.items():
            used_hashes = {
                game_hash for split_hashes in hashes_by_split.values() for game_hash in split_hashes
            }
            hashes_by_split[split] = _write_distinct_games(
                pool, write_numbered_game, split, count, used_hashes
            )
    return hashes_by_split


def _write_distinct_games(
    pool: Pool,
    write_numbered_game: Callable[[tuple[str, int]], str],
    split: str,
    num_games: int,
    excluded_hashes: Collection[str],
) -> list[str]:
    # Use a dict as an ordered set, so that the result is always the same.
    distinct_hashes: dict[str, None] = {}
    for first_game_number in range(0, GAMES_PER_TASK * num_games, num_games):
        splits_and_numbers = [
            (split, game_number)
            for game_number in range(first_game_number, first_game_number + num_games)
        ]
        # Use chunks of 1: a game takes half a second, and larger chunks would leave processes idle.
        drawn_hashes = pool.map(write_numbered_game, splits_and_numbers, chunksize=1)
        distinct_hashes |= dict.fromkeys(
            game_hash for game_hash in drawn_hashes if game_hash not in excluded_hashes
        )
        if len(distinct_hashes) >= num_games:
            break
    return list(distinct_hashes)[:num_games]


if __name__ == "__main__":
    folder, spec, counts, processes = sys.argv[1:]
    hashes_by_split = make_games(Path(folder), json.loads(spec), json.loads(counts), int(processes))
    print(json.dumps(hashes_by_split))
