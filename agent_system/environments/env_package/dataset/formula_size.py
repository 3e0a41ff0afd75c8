"""Size limits of formulas. sympy would need too much time or memory for larger formulas."""

import math
import re

# Maximum number of digits of a number in an exponent, before a factorial sign, or in a formula with
# a sum, a product or a binomial.
MAX_DIGITS = 3
# Maximum product of the numbers in one exponent, such as 6 in x^{2*3}. Also the maximum product of
# all exponents of brackets, such as 6 in (a+b)^2 (c+d)^3.
MAX_EXPONENT_PRODUCT = 1000
# Maximum estimated number of terms after expansion. The estimate is the product of all exponents of
# brackets, times the squared number of distinct symbols.
MAX_EXPANSION = 200
MAX_EXPONENT_SUM = 2000  # maximum sum over all powers; a power counts the product of its numbers
MAX_POWERS = 20  # maximum number of powers in a formula
MAX_FACTORIALS = 10  # maximum number of factorials in a formula
MAX_BRACKET_DEPTH = 6  # maximum nesting of brackets

_POWER_OPERATOR = re.compile(r"(?:\^|\*\*)\s*")
_FACTORIAL = re.compile(r"(\d*)\s*!")
# Four nested functions, as in sin(cos(log(exp(x)))).
_NESTED_FUNCTIONS = re.compile(r"(?:\\?(?:a?(?:sin|cos|tan)h?|exp|log|ln)\W{1,3}){4}")
_LONG_NUMBER = re.compile(r"\d{100}")
_LARGE_VALUE_FUNCTION = re.compile(
    r"\\(?:binom|sum|prod|Gamma|zeta)|\b(?:factorial|gamma|binomial|range)\b"
)
_SYMBOL = re.compile(r"\\[a-zA-Z]+|[a-zA-Z]+")
_LAYOUT_COMMANDS = {
    "\\frac",
    "\\dfrac",
    "\\left",
    "\\right",
    "\\cdot",
    "\\times",
    "\\sqrt",
    "\\text",
}


def is_formula_too_large(formula: str) -> bool:
    """Return True if powers, factorials, numbers or brackets of ``formula`` exceed the limits.

    >>> is_formula_too_large("10^{10^{10}}!"), is_formula_too_large("e^{2x}")
    (True, False)
    """
    if _LONG_NUMBER.search(formula) or _NESTED_FUNCTIONS.search(formula) or "!!" in formula:
        return True
    if _compute_bracket_depth(formula) > MAX_BRACKET_DEPTH:
        return True
    if _LARGE_VALUE_FUNCTION.search(formula) and re.search(rf"\d{{{MAX_DIGITS + 1}}}", formula):
        return True
    return _has_large_factorials(formula) or _has_large_powers(formula)


def _has_large_factorials(formula: str) -> bool:
    digit_counts = [len(match[1]) for match in _FACTORIAL.finditer(formula)]
    # A count of 0 means that no number precedes "!", as in (n+1)! and x!. Only x! is accepted.
    if any(not 0 < digit_count <= MAX_DIGITS for digit_count in digit_counts):
        return not re.fullmatch(r"[^!]*\b[a-z]!", formula)
    return len(digit_counts) > MAX_FACTORIALS or bool(
        re.search(r"!\s*[\])}]+\s*(?:\^|\*\*)", formula)
    )


def _has_large_powers(formula: str) -> bool:
    bracket_exponent_product, exponent_sum, power_count = 1, 0, 0
    for power in _POWER_OPERATOR.finditer(formula):
        exponent = _read_exponent(formula, power.end())
        number_texts = re.findall(r"\d+", exponent)
        if any(len(digits) > MAX_DIGITS for digits in number_texts) or _has_power_tower(exponent):
            return True
        exponent_product = math.prod(int(digits) or 1 for digits in number_texts)
        power_count, exponent_sum = power_count + 1, exponent_sum + exponent_product
        if exponent_product > MAX_EXPONENT_PRODUCT or power_count > MAX_POWERS:
            return True
        if formula[: power.start()].rstrip()[-1:] in (")", "}", "]"):
            bracket_exponent_product *= exponent_product
    symbols = {symbol for symbol in _SYMBOL.findall(formula) if symbol not in _LAYOUT_COMMANDS}
    num_expanded_terms = bracket_exponent_product * len(symbols) ** 2
    has_large_expansion = (
        bracket_exponent_product > 1 and symbols and num_expanded_terms > MAX_EXPANSION
    )
    return (
        bracket_exponent_product > MAX_EXPONENT_PRODUCT
        or exponent_sum > MAX_EXPONENT_SUM
        or bool(has_large_expansion)
    )


def _compute_bracket_depth(formula: str) -> int:
    """Return the nesting depth of brackets, or half the number of bars ``|`` if this is larger.

    Two bars enclose an absolute value. Absolute values may be nested, so each is one level.
    """
    max_depth = depth = 0
    for character in formula:
        depth += (character in "({[") - (character in ")}]")
        max_depth = max(max_depth, depth)
    return max(max_depth, formula.count("|") // 2)


def _has_power_tower(exponent: str) -> bool:
    """Return True if ``exponent`` contains a power of a number, a factorial or nested powers.

    Examples: the exponents in ``x^{10^{10}}`` and ``x^{3!}``.
    """
    inner_exponents = [
        _read_exponent(exponent, power.end()) for power in _POWER_OPERATOR.finditer(exponent)
    ]
    return bool(re.search(r"\d[\s)}\]]*(?:\^|\*\*|!)", exponent)) or any(
        map(_POWER_OPERATOR.search, inner_exponents)
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


def _exponent_continues(text: str, position: int) -> bool:
    is_inside_number = text[position].isdigit() and text[position + 1 : position + 2].isdigit()
    following_text = text[position + 1 :].lstrip()
    return (
        is_inside_number or text[position] in "-+^*" or following_text.startswith(("^", "!", "**"))
    )
