"""Checks of answers before the graders of reasoning-gym see them.

Some graders pass an answer to Python's ``eval``, or to sympy's parser, which calls ``eval``. They
receive only a literal or a formula that was parsed and written again (``formulas``). Wrong answers
that a grader would accept by mistake get a grade of 0.
"""

import ast
import json
import math
import numbers
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from agent_system.environments.env_package.reasoning_gym import formulas
from agent_system.reward_manager.scores import ROUNDING_TOLERANCE

Entry = Mapping[str, Any]
AnswerReader = Callable[[str, Entry], str | None]
ALGEBRA_FUNCTIONS = {
    f"{arc}{name}{hyperbolic}"
    for arc in ("", "a")
    for name in ("sin", "cos", "tan", "sec", "csc", "cot")
    for hyperbolic in ("", "h")
} | {"exp", "log", "ln", "sqrt", "Abs"}
ALGEBRA_NAMES = {*"abcdefghijklmnopqrstuvwxyz", "X", "Y", "Z", "C", "pi"}
PROBABILITY_TOLERANCE = Fraction(1, 10_000)  # the same as in the grader
TRUTH = re.compile(r"\b(true|false)\b", re.IGNORECASE)
PROPOSITION = re.compile(
    r"[\s()\u00ac\u2227\u2228\u2192\u2194]*[A-Z][A-Z\s()\u00ac\u2227\u2228\u2192\u2194]*"
)
# A number that is not finite, as float(), complex(), Decimal() and JSON read it. One letter i or j
# may follow.
NOT_FINITE = re.compile(r"(?<![^\W\d_])s?(?:nan\d*|inf(?:inity)?)[ij]?(?![^\W\d_])", re.IGNORECASE)
_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?=\d)")
_SPACED_DIGITS = re.compile(r"(?<=\d) (?=\d)")
_PREAMBLE = re.compile(r"^[^:\n]{20,}:\s*")  # "State the final answer to the following problem: "
NUMBER = re.compile(r"(?<![^\W_])\d[\d_]*\.?[\d_]*(?:e\+?[\d_]+)?", re.IGNORECASE)


def prepare_answer(answer: str, generator: str, entry: Entry) -> str | None:
    """Return ``answer`` rewritten so that the grader of ``generator`` can safely evaluate it.

    Return None if the answer must get a grade of 0. ``entry`` is the question. In a composite data
    set its metadata names a second generator, for whose grader the answer must be safe too.
    """
    if _has_non_finite_number(answer, str(entry.get("answer", ""))):
        return None
    names = (generator, str(entry.get("metadata", {}).get("source_dataset", "")))
    readings = [ANSWER_READERS[name] for name in dict.fromkeys(names) if name in ANSWER_READERS]
    try:
        for reading in readings:
            prepared = reading(answer, entry)
            if prepared is None:
                return None
            answer = prepared
    except (formulas.UnreadableFormula, ZeroDivisionError):
        return None
    return answer


def find_right_answer(entry: Entry) -> str | None:
    """Return a right answer to question ``entry``, or None if its generator states none.

    For questions with several right answers, some generators state one of them in the metadata.
    """
    metadata = entry.get("metadata", {})
    if entry.get("answer") is not None:
        return str(entry["answer"])
    if "possible_answer" in metadata:
        return json.dumps(metadata["possible_answer"])
    return metadata.get("example_answer") or metadata.get("example_correct_answer")


def separate_digits(text: str) -> str:
    """Separate digits and drop the sentence before a colon: ``12 + 3 =`` gives ``1 2 + 3 =``.

    It is for policies whose vocabulary does not contain all numbers.
    """
    return _BETWEEN_DIGITS.sub(" ", _PREAMBLE.sub("", text))


def join_digits(text: str) -> str:
    """Join digits that are separated by one space: ``1 5`` gives ``15``."""
    return _SPACED_DIGITS.sub("", text)


def convert_grade(grade: object) -> float:
    """Convert a grader's result to a number from 0 to 1. Invalid results become 0."""
    if not isinstance(grade, numbers.Real):
        return 0.0
    value = float(grade)
    # Comparisons with NaN are false, so NaN becomes 0.
    return min(value, 1.0) if 0.0 <= value <= 1.0 + ROUNDING_TOLERANCE else 0.0


def _has_non_finite_number(answer: str, oracle: str) -> bool:
    """Return True if ``answer`` contains NaN or infinity although the right answer ``oracle`` is a
    number.

    Graders would accept such an answer: in Python ``min(1, nan)`` is 1, and a comparison such as
    ``distance > limit`` is False for NaN.
    """
    # If the right answer has no digits, "nan" or "inf" is an ordinary word.
    if not any(character.isdecimal() for character in oracle):
        return False
    return bool(NOT_FINITE.search(answer)) or any(
        not math.isfinite(_parse_number(number_text)) for number_text in NUMBER.findall(answer)
    )


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _read_arithmetic(answer: str, _entry: Entry) -> str:
    return ast.unparse(formulas.parse_formula(answer))


def _read_algebra(answer: str, entry: Entry) -> str:
    # The grader differentiates the answer. It would accept the question itself as an unevaluated
    # ``Integral``, so that function is allowed only if the generator's answer contains it.
    is_oracle = answer.strip() == str(entry.get("answer", "")).strip()
    return ast.unparse(
        formulas.parse_formula(
            answer, ALGEBRA_NAMES, ALGEBRA_FUNCTIONS | ({"Integral"} if is_oracle else set())
        )
    )


def _read_twenty_four(answer: str, entry: Entry) -> str | None:
    # The grader of this generator truncates the value to an integer, and it does not check that the
    # four given numbers are used.
    formula = formulas.parse_formula(answer)
    uses_given_numbers = formulas.integers_in(formula) == sorted(entry["metadata"]["numbers"])
    is_right = uses_given_numbers and formulas.exact_value(formula) == 24
    return ast.unparse(formula) if is_right else None


def _read_coin_flip(answer: str, entry: Entry) -> str | None:
    # The grader of this generator accepts a prefix of the right text: "0" and "0.1" for "0.125".
    value = formulas.exact_value(formulas.parse_formula(answer.replace(",", "")))
    is_close = abs(value - Fraction(str(entry["answer"]))) <= PROBABILITY_TOLERANCE
    return str(entry["answer"]) if is_close else None


def _read_list_or_exact(answer: str, entry: Entry) -> str:
    # The grader of these generators calls ``eval`` on an answer unequal to the right text.
    right_texts = {
        str(entry.get("answer", "")).strip(),
        *entry.get("metadata", {}).get("valid_answers", ()),
    }
    return answer.strip() if answer.strip() in right_texts else repr(formulas.parse_list(answer))


def _read_proposition(answer: str, _entry: Entry) -> str | None:
    # The grader of this generator gives 0.25 for any text.
    return answer if PROPOSITION.fullmatch(answer) else None


def _read_truth_value(answer: str, entry: Entry) -> str | None:
    # The grader of this generator accepts every text, also "False" where "True" is right.
    truth_values = {word.lower() for word in TRUTH.findall(answer)}
    return answer if truth_values == {str(entry.get("answer")).lower()} else None


# By name of a generator whose grader evaluates answers: the function that makes an answer safe.
EVALUATED_READERS: dict[str, AnswerReader] = {
    "binary_matrix": _read_list_or_exact,
    "countdown": _read_arithmetic,
    "intermediate_integration": _read_algebra,
    "n_queens": _read_list_or_exact,
    "polynomial_multiplication": _read_algebra,
    "puzzle24": _read_twenty_four,
    "simple_integration": _read_algebra,
    "spiral_matrix": _read_list_or_exact,
    "string_insertion": _read_list_or_exact,
}
ANSWER_READERS = EVALUATED_READERS | {
    "coin_flip": _read_coin_flip,
    "game_of_life_halting": _read_truth_value,
    "propositional_logic": _read_proposition,
}
