"""Solvers of questions, which return every intermediate result.

A solver reads the text of a question, never the answer or the metadata of reasoning-gym. The number
of its steps is the difficulty that the generator drew.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate

SIDES = ("top", "right", "front", "left", "back", "bottom")
# After a rotation each side of a cycle has the colour that the next side of the cycle had.
ROTATION_CYCLES = {
    "front": (("top", "front", "bottom", "back"),),
    "right": (("top", "right", "bottom", "left"),),
    "back": (("top", "back", "bottom", "front"),),
    "left": (("top", "left", "bottom", "right"),),
    "bottom": (("top", "bottom"), ("front", "back")),
}
INTEGER_PATTERN = re.compile(r"-?[0-9]{1,9}")
CHOICE_RADIUS = 4  # admissible integers on either side of the right one
_COLOR_PATTERN = re.compile(r"^- an? (\w+) (\w+) side$", re.MULTILINE)
_ROTATION_PATTERN = re.compile(rf"\b({'|'.join(ROTATION_CYCLES)})\b")
_TARGET_PATTERN = re.compile(r"What is now the color of the (\w+) side of the cube\?")
_SUM_PATTERN = re.compile(r"following arithmetic problem: (-?\d+(?: [+-] -?\d+)*) =")
_COUNT_PATTERN = re.compile(r'times does the letter "(.)" appear in the text: "(.*)"\?')


@dataclass(frozen=True, slots=True)
class Solution:
    """Solution of a question.

    Attributes:
        generator: reasoning-gym's name of the generator.
        short_question: The question in few tokens. Each step follows its number: the steps of
            ``sum 3 #1 + 4 #2 - 1`` are ``+ 4`` and ``- 1``.
        results: Result of each step. The last one determines the answer.
        answer: The right answer.
        answer_form: Pattern of valid answers.
        choices: Some valid answers, among them the right one.
    """

    generator: str
    short_question: str
    results: tuple[str, ...]
    answer: str
    answer_form: re.Pattern[str]
    choices: tuple[str, ...]

    @property
    def situation(self) -> str:
        """Kind of the question in metrics: generator and number of steps (``chain_sum 3``)."""
        return f"{self.generator} {len(self.results)}"


def solve_cube(text: str) -> Solution | None:
    """Solve a question of ``color_cube_rotation``, which asks for a colour after rotations.

    The result of a step is the colours of the six sides after one more rotation.
    """
    target_match = _TARGET_PATTERN.search(text)
    if target_match is None:
        return None
    color_by_side = {side: color for color, side in _COLOR_PATTERN.findall(text)}
    rotations_start = [match.end() for match in _COLOR_PATTERN.finditer(text)][-1]
    rotations = _ROTATION_PATTERN.findall(text, rotations_start, target_match.start())
    target_side = target_match[1]
    start_colors = " ".join(color_by_side[side] for side in SIDES)
    results = []
    for rotation in rotations:
        previous_colors = dict(color_by_side)
        for cycle in ROTATION_CYCLES[rotation]:
            for side, next_side in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
                color_by_side[side] = previous_colors[next_side]
        results.append(" ".join(color_by_side[side] for side in SIDES))
    return Solution(
        "color_cube_rotation",
        f"cube {start_colors}{add_step_numbers(rotations)} ? {target_side}",
        tuple(results),
        color_by_side[target_side],
        re.compile("|".join(color_by_side.values())),
        tuple(sorted(color_by_side.values())),
    )


def solve_sum(text: str) -> Solution | None:
    """Solve a question of ``chain_sum``. The result of a step is the sum so far."""
    match = _SUM_PATTERN.search(text)
    if match is None:
        return None
    first_term, *signs_and_terms = match[1].split()
    operations = [
        f"{sign} {term}"
        for sign, term in zip(signs_and_terms[::2], signs_and_terms[1::2], strict=True)
    ]
    signed_terms = [int(operation.replace(" ", "")) for operation in operations]
    partial_sums = list(accumulate(signed_terms, initial=int(first_term)))
    # A sum of one term has no operation; its only result is the term.
    return _build_integer_solution(
        "chain_sum",
        f"sum {first_term}{add_step_numbers(operations)}",
        partial_sums[1:] or partial_sums,
    )


def solve_count(text: str) -> Solution | None:
    """Solve a question of ``letter_counting``, which asks how often a letter is in a text.

    The result of a step is the letter's count in all words so far.
    """
    match = _COUNT_PATTERN.search(text)
    if match is None:
        return None
    letter = match[1]
    words = match[2].lower().split()
    cumulative_counts = list(accumulate(word.count(letter) for word in words))
    spelled_words = [" ".join(word) for word in words]
    return _build_integer_solution(
        "letter_counting", f"count {letter}{add_step_numbers(spelled_words)}", cumulative_counts
    )


def _build_integer_solution(
    generator: str, short_question: str, step_values: list[int]
) -> Solution:
    results = tuple(map(str, step_values))
    choices = range(step_values[-1] - CHOICE_RADIUS, step_values[-1] + CHOICE_RADIUS + 1)
    return Solution(
        generator, short_question, results, results[-1], INTEGER_PATTERN, tuple(map(str, choices))
    )


def add_step_numbers(steps: Iterable[str]) -> str:
    """Return the steps with their numbers: ``["+ 4", "- 1"]`` gives `` #1 + 4 #2 - 1``."""
    return "".join(f" #{number} {step}" for number, step in enumerate(steps, start=1))


SOLVERS: dict[str, Callable[[str], Solution | None]] = {
    "color_cube_rotation": solve_cube,
    "chain_sum": solve_sum,
    "letter_counting": solve_count,
}


def solve_question(text: str) -> Solution:
    """Solve the question in the text of an observation. Raises ``ValueError`` without one."""
    for solver in SOLVERS.values():
        if (solution := solver(text)) is not None:
            return solution
    raise ValueError(f"text {text!r}: expected a question of {', '.join(SOLVERS)}")


def shorten_observation(text: str) -> str:
    try:
        return solve_question(text).short_question
    except ValueError:
        return text
