"""Texts of a door: sentences in observations, and a short form for small policies."""

import re

from agent_system.environments.env_package.relay.doors import Door

_DOOR = re.compile(r"Door \d+ of \d+\. Arrows: (.*)\. You are at ([a-z])\. Go (\d+) arrows on\.")


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
