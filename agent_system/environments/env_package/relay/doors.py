"""A door: one cycle of arrows in mixed order, a place on it, and how many arrows to follow.

It is written ``d+3 a>b f>c ...``: from ``d``, three arrows on.
"""

import random
import string
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

VAL_SHARE = 4  # one door in four may be held out


@dataclass(frozen=True, slots=True)
class Door:
    """``arrows`` (``a>b``) in the order they are shown, which is no help in following them."""

    place: str
    hops: int
    arrows: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.place}+{self.hops} {' '.join(self.arrows)}"

    @classmethod
    def read(cls, text: str) -> "Door":
        """The door that ``text`` writes."""
        question, *arrows = text.split()
        place, hops = question.split("+")
        return cls(place, int(hops), tuple(arrows))

    @property
    def places(self) -> list[str]:
        """All places, in the order of the alphabet."""
        return sorted(arrow[0] for arrow in self.arrows)

    @property
    def goal(self) -> str:
        """The place that opens the door."""
        return self.follow(self.place, self.hops)[-1] if self.hops else self.place

    def follow(self, place: str, count: int) -> list[str]:
        """The places 1 to ``count`` arrows on from ``place``."""
        leads = {arrow[0]: arrow[-1] for arrow in self.arrows}
        way = [place]
        for _ in range(count):
            way.append(leads[way[-1]])
        return way[1:]

    @property
    def state(self) -> str:
        """The same for doors that differ in the order of their arrows alone."""
        way = [self.place, *self.follow(self.place, len(self.arrows) - 1)]
        return f"{'>'.join(way)}+{self.hops}"

    @property
    def held_out(self) -> bool:
        """Whether the door is one of those to validate on."""
        # By what it is, not by its number: the same door is on the same side in every run.
        return zlib.crc32(str(self).encode()) % VAL_SHARE == 0


def needed_level(count: int, hops: Sequence[int]) -> int:
    """The lowest level (from 1) whose ``hops`` come near enough to ``count`` arrows: the last one
    is looked up while acting.
    """
    for level, written in enumerate(hops, start=1):
        if count <= written + 1:
            return level
    return len(hops)


def draw_doors(
    places: tuple[int, int], most_hops: int, seed: int, held_out: bool
) -> Iterator[Door]:
    """Doors of one side without end, the same ones for the same ``seed``; their cycles have the
    fewest to the most ``places``.
    """
    rng = random.Random(seed)
    letters = string.ascii_lowercase[: places[1]]
    while True:
        cycle = rng.sample(letters, rng.randint(*places))
        # The first arrow starts where the last one ends.
        arrows = [f"{cycle[number - 1]}>{place}" for number, place in enumerate(cycle)]
        rng.shuffle(arrows)
        door = Door(rng.choice(cycle), rng.randint(0, most_hops), tuple(arrows))
        if door.held_out == held_out:
            yield door
