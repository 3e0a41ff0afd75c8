"""Guard in front of the algebra system: which formulas would take for ever, or all memory."""

import re

MOST_DIGITS = 3  # of an exponent, an argument of a factorial, or a bound of a sum
LARGEST_POWER = 1000  # product of the exponents of brackets in brackets

_POWER = re.compile(r"(?:\^|\*\*)\s*")
_FACTORIAL = re.compile(r"(\d*)\s*!")
_LONG = re.compile(r"\d{100}")
_BOUNDED = re.compile(r"\\(?:binom|sum|prod|Gamma|zeta)|\b(?:factorial|gamma|binomial|range)\b")


def is_too_large(formula: str) -> bool:
    """Say that ``formula`` has powers, factorials or numbers beyond what is computed.

    >>> is_too_large("10^{10^{10}}!"), is_too_large("e^{2x}")
    (True, False)
    """
    if _LONG.search(formula) or "!!" in formula:
        return True
    numbers = [len(found[1]) for found in _FACTORIAL.finditer(formula)]
    # Without a number in front it is the factorial of a bracket or of a power.
    if any(not 0 < digits <= MOST_DIGITS for digits in numbers):
        return not re.fullmatch(r"[^!]*\b[a-z]!", formula)
    if _BOUNDED.search(formula) and re.search(rf"\d{{{MOST_DIGITS + 1}}}", formula):
        return True
    product = 1
    for power in _POWER.finditer(formula):
        exponent = _argument(formula, power.end())
        digits = re.findall(r"\d+", exponent)
        if any(len(number) > MOST_DIGITS for number in digits) or _is_tower(exponent):
            return True
        if formula[: power.start()].rstrip()[-1:] in (")", "}", "]"):
            product *= max(map(int, digits), default=1) or 1
    return product > LARGEST_POWER


def _is_tower(exponent: str) -> bool:
    """A power of a number in an exponent."""
    return bool(re.search(r"\d[\s)}\]]*(?:\^|\*\*|!)", exponent))


def _argument(text: str, start: int) -> str:
    """The exponent that begins at ``start``, with what it is itself raised to."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] in "({[") - (text[place] in ")}]")
        if depth < 0:
            return text[start:place]
        if depth == 0 and not _goes_on(text, place):
            return text[start : place + 1]
    return text[start:]


def _goes_on(text: str, place: int) -> bool:
    behind = text[place + 1 :].lstrip()[:2]
    return (
        behind[:1] in ("^", "!")
        or behind == "**"
        or (
            text[place] in "-+^*"
            or (text[place].isdigit() and text[place + 1 : place + 2].isdigit())
        )
    )
