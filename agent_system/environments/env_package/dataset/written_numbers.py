"""Parsing of written numbers: separators, fractions, powers of ten, percentages, currencies, units
and English words.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

RELATIVE_TOLERANCE = Fraction(1, 10**6)  # largest relative difference of equal decimals
MAX_NUMBER_LENGTH = 400  # characters, or digits of the value; a longer number is compared as text

_SIGNED = r"[-+]?\s?"
_PLAIN = r"(?:\d{1,3}(?:[, _]\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_VALUE = re.compile(
    rf"""(?P<sign>{_SIGNED})(?:(?P<money>[$€£¥])\s?(?P<late>{_SIGNED}))?(?:
      (?P<whole>\d+)?\s*\\frac\s*(?:\{{(?P<top>-?\d+)\}}\s*\{{(?P<bottom>\d+)\}}|(?P<t>\d)\s*(?P<b>\d))
    | (?:(?P<mixed>\d+)\s+)?(?P<above>\d+)\s*/\s*(?P<below>\d+)
    | (?P<plain>{_PLAIN})(?:[eE](?P<power>[-+]?\d+)
        |\s*(?:\*|\\times|\\cdot|x)\s*10\s*(?:\^|\*\*)\s*\{{?\(?(?P<ten>[-+]?\d+)\)?\}}?)?
    )(?P<rest>.*)""",
    re.VERBOSE,
)
_HEDGE = re.compile(r"(?:about|approximately|around|roughly|exactly|approx\.?|≈|\\approx)\s*", re.I)
_UNIT = re.compile(r"[$€£¥%°']|[^\W\d_][^\W\d_.]*|[/^{} \d-]")
_LATER = re.compile(r"(?:st|nd|rd|th)\b")
_BIG = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_WORDS = re.compile(r"\S+").findall
_NOT_UNITS = frozenset(
    _WORDS(
        "pi sqrt frac sin cos tan log ln exp mod times plus minus over divided and or to not "
        "percent point dozen factorial cdot by less more than"
    )
)
_ONES = _WORDS(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_TENS = _WORDS("twenty thirty forty fifty sixty seventy eighty ninety")
_SMALL = {word: n for n, word in enumerate(_ONES)} | {
    word: 10 * n for n, word in enumerate(_TENS, 2)
}
_PARTS = {"half": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "eighth": 8, "tenth": 10}
# Units are separated by bars. Of each, the first word is the name and the others are synonyms.
_UNITS = """
dollar $ usd|euro € eur|pound £ gbp|yen ¥ jpy|cent ¢|% percent percentage|° degree deg
mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre
g gram gramme|kg kilogram kilogramme kilo|mg milligram|l liter litre|ml milliliter millilitre
s sec second|min minute|h hr hour|day|week|month|year yr|in inch inche|ft foot feet|yd yard
mi mile|lb pounds|oz ounce|mph|km/h kmh kph|m/s|n newton|j joule|w watt|v volt|k kelvin
"""
UNITS = {
    word: line.split()[0]
    for line in _UNITS.strip().replace("\n", "|").split("|")
    for word in line.split()
}


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """Number with its unit ("" without one). ``is_exact`` is True for integers and fractions, False
    for decimals.
    """

    value: Fraction
    unit: str = ""
    is_exact: bool = True


def read_number(text: str) -> WrittenNumber | None:
    """Return the number that the normalised ``text`` consists of, or None for any other text.

    >>> read_number("1,234.50 dollars")
    WrittenNumber(value=Fraction(2469, 2), unit='dollar', is_exact=False)
    """
    text = _HEDGE.sub("", text.strip(), count=1)
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    if len(text) > MAX_NUMBER_LENGTH:
        return None
    return _read_words(text) or _read_digits(text)


def is_same_number(given: WrittenNumber, truth: WrittenNumber) -> bool:
    """Return True if both are the same number and their units do not contradict each other.

    A missing unit matches any unit. A percentage compared with a plain number may be its number or
    a hundredth of it: 50% equals 50 and 0.5.
    """
    if given.unit and truth.unit and given.unit != truth.unit:
        return False
    values = [(given.value, truth.value)]
    if truth.unit == "%" != given.unit:
        values.append((given.value, truth.value / 100))
    if given.unit == "%" != truth.unit:
        values.append((given.value / 100, truth.value))
    are_exact = given.is_exact and truth.is_exact
    return any(_are_close(given_value, true_value, are_exact) for given_value, true_value in values)


def _are_close(one: Fraction, other: Fraction, exact: bool) -> bool:
    return one == other or (
        not exact and abs(one - other) <= RELATIVE_TOLERANCE * max(abs(one), abs(other))
    )


def _read_digits(text: str) -> WrittenNumber | None:
    match = _VALUE.fullmatch(text)
    if match is None:
        return None
    groups = match.groupdict()
    value = _read_fraction(groups) if groups["plain"] is None else _read_decimal(groups)
    unit = _read_unit(match["rest"], match["money"] or "")
    if value is None or unit is None:
        return None
    scale, unit = unit
    is_negative = "-" in match["sign"] + (match["late"] or "")
    is_exact = groups["plain"] is None or "." not in groups["plain"]
    return WrittenNumber((-1 if is_negative else 1) * value * scale, unit, is_exact)


def _read_fraction(parts: dict[str, str | None]) -> Fraction | None:
    numerator = int(parts["top"] or parts["t"] or parts["above"] or "")
    denominator = int(parts["bottom"] or parts["b"] or parts["below"] or "")
    whole = int(parts["whole"] or parts["mixed"] or "0")
    return whole + Fraction(numerator, denominator) if denominator else None


def _read_decimal(parts: dict[str, str | None]) -> Fraction | None:
    power = int(parts["power"] or parts["ten"] or 0)
    if abs(power) > MAX_NUMBER_LENGTH:
        return None
    digits = re.sub(r"[, _]", "", parts["plain"] or "")
    return Fraction(digits) * Fraction(10) ** power


def _read_unit(rest: str, money: str) -> tuple[int, str] | None:
    """Return the factor and the unit in ``rest``, the text after a number; None if it is no unit.

    ``million dollars`` gives (1000000, "dollar"). ``money`` is the currency sign before the number.
    """
    if _LATER.match(rest):
        return None
    is_apart = rest[:1].isspace()
    words = rest.strip().rstrip(".").split()
    scale = 1
    while words and words[0].casefold() in _BIG:
        scale *= 10 ** _BIG[words.pop(0).casefold()]
    text = " ".join(words)
    unit = _normalize_unit(text, is_apart) if text else ""
    if unit is None:
        return None
    currency = UNITS.get(money, "")
    if unit and currency and unit != currency:
        return None
    return scale, unit or currency


def _normalize_unit(text: str, is_apart: bool) -> str | None:
    unit = UNITS.get(text.casefold()) or UNITS.get(text.casefold().rstrip("s"))
    letters = [word.casefold() for word in re.findall(r"[^\W\d_]+", text)]
    if unit is not None and (is_apart or not re.fullmatch(r"[a-zA-Z]", text)):
        return unit
    # A single letter is a variable, and a word such as "pi" is a factor. Neither is a unit.
    if not letters or len(letters[0]) == 1 or _NOT_UNITS.intersection(letters):
        return None
    if len(_UNIT.sub("", text)) or re.match(r"[\d^/-]", text):
        return None
    return " ".join(UNITS.get(word, word) for word in text.casefold().rstrip("s").split())


def _read_words(text: str) -> WrittenNumber | None:
    """Parse a number in English words, optionally followed by a unit; None if it is none."""
    words = re.sub(r"(?<=[a-z])-(?=[a-z])", " ", text.casefold()).split()
    is_negative = words[:1] in (["minus"], ["negative"])
    words = words[1:] if is_negative else words
    if words[:1] == ["a"] and words[1:2] and words[1] in _BIG:
        words[0] = "one"
    denominator = _PARTS.get("".join(words[-1:]).replace("halves", "half").removesuffix("s"))
    if denominator and len(words) <= 2 and (words[0] in _SMALL or words[0] in ("a", "half")):
        value = Fraction(_SMALL.get(words[0], 1), denominator)
        return WrittenNumber(-value if is_negative else value)
    if not words or words[0] not in _SMALL:
        return None
    total = group = count = 0
    for word in words:
        if word in _SMALL:
            group += _SMALL[word]
        elif word == "hundred":
            group *= 100
        elif word in _BIG:
            total, group = total + group * 10 ** _BIG[word], 0
        elif word != "and":
            break
        count += 1
    unit_text = " ".join(words[count:])
    unit = _normalize_unit(unit_text, is_apart=True) if unit_text else ""
    if unit is None or words[count - 1] == "and" or not _tens_precede_ones(words[:count]):
        return None
    value = Fraction(total + group)
    return WrittenNumber(-value if is_negative else value, unit)


def _tens_precede_ones(words: list[str]) -> bool:
    """Return True if tens precede ones, as in "twenty one". "one two" are two numbers."""
    return all(
        word in _TENS and 0 < _SMALL[next_word] < 10
        for word, next_word in pairwise(words)
        if word in _SMALL and next_word in _SMALL
    )
