"""Answers as the graders of reasoning-gym are shown them.

Some graders hand an answer to Python's ``eval``, or to sympy's parser, which calls it. They see a
literal or a formula that was parsed and written again (``formulas``). Answers that a careless
grader takes for right ones earn nothing.
"""

import ast
import json
import math
import numbers
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from agent_system.environments.env_package.reasoning_gym.formulas import (
    Unreadable,
    exact_value,
    integers_in,
    parse_formula,
    parse_list,
)
from agent_system.reward_manager.scores import ROUNDING

Entry = Mapping[str, Any]
Reading = Callable[[str, Entry], str | None]
FUNCTIONS = {
    f"{arc}{name}{hyperbolic}"
    for arc in ("", "a")
    for name in ("sin", "cos", "tan", "sec", "csc", "cot")
    for hyperbolic in ("", "h")
} | {"exp", "log", "ln", "sqrt", "Abs"}
NAMES = {*"abcdefghijklmnopqrstuvwxyz", "X", "Y", "Z", "C", "pi"}
PROBABILITY_TOLERANCE = Fraction(1, 10_000)  # that of the grader
TRUTH = re.compile(r"\b(true|false)\b", re.IGNORECASE)
PROPOSITION = re.compile(
    r"[\s()\u00ac\u2227\u2228\u2192\u2194]*[A-Z][A-Z\s()\u00ac\u2227\u2228\u2192\u2194]*"
)
# A number that is not finite, as float(), complex(), Decimal() and JSON read it, for one letter
# behind it means i or j.
NOT_FINITE = re.compile(r"(?<![^\W\d_])s?(?:nan\d*|inf(?:inity)?)[ij]?(?![^\W\d_])", re.IGNORECASE)
NUMBER = re.compile(r"(?<![^\W_])\d[\d_]*\.?[\d_]*(?:e\+?[\d_]+)?", re.IGNORECASE)


def as_graded(answer: str, generator: str, entry: Entry) -> str | None:
    """Return ``answer`` as the grader of ``generator``, or of the one that a mixture took ``entry``
    from, may see it; None where it earns nothing.
    """
    if _writes_no_finite_number(answer, str(entry.get("answer", ""))):
        return None
    names = (generator, str(entry.get("metadata", {}).get("source_dataset", "")))
    readings = [READINGS[name] for name in dict.fromkeys(names) if name in READINGS]
    try:
        for reading in readings:
            shown = reading(answer, entry)
            if shown is None:
                return None
            answer = shown
    except (Unreadable, ZeroDivisionError):
        return None
    return answer


def known_answer(entry: Entry) -> str | None:
    """Return a right answer to ``entry``; None where its generator names none.

    Where several answers are right, some generators name one of them besides.
    """
    metadata = entry.get("metadata", {})
    if entry.get("answer") is not None:
        return str(entry["answer"])
    if "possible_answer" in metadata:
        return json.dumps(metadata["possible_answer"])
    return metadata.get("example_answer") or metadata.get("example_correct_answer")


def read_grade(grade: object) -> float:
    """Return what a grader gave as a number from 0 to 1; whatever else it gave is 0."""
    if not isinstance(grade, numbers.Real):
        return 0.0
    value = float(grade)
    # NaN compares false with everything.
    return min(value, 1.0) if 0.0 <= value <= 1.0 + ROUNDING else 0.0


def _writes_no_finite_number(answer: str, oracle: str) -> bool:
    """Tell whether ``answer`` writes a number that is not finite where the answer is a number.

    Graders compare with it: ``min(1, exp(-nan))`` is 1, and no distance to NaN is too large.
    """
    # To a question about words it is one of them.
    if not any(sign.isdecimal() for sign in oracle):
        return False
    return bool(NOT_FINITE.search(answer)) or any(
        not math.isfinite(_number(found)) for found in NUMBER.findall(answer)
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _arithmetic(answer: str, _entry: Entry) -> str:
    return ast.unparse(parse_formula(answer))


def _algebra(answer: str, entry: Entry) -> str:
    # An integral is its own derivative's integral: only the generator's own answer may hold one.
    own = answer.strip() == str(entry.get("answer", "")).strip()
    return ast.unparse(parse_formula(answer, NAMES, FUNCTIONS | ({"Integral"} if own else set())))


def _twenty_four(answer: str, entry: Entry) -> str | None:
    # Its grader truncates the value, and takes any four numbers.
    formula = parse_formula(answer)
    right = integers_in(formula) == sorted(entry["metadata"]["numbers"])
    return ast.unparse(formula) if right and exact_value(formula) == 24 else None


def _coin_flip(answer: str, entry: Entry) -> str | None:
    # Its grader pays a prefix in full: "0" and "0.1" are one of "0.125".
    value = exact_value(parse_formula(answer.replace(",", "")))
    right = abs(value - Fraction(str(entry["answer"]))) <= PROBABILITY_TOLERANCE
    return str(entry["answer"]) if right else None


def _list_or_exact(answer: str, entry: Entry) -> str:
    # Its grader compares first, and evaluates what is not equal.
    exact = {
        str(entry.get("answer", "")).strip(),
        *entry.get("metadata", {}).get("valid_answers", ()),
    }
    return answer.strip() if answer.strip() in exact else repr(parse_list(answer))


def _logic(answer: str, _entry: Entry) -> str | None:
    # Its grader pays a quarter for any text.
    return answer if PROPOSITION.fullmatch(answer) else None


def _truth(answer: str, entry: Entry) -> str | None:
    # Its grader takes every text for a right answer: "False" is as true to it as "True".
    said = {word.lower() for word in TRUTH.findall(answer)}
    return answer if said == {str(entry.get("answer")).lower()} else None


# Graders that evaluate what they are shown, and how an answer is read for them.
EVALUATED: dict[str, Reading] = {
    "binary_matrix": _list_or_exact,
    "countdown": _arithmetic,
    "intermediate_integration": _algebra,
    "n_queens": _list_or_exact,
    "polynomial_multiplication": _algebra,
    "puzzle24": _twenty_four,
    "simple_integration": _algebra,
    "spiral_matrix": _list_or_exact,
    "string_insertion": _list_or_exact,
}
READINGS = EVALUATED | {
    "coin_flip": _coin_flip,
    "game_of_life_halting": _truth,
    "propositional_logic": _logic,
}
