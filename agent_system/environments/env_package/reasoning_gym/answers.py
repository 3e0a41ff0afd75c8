"""Checks of answers, which run before the graders of reasoning-gym.

Some graders pass an answer to Python's ``eval``, or to sympy's parser, which calls ``eval``. Such
answers are parsed first (module ``formulas``). The grader receives a text made from the parsed
value. Wrong answers that a grader would accept by mistake get a grade of 0.
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

QuestionEntry = Mapping[str, Any]
AnswerSanitizer = Callable[[str, QuestionEntry], str | None]
ALGEBRA_FUNCTIONS = {
    f"{arc_prefix}{name}{hyperbolic_suffix}"
    for arc_prefix in ("", "a")
    for name in ("sin", "cos", "tan", "sec", "csc", "cot")
    for hyperbolic_suffix in ("", "h")
} | {"exp", "log", "ln", "sqrt", "Abs"}
ALGEBRA_NAMES = {*"abcdefghijklmnopqrstuvwxyz", "X", "Y", "Z", "C", "pi"}
PROBABILITY_TOLERANCE = Fraction(1, 10_000)  # tolerance of the grader of ``coin_flip``
TRUTH_WORD = re.compile(r"\b(true|false)\b", re.IGNORECASE)
_NEGATION = re.compile(r"\bnot\b|n't\b", re.IGNORECASE)
_SIGNED_NUMBER = re.compile(r"[-\u2212]?\d")
# An answer may have ten times the characters of the right one, plus this number. Some graders
# compare two long texts in quadratic time.
MAX_EXTRA_CHARACTERS = 20_000
PROPOSITION_PATTERN = re.compile(
    r"[\s()\u00ac\u2227\u2228\u2192\u2194]*[A-Z][A-Z\s()\u00ac\u2227\u2228\u2192\u2194]*"
)
# NaN or infinity as float(), complex(), Decimal() or JSON accepts it: nan, snan, infinity, infj.
NON_FINITE_NUMBER = re.compile(
    r"(?<![^\W\d_])s?(?:nan\d*|inf(?:inity)?)[ij]?(?![^\W\d_])", re.IGNORECASE
)
_POSITION_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?=\d)")
_SPACE_BETWEEN_DIGITS = re.compile(r"(?<=\d) (?=\d)")
# Introduction of a question, such as "State the final answer to the following problem: ".
_INTRODUCTION = re.compile(r"^[^:\n]{20,}:\s*")
FINITE_NUMBER_PATTERN = re.compile(r"(?<![^\W_])\d[\d_]*\.?[\d_]*(?:e\+?[\d_]+)?", re.IGNORECASE)


def sanitize_answer(answer: str, generator: str, entry: QuestionEntry) -> str | None:
    """Return a text that the grader can evaluate safely, or None for a grade of 0.

    ``answer`` is the text of the policy, and ``entry`` the question. Questions of the generator
    ``composite`` come from another generator. The answer is then made safe for both graders.
    """
    right_answer = str(entry.get("answer", ""))
    if len(answer) > MAX_EXTRA_CHARACTERS + 10 * len(right_answer):
        return None
    if _has_non_finite_number(answer, right_answer):
        return None
    generator_names = (generator, str(entry.get("metadata", {}).get("source_dataset", "")))
    answer_sanitizers = [
        ANSWER_SANITIZERS[name]
        for name in dict.fromkeys(generator_names)
        if name in ANSWER_SANITIZERS
    ]
    try:
        for answer_sanitizer in answer_sanitizers:
            safe_answer = answer_sanitizer(answer, entry)
            if safe_answer is None:
                return None
            answer = safe_answer
    except (formulas.UnreadableFormulaError, ZeroDivisionError):
        return None
    return answer


def find_right_answer(entry: QuestionEntry) -> str | None:
    """Return a right answer to the question ``entry``, or None if the generator provides none.

    If several answers are right, some generators store one of them in the metadata.
    """
    metadata = entry.get("metadata", {})
    if entry.get("answer") is not None:
        return str(entry["answer"])
    if "possible_answer" in metadata:
        return json.dumps(metadata["possible_answer"])
    return metadata.get("example_answer") or metadata.get("example_correct_answer")


def separate_digits(text: str) -> str:
    """Separate digits by spaces and remove an introduction, which ends with a colon.

    Example: ``12 + 3 =`` gives ``1 2 + 3 =``, for policies whose vocabulary contains digits but not
    all numbers.
    """
    return _POSITION_BETWEEN_DIGITS.sub(" ", _INTRODUCTION.sub("", text))


def join_digits(text: str) -> str:
    """Join digits that are separated by one space: ``1 5`` gives ``15``."""
    return _SPACE_BETWEEN_DIGITS.sub("", text)


def normalize_grade(grade: object) -> float:
    """Convert a grader's result to a number from 0 to 1. Invalid results become 0."""
    if not isinstance(grade, numbers.Real):
        return 0.0
    value = float(grade)
    # Comparisons with NaN are false, so NaN becomes 0.
    return min(value, 1.0) if 0.0 <= value <= 1.0 + ROUNDING_TOLERANCE else 0.0


def _has_non_finite_number(answer: str, right_answer: str) -> bool:
    """Return True if ``right_answer`` contains a number, and ``answer`` NaN or infinity.

    Some graders accept such answers: in Python ``min(1, nan)`` is 1, and a comparison such as
    ``distance > limit`` is False for NaN.
    """
    # If the right answer contains no digit, "nan" and "inf" in ``answer`` are words.
    if not any(character.isdecimal() for character in right_answer):
        return False
    return bool(NON_FINITE_NUMBER.search(answer)) or any(
        not math.isfinite(_parse_number(number_text))
        for number_text in FINITE_NUMBER_PATTERN.findall(answer)
    )


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _rewrite_arithmetic(answer: str, _entry: QuestionEntry) -> str:
    return ast.unparse(formulas.parse_formula(answer))


def _rewrite_algebra(answer: str, entry: QuestionEntry) -> str:
    # The grader differentiates the answer, so it would accept the ``Integral`` of the question as
    # answer. Allow this function only in the answer of the generator.
    is_generator_answer = answer.strip() == str(entry.get("answer", "")).strip()
    return ast.unparse(
        formulas.parse_formula(
            answer,
            ALGEBRA_NAMES,
            ALGEBRA_FUNCTIONS | ({"Integral"} if is_generator_answer else set()),
        )
    )


def _rewrite_if_twenty_four(answer: str, entry: QuestionEntry) -> str | None:
    # Check the answer here: the grader truncates its value to an integer, and does not require that
    # the four given numbers are used.
    formula = formulas.parse_formula(answer)
    uses_given_numbers = formulas.list_integers(formula) == sorted(entry["metadata"]["numbers"])
    is_right = uses_given_numbers and formulas.compute_value(formula) == 24
    return ast.unparse(formula) if is_right else None


def _rewrite_probability(answer: str, entry: QuestionEntry) -> str | None:
    # Check the answer here: the grader accepts prefixes, such as "0.1" if "0.125" is right.
    probability = formulas.compute_value(formulas.parse_formula(answer.replace(",", "")))
    is_close = abs(probability - Fraction(str(entry["answer"]))) <= PROBABILITY_TOLERANCE
    return str(entry["answer"]) if is_close else None


def _rewrite_as_list_literal(answer: str, entry: QuestionEntry) -> str:
    # The graders of these generators call ``eval`` on every answer that is not the right text.
    right_texts = {
        str(entry.get("answer", "")).strip(),
        *entry.get("metadata", {}).get("valid_answers", ()),
    }
    return answer.strip() if answer.strip() in right_texts else repr(formulas.parse_list(answer))


def _reject_non_proposition(answer: str, _entry: QuestionEntry) -> str | None:
    # The grader gives 0.25 for any text, so accept only propositions.
    return answer if PROPOSITION_PATTERN.fullmatch(answer) else None


def _reject_wrong_truth_value(answer: str, entry: QuestionEntry) -> str | None:
    # Check the answer here: the grader accepts every text, even "False" if "True" is right.
    truth_values = {word.lower() for word in TRUTH_WORD.findall(answer)}
    is_right = truth_values == {str(entry.get("answer")).lower()}
    return answer if is_right and not _NEGATION.search(answer) else None


def _reject_wrong_sign(answer: str, entry: QuestionEntry) -> str | None:
    # The grader drops a minus sign, so "-5" would be right if "5" is.
    number = _SIGNED_NUMBER.search(answer)
    has_minus = number is not None and len(number[0]) > 1
    return answer if has_minus == str(entry.get("answer")).startswith("-") else None


# For generators whose grader evaluates answers: the function that makes an answer safe.
SANITIZERS_OF_EVALUATED_ANSWERS: dict[str, AnswerSanitizer] = {
    "binary_matrix": _rewrite_as_list_literal,
    "countdown": _rewrite_arithmetic,
    "intermediate_integration": _rewrite_algebra,
    "n_queens": _rewrite_as_list_literal,
    "polynomial_multiplication": _rewrite_algebra,
    "puzzle24": _rewrite_if_twenty_four,
    "simple_integration": _rewrite_algebra,
    "spiral_matrix": _rewrite_as_list_literal,
    "string_insertion": _rewrite_as_list_literal,
}
ANSWER_SANITIZERS = SANITIZERS_OF_EVALUATED_ANSWERS | {
    "coin_flip": _rewrite_probability,
    "game_of_life_halting": _reject_wrong_truth_value,
    "gsm_symbolic": _reject_wrong_sign,
    "propositional_logic": _reject_non_proposition,
}
