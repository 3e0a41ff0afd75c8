"""The process that makes games: ``python -m ...textworld.generate FOLDER SPEC COUNTS PROCESSES``.

``store`` starts it with a fixed ``PYTHONHASHSEED``, because the generator walks over sets. Every
game is written to ``FOLDER/<hash>.json``, where the hash is that of the source the compiler will
read; a last line on standard output lists the hashes of each split. Games of one split never have
the content of another's.
"""

import functools
import hashlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

from verl.utils.seeds import derive_seed

TRIES = 4  # numbers drawn per game wanted: small settings repeat themselves


def draw(spec: dict[str, Any], split: str, number: int) -> Any:
    """Game ``number`` of ``split``: the same for the same ``spec`` (``store.spec_of`` makes it)."""
    import textworld
    from textworld.challenges import CHALLENGES

    # NumPy's generators, which TextWorld seeds with it, take at most 32 bits.
    seed = derive_seed("textworld", spec["game_seed"], split, number) % 2**31
    options = textworld.GameOptions()
    options.seeds = seed
    settings = dict(spec["settings"])
    if spec["game"] == "simple":
        settings["test"] = split == "val"  # other foods
    if spec["game"] == "cooking":
        # TextWorld draws a recipe only where some of it has to be taken, and refuses a seed
        # elsewhere; 0 keeps the recipe fixed.
        settings |= {"recipe_seed": 1 + seed % 10_000 if settings["take"] else 0}
        # Other foods, and other ways to prepare them.
        settings |= {"split": "valid" if split == "val" else "train"}
    return CHALLENGES[f"tw-{spec['game']}"][1](settings, options)


def content_hash(game: Any) -> str:
    """Hash (16 hexadecimal digits) of the source of ``game``, which determines how it plays."""
    from textworld.generator.inform7 import generate_inform7_source

    return hashlib.blake2b(generate_inform7_source(game).encode(), digest_size=8).hexdigest()


def write_game(job: tuple[str, int], spec: dict[str, Any], folder: Path) -> str:
    """Draw the game of ``job`` (split, number), write it where it is not there yet, and return its
    hash.
    """
    from textworld.generator.game import Game

    data = draw(spec, *job).serialize()
    # Hashed is what reading the file will give back, not the game in memory.
    name = content_hash(Game.deserialize(data))
    path = folder / f"{name}.json"
    if not path.exists():
        # Several processes may draw the same game at a time: each writes a file of its own, the
        # last rename wins, and all of them hold the same.
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(data, sort_keys=True))
        os.replace(temporary, path)
    return name


def make(
    folder: Path, spec: dict[str, Any], counts: dict[str, int], processes: int
) -> dict[str, list[str]]:
    """Hashes of ``counts[split]`` different games per split; fewer where the settings do not give
    as many.
    """
    found: dict[str, list[str]] = {}
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for split, count in counts.items():
            # Validation comes first in ``counts``: where games run short, training is what gets
            # fewer.
            taken = {name for names in found.values() for name in names}
            # A dictionary, for a set would lose the order of drawing, and with it which games are
            # kept.
            names: dict[str, None] = {}
            for start in range(0, TRIES * count, count):
                jobs = [(split, number) for number in range(start, start + count)]
                # One game per job: at half a second each, chunks would leave processes idle at the
                # end.
                drawn = pool.map(
                    functools.partial(write_game, spec=spec, folder=folder), jobs, chunksize=1
                )
                names |= dict.fromkeys(name for name in drawn if name not in taken)
                if len(names) >= count:
                    break
            found[split] = list(names)[:count]
    return found


if __name__ == "__main__":
    place, what, many, workers = sys.argv[1:]
    print(json.dumps(make(Path(place), json.loads(what), json.loads(many), int(workers))))
