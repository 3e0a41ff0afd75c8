"""Size check of formulas. sympy would need too much time or memory to evaluate large ones."""

import math
import re

MAX_DIGITS = 3  # digits of an exponent, of an argument of a factorial, or of a bound of a sum
MAX_POWER = 1000  # of the product of the numbers in one exponent, and of all exponents of brackets
MAX_EXPANSION = 200  # product of all exponents of brackets times the squared number of symbols
MAX_EXPONENT_SUM = 2000  # sum of all exponents of a formula
MAX_POWERS = 20
MAX_FACTORIALS = 10
MAX_BRACKET_DEPTH = 6  # nesting depth of brackets

_POWER = re.compile(r"(?:\^|\*\*)\s*")
_FACTORIAL = re.compile(r"(\d*)\s*!")
_NESTED = re.compile(r"(?:\\?(?:a?(?:sin|cos|tan)h?|exp|log|ln)\W{1,3}){4}")  # functions
_LONG = re.compile(r"\d{100}")
_BOUNDED = re.compile(r"\\(?:binom|sum|prod|Gamma|zeta)|\b(?:factorial|gamma|binomial|range)\b")
_SYMBOL = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]+")
_LAYOUT = {"\\frac", "\\dfrac", "\\left", "\\right", "\\cdot", "\\times", "\\sqrt", "\\text"}


def is_too_large(formula: str) -> bool:
    """Return True if powers, factorials, numbers or brackets of ``formula`` exceed the limits.

    >>> is_too_large("10^{10^{10}}!"), is_too_large("e^{2x}")
    (True, False)
    """
    if _LONG.search(formula) or _NESTED.search(formula) or "!!" in formula:
        return True
    if _bracket_depth(formula) > MAX_BRACKET_DEPTH:
        return True
    if _BOUNDED.search(formula) and re.search(rf"\d{{{MAX_DIGITS + 1}}}", formula):
        return True
    return _has_large_factorials(formula) or _has_large_powers(formula)


def _has_large_factorials(formula: str) -> bool:
    numbers = [len(match[1]) for match in _FACTORIAL.finditer(formula)]
    # A length of 0 means that no number precedes "!": the factorial is of a bracket or a power.
    if any(not 0 < digits <= MAX_DIGITS for digits in numbers):
        return not re.fullmatch(r"[^!]*\b[a-z]!", formula)
    return len(numbers) > MAX_FACTORIALS or bool(re.search(r"!\s*[\])}]+\s*(?:\^|\*\*)", formula))


def _has_large_powers(formula: str) -> bool:
    bracket_power, exponent_sum, count = 1, 0, 0
    for power in _POWER.finditer(formula):
        exponent = _read_exponent(formula, power.end())
        digits = re.findall(r"\d+", exponent)
        if any(len(number) > MAX_DIGITS for number in digits) or _is_tower(exponent):
            return True
        exponent_product = math.prod(int(number) or 1 for number in digits)
        count, exponent_sum = count + 1, exponent_sum + exponent_product
        if exponent_product > MAX_POWER or count > MAX_POWERS:
            return True
        if formula[: power.start()].rstrip()[-1:] in (")", "}", "]"):
            bracket_power *= exponent_product
    symbols = {symbol for symbol in _SYMBOL.findall(formula) if symbol not in _LAYOUT}
    expansion = bracket_power * len(symbols) ** 2
    expands_too_much = bracket_power > 1 and symbols and expansion > MAX_EXPANSION
    return bracket_power > MAX_POWER or exponent_sum > MAX_EXPONENT_SUM or bool(expands_too_much)


def _bracket_depth(formula: str) -> int:
    """Return the nesting depth of brackets, at least half the number of bars ``|``.

    A bar may open or close an absolute value, so two of them count as one level.
    """
    deepest = depth = 0
    for character in formula:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return max(deepest, formula.count("|") // 2)


def _is_tower(exponent: str) -> bool:
    """Return True if ``exponent`` contains a power of a number, a factorial or nested powers, such
    as in ``x^{10^{10}}``.
    """
    exponents = [_read_exponent(exponent, power.end()) for power in _POWER.finditer(exponent)]
    return bool(re.search(r"\d[\s)}\]]*(?:\^|\*\*|!)", exponent)) or any(
        map(_POWER.search, exponents)
    )


def _read_exponent(text: str, start: int) -> str:
    """Return the exponent that begins at ``start``, including its own exponents.

    >>> _read_exponent("x^2^3 + 1", 2)
    '2^3'
    """
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in "({[") - (text[position] in ")}]")
        if depth < 0:
            return text[start:position]
        if depth == 0 and not _exponent_continues(text, position):
            return text[start : position + 1]
    return text[start:]


def _exponent_continues(text: str, place: int) -> bool:
    is_inside_number = text[place].isdigit() and text[place + 1 : place + 2].isdigit()
    behind = text[place + 1 :].lstrip()
    return is_inside_number or text[place] in "-+^*" or behind.startswith(("^", "!", "**"))
