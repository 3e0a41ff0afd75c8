"""How a door is told: as sentences in observations, and in as few tokens as can be for small
policies.
"""

import re

from agent_system.environments.env_package.relay.doors import Door

_DOOR = re.compile(r"Door \d+ of \d+\. Arrows: (.*)\. You are at ([a-z])\. Go (\d+) arrows on\.")


def told(door: Door, number: int, doors: int) -> str:
    """Door ``number`` of ``doors`` as sentences."""
    return (
        f"Door {number} of {doors}. Arrows: {' '.join(door.arrows)}. "
        f"You are at {door.place}. Go {door.hops} arrows on."
    )


def door_in(text: str) -> Door:
    """The door that ``text`` tells. Raises ``ValueError`` where it tells none."""
    found = _DOOR.search(text)
    if found is None:
        raise ValueError(f"no door is told here: {text!r}")
    arrows, place, hops = found.groups()
    return Door(place, int(hops), tuple(arrows.split()))


def shorten(text: str) -> str:
    """``d+3 a>b f>c ...``: the question, then the arrows."""
    found = _DOOR.search(text)
    return text if found is None else f"{text[: found.start()]}{door_in(text)}"
