"""Results of all mutants, kept in .mutants/ between runs and written to ``results.md``."""

import ast
import hashlib
import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from scripts.dev.mutants.generate import Mutant
from scripts.dev.mutants.targets import ROOT, Target

FOLDER = ROOT / ".mutants"
REASONS = Path(__file__).with_name("reasons.toml")
PAGE = Path(__file__).with_name("results.md")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class MutantResult:
    """Result of one mutant."""

    key: str  # ``Mutant.stable_key``
    # `killed`, `timeout` or `died` (these count as killed), `survived`, or `broken`: it did not run
    fate: str
    test: str  # test that failed
    tests_hash: str
    seconds: float


class Results:
    """File with one JSON line per result. If a mutant has several lines, the last one is used."""

    def __init__(self, path: Path = FOLDER / "results.jsonl") -> None:
        path.parent.mkdir(exist_ok=True)
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        results = [MutantResult(**json.loads(line)) for line in lines]
        self._results_by_key = {result.key: result for result in results}

    def add(self, result: MutantResult) -> None:
        """Append one result to the file."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        self._results_by_key[result.key] = result

    def get(self, mutant: Mutant) -> MutantResult | None:
        """Return the result of ``mutant``, or None if there is none."""
        return self._results_by_key.get(mutant.stable_key)

    def select_pending(self, mutants: Iterable[Mutant], tests_hash: str) -> list[Mutant]:
        """Return the mutants without a valid result, and survivors whose tests have changed."""
        pending_mutants = []
        for mutant in mutants:
            result = self.get(mutant)
            is_outdated = result is not None and result.tests_hash != tests_hash
            fate = None if result is None else result.fate
            if fate in (None, "broken") or (fate == "survived" and is_outdated):
                pending_mutants.append(mutant)
        return pending_mutants


def hash_tests(target: Target) -> str:
    """Return a hash of ``target``, its test files and the test helpers."""
    digest = hashlib.sha256(repr(target).encode())
    for relative_path in (*target.list_test_paths(), "tests/helpers"):
        path = ROOT / relative_path
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class AcceptedMutants:
    """Surviving mutants of a function that are accepted, and the reason."""

    module: str
    function: str
    changes: list[str]  # in the form ``before -> after``
    reason: str


def read_accepted_mutants() -> list[AcceptedMutants]:
    """Return the accepted surviving mutants of ``reasons.toml``."""
    return [AcceptedMutants(**entry) for entry in tomllib.loads(REASONS.read_text())["survivor"]]


def find_outdated_changes(
    reasons: Iterable[AcceptedMutants], root: Path = ROOT
) -> list[tuple[AcceptedMutants, str]]:
    """Return (reason, change) for each accepted mutant whose original code no longer exists."""
    return [
        (reason, change)
        for reason in reasons
        for change in reason.changes
        if not _contains_old_code(
            _read_function_text(root / reason.module, reason.function), change
        )
    ]


def _contains_old_code(text: str, change: str) -> bool:
    # The code itself may contain an arrow, so try each one as the end of the old code.
    arrow_separated_parts = change.split(" -> ")
    return any(
        " -> ".join(arrow_separated_parts[:num_parts]) in text
        for num_parts in range(1, len(arrow_separated_parts))
    )


def _read_function_text(path: Path, qualified_name: str) -> str:
    """Return a function, or the whole file (``module``), as one line without indentation.

    The result is empty if there is no such file or function.
    """
    if not path.exists():
        return ""
    source = path.read_text()
    node: ast.AST | None = ast.parse(source)
    first_line, last_line = 1, len(source.splitlines())
    for name in [] if qualified_name == "module" else qualified_name.split("."):
        inner_definitions = {
            definition.name: definition
            for definition in ast.walk(node)
            if isinstance(definition, DEFINITIONS)
        }
        node = inner_definitions.get(name)
        if node is None:
            return ""
        first_line, last_line = node.lineno, node.end_lineno or node.lineno
    lines = source.splitlines()[first_line - 1 : last_line]
    return " ".join(line.strip() for line in lines)


def format_change(mutant: Mutant) -> str:
    """Return the change as ``before -> after``, with a few unchanged words around it."""
    old_code = mutant.before
    new_code = mutant.after
    prefix_len = 0
    while (
        prefix_len < min(len(old_code), len(new_code))
        and old_code[prefix_len] == new_code[prefix_len]
    ):
        prefix_len += 1
    suffix_len = 0
    max_suffix_len = min(len(old_code), len(new_code)) - prefix_len
    while suffix_len < max_suffix_len and old_code[-1 - suffix_len] == new_code[-1 - suffix_len]:
        suffix_len += 1
    context_start = old_code.rfind(" ", 0, max(0, prefix_len - 24)) + 1
    old_context_end = _find_word_end(old_code, len(old_code) - suffix_len + 16)
    new_context_end = old_context_end - len(old_code) + len(new_code)
    return f"{old_code[context_start:old_context_end]} -> {new_code[context_start:new_context_end]}"


def _find_word_end(text: str, position: int) -> int:
    space_position = text.find(" ", min(position, len(text)))
    return len(text) if space_position < 0 else space_position


@dataclass(frozen=True)
class ModuleRow:
    """Table row of a module: numbers of mutants, and its survivors."""

    module: str
    mutants: int
    killed: int
    unknown: int  # mutants without a result
    survivors: tuple[Mutant, ...]


def count_outcomes(module: str, mutants: Sequence[Mutant], results: Results) -> ModuleRow:
    """Count the killed, surviving and untested mutants of ``module``."""
    survivors = []
    num_unknown = 0
    for mutant in mutants:
        result = results.get(mutant)
        if result is None or result.fate == "broken":
            num_unknown += 1
        elif result.fate == "survived":
            survivors.append(mutant)
    num_killed = len(mutants) - num_unknown - len(survivors)
    return ModuleRow(module, len(mutants), num_killed, num_unknown, tuple(survivors))


def is_accepted(mutant: Mutant, reasons: Iterable[AcceptedMutants]) -> bool:
    """Return True if ``reasons`` accepts ``mutant``, although no test fails because of it."""
    function = mutant.function.partition("#")[0] or "module"
    change = format_change(mutant)
    return any(
        (reason.module, reason.function) == (mutant.module, function) and change in reason.changes
        for reason in reasons
    )


HEAD = """\
# Do the tests notice a wrong line?

`make mutants` changes one thing at a time in the modules below (a sign, a bound, a constant, an
argument) and runs the fast unit tests that reach the changed line. A mutant is *killed* when one of
them fails. This page is written by `make mutants`. The survivors, and the reason why each is
accepted, are in `scripts/dev/mutants/reasons.toml`.

The changes are mutmut's. Not changed are texts that people read (docstrings, messages of errors and
logs, strings with a space), annotations, decorators, the sign of a literal `-1` (its number is
changed), the `strict` of `zip`, and `device` arguments, which have no effect without an
accelerator. mutmut's runner skips every decorated function. So `scripts/dev/mutants` runs the
mutants itself, in forks of a process that has imported torch and collected the tests.
`scripts/dev/mutants/__init__.py` shows the processes.
"""


def format_page(rows: Sequence[ModuleRow], reasons: Sequence[AcceptedMutants]) -> str:
    """Return the Markdown page of all modules, with the reasons why mutants survive."""
    lines = [
        HEAD,
        f"Measured on {date.today()}. Later changes of the code are not measured.\n",
        "| module | mutants | killed | survivors | killed, % |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(_format_table_line(f"`{row.module}`", [row]))
    lines.append(_format_table_line("**all**", rows))
    unexplained_survivors = [
        mutant for row in rows for mutant in row.survivors if not is_accepted(mutant, reasons)
    ]
    if unexplained_survivors:
        lines += ["", "## Survivors without a reason", ""]
    for mutant in unexplained_survivors:
        function = mutant.function or "module"
        lines.append(f"- {mutant.module}, `{function}`: `{format_change(mutant)}`")
    return "\n".join(lines) + "\n"


def _format_table_line(name: str, rows: Sequence[ModuleRow]) -> str:
    num_mutants = sum(row.mutants for row in rows)
    num_killed = sum(row.killed for row in rows)
    num_survivors = sum(len(row.survivors) for row in rows)
    killed_percent = 100 * num_killed / num_mutants if num_mutants else 100.0
    return f"| {name} | {num_mutants:,} | {num_killed:,} | {num_survivors} | {killed_percent:.1f} |"
