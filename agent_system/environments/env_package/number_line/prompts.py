"""Short observations of the number line, for policies that cannot subtract."""

import re

_PLACES = re.compile(r"You are at (\d+)\. The target is (\d+)\.")


def shorten(text: str) -> str:
    """Return position, distance and side of the target: ``at 3, target 13 right``."""
    found = _PLACES.search(text)
    if found is None:
        return text
    position, target = map(int, found.groups())
    side = "right" if target > position else "left"
    place = f"at {position}, target {abs(target - position)} {side}"
    return f"{text[: found.start()]}{place}"
