"""Doors, the puzzles of this environment. A door is a cycle of places with one arrow from each to
the next, listed in random order, a start place, and the number of arrows to follow.

The text of a door is ``d+3 a>b f>c ...``: follow three arrows from ``d``. Observations describe it
in sentences.
"""

import hashlib
import random
import re
import string
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from agent_system.environments.env import Task
from agent_system.environments.env_package.relay.settings import RelaySettings
from verl.utils.seeds import derive_seed

NAME = "relay"
VAL_SHARE = 4  # one door in four belongs to the validation split
_DOOR = re.compile(r"Door \d+ of \d+\. Arrows: (.*)\. You are at ([a-z])\. Go (\d+) arrows on\.")


@dataclass(frozen=True, slots=True)
class Door:
    """Puzzle of following ``hops`` arrows from ``place``.

    ``arrows`` (``a>b``) are in the random order in which they are shown.
    """

    place: str
    hops: int
    arrows: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}+{self.hops} {' '.join(self.arrows)}"

    @classmethod
    def parse(cls, text: str) -> "Door":
        """Parse the text of a door, such as ``d+3 a>b f>c``."""
        question, *arrows = text.split()
        place, hops = question.split("+")
        return cls(place, int(hops), tuple(arrows))

    @property
    def all_places(self) -> list[str]:
        """All places of the cycle in alphabetical order."""
        return sorted(arrow[0] for arrow in self.arrows)

    @property
    def goal_place(self) -> str:
        """Place that is the right answer: ``hops`` arrows after ``place``."""
        return self.follow_arrows(self.place, self.hops)[-1] if self.hops else self.place

    def follow_arrows(self, place: str, count: int) -> list[str]:
        """Return the places that are 1 to ``count`` arrows after ``place``."""
        next_places = {arrow[0]: arrow[-1] for arrow in self.arrows}
        path = [place]
        for _ in range(count):
            path.append(next_places[path[-1]])
        return path[1:]

    @property
    def state(self) -> str:
        """Text that is equal for doors that differ only in the order of their arrows."""
        path = [self.place, *self.follow_arrows(self.place, len(self.arrows) - 1)]
        return f"{'>'.join(path)}+{self.hops}"

    @property
    def is_validation(self) -> bool:
        """True if the door belongs to the validation split."""
        # The split depends on a hash of the text, so it is the same in every run.
        return zlib.crc32(str(self).encode()) % VAL_SHARE == 0


def needed_level(count: int, hops: Sequence[int]) -> int:
    """Return the lowest level (from 1) whose ``hops`` suffice for ``count`` arrows.

    ``hops`` are the numbers of arrows that a thought of each level follows. It may be one fewer
    than ``count``, because the action itself follows one arrow. Example: with hops (0, 2, 4, 7), 3
    arrows need level 2 and 4 arrows need level 3.
    """
    for level, level_hops in enumerate(hops, start=1):
        if count <= level_hops + 1:
            return level
    return len(hops)


def describe_door(door: Door, number: int, doors: int) -> str:
    """Return the sentences of door ``number`` of ``doors``."""
    return (
        f"Door {number} of {doors}. Arrows: {' '.join(door.arrows)}. "
        f"You are at {door.place}. Go {door.hops} arrows on."
    )


def parse_door(text: str) -> Door:
    """Parse the sentences of a door in ``text``. Raises ``ValueError`` if there are none."""
    match = _DOOR.search(text)
    if match is None:
        raise ValueError(f"text {text!r}: expected 'Door N of N. Arrows: ...'")
    arrows, place, hops = match.groups()
    return Door(place, int(hops), tuple(arrows.split()))


def shorten_observation(text: str) -> str:
    """Return the short form of a door, ``d+3 a>b f>c ...``: the question, then the arrows."""
    match = _DOOR.search(text)
    return text if match is None else f"{text[: match.start()]}{parse_door(text)}"


def draw_doors(
    places: tuple[int, int], most_hops: int, seed: int, is_validation: bool
) -> Iterator[Door]:
    """Yield doors of one split without end, determined by ``seed``.

    ``places`` are the minimum and the maximum number of places of a cycle.
    """
    rng = random.Random(seed)
    letters = string.ascii_lowercase[: places[1]]
    while True:
        cycle = rng.sample(letters, rng.randint(*places))
        # ``cycle[-1]`` closes the cycle: the first arrow starts at the last place.
        arrows = [f"{cycle[place_index - 1]}>{place}" for place_index, place in enumerate(cycle)]
        rng.shuffle(arrows)
        door = Door(rng.choice(cycle), rng.randint(0, most_hops), tuple(arrows))
        if door.is_validation == is_validation:
            yield door


def list_tasks(settings: RelaySettings, split: str) -> list[Task]:
    """Return the episodes of ``split``. The splits have no door in common."""
    count = settings.val_tasks if split == "val" else settings.train_tasks
    return draw_tasks(settings, split, count, settings.doors)


def draw_tasks(
    settings: RelaySettings, purpose: str, count: int, doors: int, shortest: int | None = None
) -> list[Task]:
    """Return ``count`` episodes of ``doors`` doors each, drawn from ``task_seed``.

    The purpose ``val`` gets validation doors, every other purpose training doors. Cycles have
    ``shortest`` to ``settings.places`` places. None: exactly ``settings.places``.
    """
    drawn_doors = draw_doors(
        (settings.places if shortest is None else shortest, settings.places),
        settings.hops[-1],
        derive_seed(NAME, settings.task_seed, purpose),
        is_validation=purpose == "val",
    )
    tasks = []
    for _ in range(count):
        door_texts = [str(door) for door in islice(drawn_doors, doors)]
        digest = hashlib.blake2b("\n".join(door_texts).encode(), digest_size=8).hexdigest()
        tasks.append({"task_id": f"{NAME}/{digest}", "data_source": NAME, "doors": door_texts})
    return tasks
