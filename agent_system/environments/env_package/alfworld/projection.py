"""From model text to an ALFWorld command."""

import re

_CLOSED = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_OPEN = re.compile(r"<action>(.*)", re.DOTALL)
MAX_LENGTH = 120  # the longest command the engine knows has about 60 characters


def project(text: str) -> tuple[str, bool]:
    """Return the command inside ``<action>..</action>`` and whether the text was well formed.

    Well formed means: exactly one closed, non-empty action of plausible length. Otherwise the command is the best guess
    (the first action, an unclosed one, or the last line), which the engine answers on its own terms.
    """
    closed = _CLOSED.findall(text)
    if closed:
        command = _tidy(closed[0])
        return command[:MAX_LENGTH], len(closed) == 1 and 0 < len(command) <= MAX_LENGTH and "<" not in command
    opened = _OPEN.search(text)
    rest = opened.group(1) if opened else (text.strip().splitlines() or [""])[-1]
    return _tidy(rest)[:MAX_LENGTH], False


def _tidy(command: str) -> str:
    return " ".join(command.lower().split()).rstrip(".")
