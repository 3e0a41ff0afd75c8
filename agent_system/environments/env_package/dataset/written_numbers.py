"""Parsing of numbers in answers: digits or English words, with an optional unit.

Digits may have separators, fractions, powers of ten, percent signs and currency signs.
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise, takewhile

RELATIVE_TOLERANCE = Fraction(1, 10**6)  # decimals with a smaller relative difference are equal
MAX_NUMBER_LENGTH = 400  # maximum characters of a number as text, and maximum power of ten

_SIGN = r"[-+]?\s?"
CURRENCY_SIGNS = "$€£¥₹₩₽"
# Digits in groups of three, in Indian groups (1,00,000), or without groups.
_DECIMAL = r"(?:\d{1,3}(?:[, _']\d{3})+(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER_WITH_UNIT = re.compile(
    rf"""(?P<sign>{_SIGN})(?:(?P<money>[{CURRENCY_SIGNS}])\s?(?P<late>{_SIGN}))?(?:
      (?P<whole>\d+)?\s*\\frac\s*(?:\{{(?P<top>-?\d+)\}}\s*\{{(?P<bottom>\d+)\}}|(?P<t>\d)\s*(?P<b>\d))
    | (?:(?P<mixed>\d+)\s+)?(?P<above>\d+)\s*/\s*(?P<below>\d+)
    | (?P<plain>{_DECIMAL})(?:[eE](?P<power>[-+]?\d+)
        |\s*(?:\*|\\times|\\cdot|x)\s*10\s*(?:\^|\*\*)\s*\{{?\(?(?P<ten>[-+]?\d+)\)?\}}?)?
    )(?P<rest>.*)""",
    re.VERBOSE,
)
_APPROXIMATION_WORD = re.compile(
    r"^(?:about|approximately|around|roughly|exactly|approx\.?|≈|\\approx)\s*", re.I
)
_UNIT_PART = re.compile(rf"[{CURRENCY_SIGNS}%°']|[^\W\d_][^\W\d_.]*|[/^{{}} \d-]")
_ORDINAL_SUFFIX = re.compile(r"(?:st|nd|rd|th)\b")
_split_words = re.compile(r"\S+").findall
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Words of other languages and abbreviations. They are read only after digits: 12 Millionen, 12万.
_POWERS_AFTER_DIGITS = _POWERS_OF_TEN | {
    word: power
    for power, words in {
        3: "tausend mille mil тысяч тысячи тысяча",
        5: "lakh",
        6: "mn millions millionen millones millón milhões milioni миллион миллиона миллионов",
        7: "crore",
        9: "bn billions milliarden milliards",
    }.items()
    for word in _split_words(words)
}
_POWERS_AFTER_CURRENCY = {"k": 3, "m": 6, "b": 9}  # as in $70k
_CHINESE_POWERS = {"百": 2, "千": 3, "万": 4, "萬": 4, "亿": 8, "億": 8, "만": 4, "억": 8}
_SIGN_WORD = re.compile(r"(?:minus|negative)\s+(?=[\d.$])", re.IGNORECASE)
# A remark in brackets after a number: "12 (twelve)".
_REMARK = re.compile(r"(?P<number>.*[^\s(])\s*\((?P<remark>[^()]*)\)", re.DOTALL)
_REMARK_WORDS = re.compile(r"(?=.*[^\W\d_]{2})[^-+*/^=\\]*", re.DOTALL)
_MIXED_NUMBER = re.compile(r"(.+) and a (half|third|quarter)\b(.*)", re.DOTALL)
_RATE_SUFFIX = re.compile(r"\s*(?:/|per\s|each\b|an?\s).*", re.IGNORECASE | re.DOTALL)
# Spellings of units of several words.
_UNIT_SPELLINGS = (
    (re.compile(r"per\s+cent\b|pct\b", re.IGNORECASE), "%"),
    (re.compile(r"\s*\bper\s+", re.IGNORECASE), "/"),
    (re.compile(r"(?:degrees?\s+|°\s*)(c|f)(?:elsius|ahrenheit)?\b", re.IGNORECASE), "°\\1"),
    (re.compile(r"\b(?:square|sq\.?)\s+([^\W\d_]+)", re.IGNORECASE), r"\1^2"),
    (re.compile(r"\s*\^\s*"), "^"),
    (re.compile(r"\bcubic\s+([^\W\d_]+)", re.IGNORECASE), r"\1^3"),
)
_NON_UNIT_WORDS = frozenset(
    _split_words(
        "pi sqrt frac sin cos tan log ln exp mod times plus minus over divided and or to not "
        "percent point dozen factorial cdot by less more than squared cubed ish is are was isn not "
        "no"
    )
)
_WORDS_BELOW_20 = _split_words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
)
_WORDS_OF_TENS = _split_words("twenty thirty forty fifty sixty seventy eighty ninety")
_VALUES_BELOW_100 = {word: n for n, word in enumerate(_WORDS_BELOW_20)} | {
    word: 10 * n for n, word in enumerate(_WORDS_OF_TENS, 2)
}
_DENOMINATORS = {
    "half": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "eighth": 8,
    "tenth": 10,
}
# Bars and line breaks separate units. The first word is the name of the unit, others are synonyms.
_UNIT_SYNONYMS = """
dollar $ usd|euro € eur|pound £ gbp|yen ¥ jpy|cent ¢|% percent percentage|° degree deg
mm millimeter millimetre|cm centimeter centimetre|m meter metre|km kilometer kilometre
g gram gramme|kg kilogram kilogramme kilo|mg milligram|l liter litre|ml milliliter millilitre
s sec second|min minute|h hr hour|day|week|month|year yr|in inch inche|ft foot feet|yd yard
mi mile|lb pounds|oz ounce|mi/h mph|km/h kmh kph|m/s|n newton|j joule|w watt|v volt|k kelvin
mol mole|pa pascal|hz hertz|rupee ₹ inr rs|won ₩ krw|ruble ₽ rub|°c|°f
"""
UNIT_NAMES = {
    word: line.split()[0]
    for line in _UNIT_SYNONYMS.strip().replace("\n", "|").split("|")
    for word in line.split()
}


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """Number with its unit, which is "" if none was written.

    ``is_exact`` is True for integers and fractions, and False for decimals.
    """

    value: Fraction
    unit: str = ""
    is_exact: bool = True


def read_number(text: str) -> WrittenNumber | None:
    """Return the number that the normalised ``text`` consists of, or None for any other text.

    >>> read_number("1,234.50 dollars")
    WrittenNumber(value=Fraction(2469, 2), unit='dollar', is_exact=False)
    """
    if len(text) > MAX_NUMBER_LENGTH:
        return None
    text = re.sub(r"(?<=\d) and a half\b", " 1/2", text)
    text = _SIGN_WORD.sub("-", _APPROXIMATION_WORD.sub("", text.strip(), count=1))
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    if match := _REMARK.fullmatch(text):
        number, remark_number = read_number(match["number"]), read_number(match["remark"])
        is_same_value = number and remark_number and number.value == remark_number.value
        return number if is_same_value or _REMARK_WORDS.fullmatch(match["remark"]) else None
    return _read_number_words(text) or _read_digits(text)


def is_same_number(answer_number: WrittenNumber, truth: WrittenNumber) -> bool:
    """Return True if both are the same number and their units do not contradict each other.

    A missing unit matches any unit. Without a unit, both 50 and 0.5 equal 50%.
    """
    if answer_number.unit and truth.unit and answer_number.unit != truth.unit:
        return False
    value_pairs = [(answer_number.value, truth.value)]
    if truth.unit == "%" != answer_number.unit:
        value_pairs.append((answer_number.value, truth.value / 100))
    if answer_number.unit == "%" != truth.unit:
        value_pairs.append((answer_number.value / 100, truth.value))
    are_exact = answer_number.is_exact and truth.is_exact
    return any(
        _are_equal_or_close(given_value, true_value, are_exact)
        for given_value, true_value in value_pairs
    )


def _are_equal_or_close(first_value: Fraction, second_value: Fraction, are_exact: bool) -> bool:
    return first_value == second_value or (
        not are_exact
        and abs(first_value - second_value)
        <= RELATIVE_TOLERANCE * max(abs(first_value), abs(second_value))
    )


def _read_digits(text: str) -> WrittenNumber | None:
    match = _NUMBER_WITH_UNIT.fullmatch(text)
    if match is None:
        return None
    groups = match.groupdict()
    value = _read_fraction(groups) if groups["plain"] is None else _read_decimal(groups)
    factor_and_unit = _read_unit(match["rest"], match["money"] or "")
    if value is None or factor_and_unit is None:
        return None
    factor, unit = factor_and_unit
    is_negative = "-" in match["sign"] + (match["late"] or "")
    is_exact = groups["plain"] is None or "." not in groups["plain"]
    return WrittenNumber((-1 if is_negative else 1) * value * factor, unit, is_exact)


def _read_fraction(groups: dict[str, str | None]) -> Fraction | None:
    numerator = int(groups["top"] or groups["t"] or groups["above"] or "")
    denominator = int(groups["bottom"] or groups["b"] or groups["below"] or "")
    whole_part = int(groups["whole"] or groups["mixed"] or "0")
    return whole_part + Fraction(numerator, denominator) if denominator else None


def _read_decimal(groups: dict[str, str | None]) -> Fraction | None:
    power_of_ten = int(groups["power"] or groups["ten"] or 0)
    if abs(power_of_ten) > MAX_NUMBER_LENGTH:
        return None
    digits = re.sub(r"[, _']", "", groups["plain"] or "")
    return Fraction(digits) * Fraction(10) ** power_of_ten


def _read_unit(text_after_number: str, currency_sign: str) -> tuple[int, str] | None:
    """Return (factor, unit) from the text after a number, or None if the text is no unit.

    " million dollars" gives (1000000, "dollar"), and an empty text (1, ""). ``currency_sign`` is
    the sign before the number.
    """
    if _ORDINAL_SUFFIX.match(text_after_number):
        return None
    is_after_space = text_after_number[:1].isspace()
    text_after_number = text_after_number.strip().rstrip(".")
    factor = 1
    while text_after_number[:1] in _CHINESE_POWERS:
        factor *= 10 ** _CHINESE_POWERS[text_after_number[0]]
        text_after_number = text_after_number[1:]
    words = text_after_number.split()
    power_by_word = _POWERS_AFTER_DIGITS | (_POWERS_AFTER_CURRENCY if currency_sign else {})
    while words and words[0].casefold() in power_by_word:
        factor *= 10 ** power_by_word[words.pop(0).casefold()]
    unit_text = _RATE_SUFFIX.sub("", " ".join(words)) if currency_sign else " ".join(words)
    unit = _normalize_unit(unit_text, is_after_space) if unit_text else ""
    if unit is None:
        return None
    currency_name = UNIT_NAMES.get(currency_sign, "")
    if unit and currency_name and unit != currency_name:
        return None
    return factor, unit or currency_name


def _normalize_unit(text: str, is_after_space: bool) -> str | None:
    for spelling_pattern, replacement in _UNIT_SPELLINGS:
        text = spelling_pattern.sub(replacement, text)
    # Marks are vowel signs of Indian languages. They do not count as letters in a pattern.
    text = "".join(character for character in text if unicodedata.category(character)[0] != "M")
    unit = UNIT_NAMES.get(text.casefold()) or UNIT_NAMES.get(text.casefold().rstrip("s"))
    letter_words = [word.casefold() for word in re.findall(r"[^\W\d_]+", text)]
    if unit is not None and (is_after_space or not re.fullmatch(r"[a-zA-Z]", text)):
        return unit
    # A single letter is a variable, and a word such as "pi" is a factor. Neither is a unit.
    is_variable = bool(re.match(r"[a-z\u03b1-\u03c9]$", "".join(letter_words[:1])))
    # A symbol of a unit before further words or signs: "2.5 m long", "2.5 m^2".
    is_unit_symbol = is_after_space and len(text) > 1 and "".join(letter_words[:1]) in UNIT_NAMES
    if text.casefold() == "times":
        return "times"
    if (
        not letter_words
        or (is_variable and not text.startswith("°") and not is_unit_symbol)
        or _NON_UNIT_WORDS.intersection(letter_words)
        or re.search(r"\s\d", text)  # another number: 42% of 100
    ):
        return None
    if len(_UNIT_PART.sub("", text)) or re.match(r"[\d^/-]", text):
        return None
    return "%" if text[0] == "%" else re.sub(r"[^\W\d_]+", _get_unit_name, text.casefold())


def _get_unit_name(match: re.Match[str]) -> str:
    singular_word = match[0].rstrip("s") or match[0]
    return UNIT_NAMES.get(match[0]) or UNIT_NAMES.get(singular_word, singular_word)


def _read_number_words(text: str) -> WrittenNumber | None:
    """Parse a number in English words, with an optional unit."""
    words = re.sub(r"(?<=[a-z])-(?=[a-z])", " ", text.casefold()).split()
    is_negative = words[:1] in (["minus"], ["negative"])
    words = words[1:] if is_negative else words
    if words[:1] == ["a"] and words[1:2] and words[1] in _POWERS_OF_TEN:
        words[0] = "one"
    if words[:1] and words[0] in _POWERS_OF_TEN:
        words.insert(0, "one")
    if mixed_match := _MIXED_NUMBER.fullmatch(" ".join(words)):
        return _read_mixed_number(mixed_match, -1 if is_negative else 1)
    denominator = _DENOMINATORS.get("".join(words[-1:]).replace("halves", "half").removesuffix("s"))
    if (
        denominator
        and len(words) <= 2
        and (words[0] in _VALUES_BELOW_100 or words[0] in ("a", "half"))
    ):
        value = Fraction(_VALUES_BELOW_100.get(words[0], 1), denominator)
        return WrittenNumber(-value if is_negative else value)
    if not words or words[0] not in _VALUES_BELOW_100:
        return None
    number_words = list(takewhile(_is_number_word, words))
    total = value_below_1000 = 0
    for word in number_words:
        if word in _VALUES_BELOW_100:
            value_below_1000 += _VALUES_BELOW_100[word]
        elif word == "hundred":
            value_below_1000 *= 100
        elif word in _POWERS_OF_TEN:
            total, value_below_1000 = total + value_below_1000 * 10 ** _POWERS_OF_TEN[word], 0
    unit_text = " ".join(words[len(number_words) :])
    unit = _normalize_unit(unit_text, is_after_space=True) if unit_text else ""
    if unit is None or number_words[-1] == "and" or not _are_tens_before_ones(number_words):
        return None
    value = Fraction(total + value_below_1000)
    return WrittenNumber(-value if is_negative else value, unit)


def _is_number_word(word: str) -> bool:
    return word in ("hundred", "and") or word in _VALUES_BELOW_100 or word in _POWERS_OF_TEN


def _read_mixed_number(match: re.Match[str], sign: int) -> WrittenNumber | None:
    """Return the number in a match of ``_MIXED_NUMBER``: "two and a half hours"."""
    whole_part = _read_number_words(f"{match[1]} {match[3]}")
    if whole_part is None:
        return None
    return WrittenNumber(
        sign * (whole_part.value + Fraction(1, _DENOMINATORS[match[2]])), whole_part.unit
    )


def _are_tens_before_ones(words: list[str]) -> bool:
    """Return True if adjacent words form one number, as in "twenty one" but not in "one two"."""
    return all(
        word in _WORDS_OF_TENS and 0 < _VALUES_BELOW_100[next_word] < 10
        for word, next_word in pairwise(words)
        if word in _VALUES_BELOW_100 and next_word in _VALUES_BELOW_100
    )
