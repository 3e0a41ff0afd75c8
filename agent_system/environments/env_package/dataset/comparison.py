"""Comparison of an answer with a ground truth, by the kind of the ground truth.

- letter, as in "A" and "(B)": the option's letter, with or without its text.
- number, as in "42", "1/2", "5 km" and "ten": the value. Units must not contradict each other.
- maths, as in "x^2+1" and "[0, 1)": equal in value, by math-verify.
- text, as in "Paris": the same words.
"""

import logging
import re
from collections.abc import Iterator

from agent_system.environments.env_package.dataset.answer_text import fold_words, normalize_answer
from agent_system.environments.env_package.dataset.answers import ExtractedAnswer, extract_answer
from agent_system.environments.env_package.dataset.formula_size import is_too_large
from agent_system.environments.env_package.dataset.written_numbers import (
    is_same_number,
    read_number,
)

EXTRA_CHARACTERS = 2000  # an answer may have twice the characters of the truth plus this number
MAX_FORMULA_LENGTH = 300  # characters; a longer formula is compared as text
MAX_LIST_DEPTH = 3  # levels of nested lists, such as 2 for [[1], [2]]

_LETTER = re.compile(r"\(?([A-Za-z])[).]?")
_OPTION = re.compile(
    r"(?:(?:option|choice|answer)\s+)?(?:\(\s*([A-Za-z])\s*\)|([A-Za-z])\s*[).:]|([A-Za-z]))"
    r"(?:(?<=[).:])\s*(?P<text>\S.*)|\s+-\s+(?P<after>\S.*))?",
    re.IGNORECASE | re.DOTALL,
)
_LABELLED = re.compile(r"(?:\(([A-Z])\)|([A-Z])[).:])\s+(\S.*)", re.DOTALL)
_CHOSEN = re.compile(
    r"(?:(?:option|choice)\s+)?\(?([A-Z])\)?\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b.*",
    re.DOTALL,
)
_VERDICT = re.compile(r"(yes|no|true|false)\s*[,.;:!-].*", re.IGNORECASE | re.DOTALL)
_VERDICTS = ("yes", "no", "true", "false")
_JOINED = re.compile(r"(?:\s*,)?\s+(?:or|and)\s+")
_ASIDE = re.compile(r"\s*\([^()]*\)$")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_NAMES = re.compile(
    r"pi|e|i|a?(?:sin|cos|tan|sec|csc|cot)h?|log|ln|exp|sqrt|oo|inf|infty|mod", re.IGNORECASE
)
_FORMULA_SIGN = re.compile(r"[-+*/^=<>(){}\[\]|!,]|\d[a-zA-Z]")
_DATE = re.compile(r"(?<![\d.,])0\d|\d{4}-\d{1,2}-\d{1,2}|\d{1,2}/\d{1,2}/\d{2,4}|\d:\d")
_CLOSED_FORM = re.compile(
    r"\\(?:frac|sqrt|pi|log|ln|exp|sin|cos|tan|binom)|\^|\d!|\b(?:e|pi|sqrt)\b"
)
_OPERATOR = re.compile(r"\\(?:i*int|oint|sum|prod|lim)(?![a-z])|\\frac\s*\{d\}")
_TO_CALCULATE = re.compile(r"\d\s*(?:[-+*]|\\times|\\cdot)\s*\d")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def is_right(answer: ExtractedAnswer, truth: str) -> bool:
    """Return True if one of the possible texts of ``answer`` equals ``truth``.

    A letter, a verdict, a number, a formula and words are each compared in their own way.
    """
    gold = normalize_answer(truth)
    max_length = EXTRA_CHARACTERS + 2 * len(truth)
    given_texts = [
        normalize_answer(reading) for reading in answer.readings if len(reading) <= max_length
    ]
    if letter := _LETTER.fullmatch(gold):
        may_be_small = answer.is_marked or len(answer.readings) == 1 or letter[1].islower()
        return any(
            _named_option(text, may_be_small) == letter[1].casefold() for text in given_texts
        )
    if any(fold_words(one) == fold_words(gold) for one in given_texts):
        return True
    if fold_words(gold) in _VERDICTS:
        verdicts = [match[1] for one in given_texts if (match := _VERDICT.fullmatch(one))]
        return fold_words(gold) in map(str.casefold, verdicts)
    if _is_written_number(gold):
        numbers = [*given_texts, *map(normalize_answer, answer.numbers)]
        return any(_equals_number(one, gold) for one in numbers)
    if _is_formula(gold):
        return any(_same_formula(one, gold, MAX_LIST_DEPTH) for one in given_texts)
    return any(_same_words(one, gold) for one in given_texts)


def answer_key(text: str) -> str | None:
    """Return a canonical text of the answer in ``text``, or None if there is no answer.

    Equal answers have equal canonical texts. Formulas are an exception, because they are not
    evaluated: ``1+x`` and ``x+1`` differ.

    >>> answer_key("It is 0.5.") == answer_key("\\boxed{1/2}")
    True
    """
    answer = extract_answer(text)
    if answer is None or len(answer.readings[-1]) > EXTRA_CHARACTERS:
        return None
    for reading in (*answer.readings, *answer.numbers):
        number = read_number(normalize_answer(reading))
        if number is not None:
            return f"{number.value} {number.unit}".strip()
    last_reading = normalize_answer(answer.readings[-1])
    letter = _named_option(last_reading, answer.is_marked)
    return letter or fold_words(last_reading) or None


def _named_option(given: str, may_be_small: bool) -> str | None:
    """Return the lower-case letter of the option that ``given`` names, or None.

    A single lower-case letter without brackets counts only with ``may_be_small``. Otherwise it is
    taken as a word, such as "a".
    """
    match = _CHOSEN.fullmatch(given) or _OPTION.fullmatch(given)
    if match is None:
        return None
    letter = next(filter(None, match.groups()), "")
    is_option = may_be_small or letter.isupper() or given != letter
    return letter.casefold() if is_option else None


def _is_written_number(gold: str) -> bool:
    number = None if _DATE.search(gold) else read_number(gold)
    # A number before a capitalised word is part of a name, such as "50 Cent".
    return number is not None and not (number.unit and re.search(r"\d\s+[A-Z][a-z]", gold))


def _equals_number(given: str, gold: str) -> bool:
    truth = read_number(gold)
    # In a chain of equations (x = 1 + 2 = 3) the text after the last sign is the answer.
    answer_text = given.rsplit("=", 1)[-1].strip()
    given_number = read_number(answer_text)
    if truth is None:
        return False
    if given_number is not None:
        return is_same_number(given_number, truth)
    # A root or a power, such as sqrt(2), is accepted. An unevaluated calculation (1 + 2) is not.
    is_closed = _CLOSED_FORM.search(answer_text) and not _TO_CALCULATE.search(answer_text)
    fraction = f"\\frac{{{truth.value.numerator}}}{{{truth.value.denominator}}}"
    return bool(is_closed) and _equal_in_value(answer_text, fraction)


def _is_formula(gold: str) -> bool:
    if _COMMAND.search(gold):
        return True
    if not gold.isascii() or _DATE.search(gold) or not _FORMULA_SIGN.search(gold):
        return False
    words = re.findall(r"[A-Za-z]+", gold)
    return all(len(word) == 1 or _NAMES.fullmatch(word) for word in words)


def _same_formula(given: str, gold: str, layers: int) -> bool:
    if "".join(given.split()) == "".join(gold.split()):
        return True
    given_list, gold_list = _split_list(given), _split_list(gold)
    if gold_list is None or not layers:
        return _same_element(given, gold)
    if given_list is None or not _same_brackets(given_list, gold_list):
        return False
    brackets, gold_members = gold_list
    given_members = given_list[1]
    if len(given_members) != len(gold_members):
        return False
    if brackets in ("", "{"):
        return _same_set(given_members, gold_members, layers - 1)
    return all(
        _same_formula(given_member, gold_member, layers - 1)
        for given_member, gold_member in zip(given_members, gold_members, strict=True)
    )


def _same_element(given: str, gold: str) -> bool:
    given_number, gold_number = read_number(given), read_number(gold)
    if given_number is not None and gold_number is not None:
        return is_same_number(given_number, gold_number)
    if not _is_formula(gold) and gold_number is None:
        return _same_words(given, gold)
    return _equal_in_value(given, gold)


def _same_brackets(one: tuple[str, list[str]], other: tuple[str, list[str]]) -> bool:
    """Return True if the brackets of two lists, given as (brackets, members), are compatible.

    A list of two members may be an interval, so its brackets must be equal. For other lists, both
    or neither must have brackets, and both or neither must have braces.
    """
    if len(one[1]) == 2 or "{" in (one[0][:1], other[0][:1]):
        return one[0] == other[0]
    return bool(one[0]) == bool(other[0])


def _same_set(ours: list[str], theirs: list[str], layers: int) -> bool:
    unmatched = list(theirs)
    for member in ours:
        match = next((truth for truth in unmatched if _same_formula(member, truth, layers)), None)
        if match is None:
            return False
        unmatched.remove(match)
    return True


def _split_list(text: str) -> tuple[str, list[str]] | None:
    """Return the brackets around a list and its members, or None if ``text`` is no list.

    >>> _split_list("[0, 1)")
    ('[)', ['0', '1'])
    """
    text = _JOINED.sub(", ", text.replace("\\{", "{").replace("\\}", "}").strip())
    list_text, brackets = text, ""
    if len(text) > 1 and text[0] in _BRACKETS and text[-1] in ")]}" and _is_enclosed(text):
        list_text, brackets = text[1:-1], text[0] if text[0] == "{" else text[0] + text[-1]
    members = list(_split_at_commas(list_text))
    return (brackets, members) if len(members) > 1 or brackets == "{" else None


def _is_enclosed(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return position == len(text) - 1
    return False


def _split_at_commas(text: str) -> Iterator[str]:
    """Yield the parts of ``text`` between the commas outside of brackets."""
    depth = start = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            yield text[start:position].strip()
            start = position + 1
    yield text[start:].strip()


def _same_words(given: str, gold: str) -> bool:
    text_without_aside = given[1:-1] if given[:1] + given[-1:] == "()" else _ASIDE.sub("", given)
    if fold_words(gold) in (fold_words(given), fold_words(text_without_aside)):
        return True
    label = _LABELLED.fullmatch(gold)
    if label is None:
        return False
    letter = (label[1] or label[2]).casefold()
    label_text = fold_words(label[3])
    given_label = _LABELLED.fullmatch(given)
    if given_label is not None:
        given_letter = (given_label[1] or given_label[2]).casefold()
        return given_letter == letter and fold_words(given_label[3]) == label_text
    return _named_option(given, may_be_small=False) == letter or fold_words(given) == label_text


def _equal_in_value(given: str, gold: str) -> bool:
    if len(given) > MAX_FORMULA_LENGTH or is_too_large(given) or is_too_large(gold):
        return False
    # If the answer has an operator, such as a sum or an integral, that the truth lacks, then it is
    # an unevaluated calculation and not accepted.
    if not set(_OPERATOR.findall(given)) <= set(_OPERATOR.findall(gold)):
        return False
    # math-verify warns at each call that it has no timeout. The pool limits the time instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from math_verify import parse, verify

    parsed_answer = parse(f"\\boxed{{{given}}}", parsing_timeout=0)
    parsed_truth = parse(f"\\boxed{{{gold}}}", parsing_timeout=0)
    # A parsed result has at least two items. With fewer, math-verify could not parse the formula.
    if len(parsed_answer) < 2 or len(parsed_truth) < 2:
        return False
    return verify(parsed_truth, parsed_answer, timeout_seconds=0)
