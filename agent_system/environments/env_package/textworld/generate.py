"""Process that makes games: ``python -m ...textworld.generate FOLDER SPEC COUNTS PROCESSES``.

``store`` starts it with a fixed ``PYTHONHASHSEED``, because the generator iterates over sets. It
writes every game to ``FOLDER/<hash>.json``, with the hash of the source that the compiler reads.
The last line on standard output is JSON with the hashes of each split. No game is in two splits.
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

GAMES_PER_TASK = 4  # games generated per game that is needed, because they may be equal


def draw_game(spec: dict[str, Any], split: str, number: int) -> Any:
    """Draw game ``number`` of ``split``. ``spec`` (see ``GameStore``) determines it."""
    import textworld
    from textworld.challenges import CHALLENGES

    # TextWorld seeds NumPy's generators, which accept at most 32 bits.
    seed = derive_seed("textworld", spec["game_seed"], split, number) % 2**31
    options = textworld.GameOptions()
    options.seeds = seed
    settings = dict(spec["settings"])
    if spec["game"] == "simple":
        settings["test"] = split == "val"  # validation games contain other foods than training
    if spec["game"] == "cooking":
        # TextWorld draws a recipe only if ingredients must be taken, and otherwise refuses a seed.
        # 0 keeps the recipe fixed.
        settings |= {"recipe_seed": 1 + seed % 10_000 if settings["take"] else 0}
        # Validation games contain other foods and recipes than training games.
        settings |= {"split": "valid" if split == "val" else "train"}
    return CHALLENGES[f"tw-{spec['game']}"][1](settings, options)


def content_hash(game: Any) -> str:
    """Return a hash (16 hexadecimal digits) of the source of ``game``."""
    from textworld.generator.inform7 import generate_inform7_source

    return hashlib.blake2b(generate_inform7_source(game).encode(), digest_size=8).hexdigest()


def write_game(job: tuple[str, int], spec: dict[str, Any], folder: Path) -> str:
    """Draw the game of ``job`` (split, number), write it unless it exists, and return its hash."""
    from textworld.generator.game import Game

    data = draw_game(spec, *job).serialize()
    # Hash the game as it is after reading the file, which can differ from the game in memory.
    name = content_hash(Game.deserialize(data))
    path = folder / f"{name}.json"
    if not path.exists():
        # Several processes may write the same game: the files are equal.
        with atomic_write(path) as file:
            json.dump(data, file, sort_keys=True)
    return name


def make_games(
    folder: Path, spec: dict[str, Any], counts: dict[str, int], processes: int
) -> dict[str, list[str]]:
    """Write the games and return the hashes of ``counts[split]`` distinct games per split.

    There are fewer if the settings do not give as many.
    """
    hashes: dict[str, list[str]] = {}
    write = functools.partial(write_game, spec=spec, folder=folder)
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        # Validation is first in ``counts``: if there are too few games, training has fewer.
        for split, count in counts.items():
            taken_names = {name for names in hashes.values() for name in names}
            hashes[split] = _write_distinct_games(pool, write, split, count, taken_names)
    return hashes


def _write_distinct_games(
    pool: Pool,
    write: Callable[[tuple[str, int]], str],
    split: str,
    count: int,
    taken: Collection[str],
) -> list[str]:
    """Return the hashes of at most ``count`` distinct games that are not in ``taken``."""
    # A dict is used as an ordered set: the first ``count`` distinct games are kept.
    names: dict[str, None] = {}
    for first_number in range(0, GAMES_PER_TASK * count, count):
        jobs = [(split, game_number) for game_number in range(first_number, first_number + count)]
        # A game takes half a second, so larger chunks would leave processes idle at the end.
        drawn_names = pool.map(write, jobs, chunksize=1)
        names |= dict.fromkeys(name for name in drawn_names if name not in taken)
        if len(names) >= count:
            break
    return list(names)[:count]


if __name__ == "__main__":
    place, what, many, workers = sys.argv[1:]
    print(json.dumps(make_games(Path(place), json.loads(what), json.loads(many), int(workers))))
