"""Which answers may be graded: some graders of reasoning-gym hand them to Python's ``eval``, or to
sympy's parser, which does so as well.

An answer to such a generator is graded only where it is made of what a right one is made of. Others
earn nothing, and neither do answers that a careless grader takes for right ones.
"""

import re
from typing import Any

# Numbers, operators, brackets.
ARITHMETIC = re.compile(r"[\d\s+\-*/().=]*")
_FUNCTIONS = "a?(?:sin|cos|tan|sec|csc|cot)h?|exp|log|ln|sqrt|Abs|Integral|pi"
# The same with variables of one letter and functions by name; no letter after a dot: no attribute.
ALGEBRA = re.compile(
    r"(?:[\d\s+\-*/(),^=|]|\.(?![A-Za-z_])|(?<![A-Za-z_.])(?:[A-Za-z]|FUNCTIONS)(?!\w))*".replace(
        "FUNCTIONS", _FUNCTIONS
    )
)
# Texts and lists of them: nothing that calls or reaches into things.
LISTS = re.compile(r"(?:[^()*=:{}\\_.]|_(?!_)|\.(?![A-Za-z_]))*")
EVALUATED = {
    "countdown": ARITHMETIC,
    "puzzle24": ARITHMETIC,
    "intermediate_integration": ALGEBRA,
    "polynomial_multiplication": ALGEBRA,
    "simple_integration": ALGEBRA,
    "binary_matrix": LISTS,
    "n_queens": LISTS,
    "spiral_matrix": LISTS,
    "string_insertion": LISTS,
}
# Powers of powers, and powers of thousands, take for ever and all memory.
TOWER = re.compile(r"\*\*\s*[\w.]+\s*\*\*|\*\*\s*\([^)]*\*|\*\*\s*\d{4}")
# Its grader takes every text for a right answer: "False" is as true to it as "True".
TRUTH = "game_of_life_halting"
_TRUTH = re.compile(r"\b(true|false)\b", re.IGNORECASE)


def as_graded(answer: str, generator: str, entry: dict[str, Any]) -> str | None:
    """What the grader of ``generator``, or of the one that a mixture took ``entry`` from, is shown
    of ``answer``; None where it may not see it.
    """
    names = (generator, str(entry.get("metadata", {}).get("source_dataset", "")))
    if TRUTH in names:
        said = {word.lower() for word in _TRUTH.findall(answer)}
        return answer if said == {str(entry["answer"]).lower()} else None
    known = [EVALUATED[name] for name in names if name in EVALUATED]
    if known and TOWER.search(answer):
        return None
    return answer if all(pattern.fullmatch(answer) for pattern in known) else None
