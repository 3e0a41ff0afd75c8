"""Numbers digit by digit, for policies whose words are too few for all numbers."""

import re

_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?=\d)")
_SPACED_DIGITS = re.compile(r"(?<=\d) (?=\d)")
_PREAMBLE = re.compile(r"^[^:\n]{20,}:\s*")  # "State the final answer to the following problem: "


def apart(text: str) -> str:
    """``12 + 3 =`` as ``1 2 + 3 =``, without the sentence in front of a colon."""
    return _BETWEEN_DIGITS.sub(" ", _PREAMBLE.sub("", text))


def together(text: str) -> str:
    """``1 5`` as ``15``."""
    return _SPACED_DIGITS.sub("", text)
