"""Short observations of the number line, for policies that cannot subtract."""

import re

_POSITIONS = re.compile(r"You are at (\d+)\. The target is (\d+)\.")


def shorten_observation(text: str) -> str:
    """Return position, distance and side of the target: ``at 3, target 13 right``."""
    match = _POSITIONS.search(text)
    if match is None:
        return text
    position, target = map(int, match.groups())
    side = "right" if target > position else "left"
    short_text = f"at {position}, target {abs(target - position)} {side}"
    return f"{text[: match.start()]}{short_text}"
