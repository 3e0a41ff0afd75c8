"""Doors, the puzzles of the environment ``relay``.

A door has a cycle of places, with one arrow from each place to the next. It also has a start place
and a number of arrows to follow. The arrows are listed in random order. Its short text is
``d+3 a>b f>c ...``: follow three arrows from ``d``. Observations describe a door in sentences.
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
from agent_system.environments.tasks import make_task_ids_unique
from verl.utils.seeds import derive_seed

NAME = "relay"
VAL_DIVISOR = 4  # one door (puzzle) in four belongs to the validation split
_DOOR_PATTERN = re.compile(
    r"Door \d+ of \d+\. Arrows: (.*)\. You are at ([a-z])\. Go (\d+) arrows on\."
)


@dataclass(frozen=True, slots=True)
class DoorPuzzle:
    """Puzzle: find the place that is ``hops`` arrows after the start ``place``.

    ``arrows`` (``a>b``) are in the order in which observations show them, which is random.
    """

    place: str
    hops: int
    arrows: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}+{self.hops} {' '.join(self.arrows)}"

    @classmethod
    def parse(cls, text: str) -> "DoorPuzzle":
        """Parse the short text of a puzzle, such as ``d+3 a>b f>c``."""
        question, *arrows = text.split()
        place, hops = question.split("+")
        return cls(place, int(hops), tuple(arrows))

    @property
    def all_places(self) -> list[str]:
        return sorted(arrow[0] for arrow in self.arrows)

    @property
    def answer_place(self) -> str:
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
        """Text that identifies the puzzle, used as anchor (GiGPO).

        Puzzles that differ only in the order of their arrows have the same text.
        """
        path = [self.place, *self.follow_arrows(self.place, len(self.arrows) - 1)]
        return f"{'>'.join(path)}+{self.hops}"

    @property
    def is_validation(self) -> bool:
        """True if the puzzle belongs to the validation split, by a hash of its text."""
        return zlib.crc32(str(self).encode()) % VAL_DIVISOR == 0


def compute_needed_level(arrow_count: int, hops_by_level: Sequence[int]) -> int:
    """Return the lowest thinking level (1 to 4) that suffices to follow ``arrow_count`` arrows.

    ``hops_by_level`` are the numbers of arrows that a thought of each level follows. The action
    follows the last arrow, so the thought must follow at least ``arrow_count - 1``. Example: with
    (0, 2, 4, 7), 3 arrows need level 2 and 4 arrows need level 3.
    """
    for level, level_hops in enumerate(hops_by_level, start=1):
        if arrow_count <= level_hops + 1:
            return level
    return len(hops_by_level)


def describe_door(door: DoorPuzzle, door_number: int, door_count: int) -> str:
    return (
        f"Door {door_number} of {door_count}. Arrows: {' '.join(door.arrows)}. "
        f"You are at {door.place}. Go {door.hops} arrows on."
    )


def parse_door(text: str) -> DoorPuzzle:
    """Parse the puzzle that an observation describes. Raises ``ValueError`` without one."""
    match = _DOOR_PATTERN.search(text)
    if match is None:
        raise ValueError(f"text {text!r}: expected 'Door N of N. Arrows: ...'")
    arrows, place, hops = match.groups()
    return DoorPuzzle(place, int(hops), tuple(arrows.split()))


def shorten_observation(text: str) -> str:
    """Replace the sentences that describe a door by their short form ``d+3 a>b f>c ...``.

    ``d+3`` means: start at place d and follow three arrows. ``a>b`` is an arrow from a to b.
    """
    match = _DOOR_PATTERN.search(text)
    return text if match is None else f"{text[: match.start()]}{parse_door(text)}"


def compute_hop_weights(settings: RelaySettings) -> list[float] | None:
    """Return the relative frequency of each number of arrows, or None if all are equally likely.

    ``settings.level_weights`` are the relative frequencies of the thinking levels that doors
    require. Numbers of arrows that require the same level are equally likely. Example: weights 4,
    2, 1, 1 for hops 0, 2, 4, 7 give 2, 2, 1, 1, 0.5, 0.5, 0.5, 0.5.
    """
    if settings.level_weights is None:
        return None
    needed_levels = [
        compute_needed_level(count, settings.hops) for count in range(settings.hops[-1] + 1)
    ]
    return [
        settings.level_weights[level - 1] / needed_levels.count(level) for level in needed_levels
    ]


def generate_doors(
    settings: RelaySettings, task_set: str, min_places: int | None = None
) -> Iterator[DoorPuzzle]:
    """Yield an endless sequence of random doors (puzzles) of ``task_set``.

    ``generate_tasks`` explains ``task_set`` and ``min_places``.
    """
    rng = random.Random(derive_seed(NAME, settings.task_seed, task_set))
    letters = string.ascii_lowercase[: settings.places]
    max_hops = settings.hops[-1]
    hop_weights = compute_hop_weights(settings)
    while True:
        cycle = rng.sample(letters, rng.randint(min_places or settings.places, settings.places))
        # The first arrow starts at the last place (index -1), which closes the cycle.
        arrows = [f"{cycle[place_index - 1]}>{place}" for place_index, place in enumerate(cycle)]
        rng.shuffle(arrows)
        start_place = rng.choice(cycle)
        if hop_weights is None:
            hops = rng.randint(0, max_hops)
        else:
            hops = rng.choices(range(max_hops + 1), hop_weights)[0]
        door = DoorPuzzle(start_place, hops, tuple(arrows))
        if door.is_validation == (task_set == "val"):
            yield door


def list_tasks(settings: RelaySettings, split: str) -> list[Task]:
    """Return the tasks of ``split``. The splits share no door (puzzle).

    With few places and doors per episode, several tasks have the same doors.
    """
    count = settings.val_tasks if split == "val" else settings.train_tasks
    return make_task_ids_unique(generate_tasks(settings, split, count, settings.doors))


def generate_tasks(
    settings: RelaySettings,
    task_set: str,
    task_count: int,
    doors_per_task: int,
    min_places: int | None = None,
) -> list[Task]:
    """Return ``task_count`` tasks with ``doors_per_task`` random doors each.

    ``task_set`` is a split or the name of another set of tasks. Together with
    ``settings.task_seed`` it determines the doors. The set ``val`` has validation doors, all others
    have training doors. The arrows of a door form a cycle of ``min_places`` (default:
    ``settings.places``) to ``settings.places`` places.
    """
    drawn_doors = generate_doors(settings, task_set, min_places)
    tasks = []
    for _ in range(task_count):
        door_texts = [str(door) for door in islice(drawn_doors, doors_per_task)]
        digest = hashlib.blake2b("\n".join(door_texts).encode(), digest_size=8).hexdigest()
        tasks.append({"task_id": f"{NAME}/{digest}", "data_source": NAME, "doors": door_texts})
    return tasks
