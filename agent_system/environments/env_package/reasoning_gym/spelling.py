"""Numbers as separate digits, for policies whose vocabulary does not contain all numbers."""

import re

_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?=\d)")
_SPACED_DIGITS = re.compile(r"(?<=\d) (?=\d)")
_PREAMBLE = re.compile(r"^[^:\n]{20,}:\s*")  # "State the final answer to the following problem: "


def separate_digits(text: str) -> str:
    """Separate digits and drop the sentence before a colon: ``12 + 3 =`` gives ``1 2 + 3 =``."""
    return _BETWEEN_DIGITS.sub(" ", _PREAMBLE.sub("", text))


def join_digits(text: str) -> str:
    """Join digits that are separated by one space: ``1 5`` gives ``15``."""
    return _SPACED_DIGITS.sub("", text)
