"""Measure the code itself: size, air, types and cycles of imports, as one table.

    python scripts/dev/measure_code.py

Counted are the packages and ``scripts``, not the tests. A line of code is neither blank nor a
comment nor part of a docstring; its characters are counted without indentation. A package is in a
cycle when imports lead from it back to itself over other packages of the same depth. The
composition root (``verl.trainer.launch`` and the entry points above it) is where the packages are
joined, so it is shown as a package of its own.
"""

import ast
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("verl", "agent_system", "rlvcr")
COMPOSITION_ROOT = ("verl.trainer.launch", "verl.trainer.main_", "verl.doctor")
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Tally:
    """Counts over all files."""

    file_lines: list[int] = field(default_factory=list)
    function_lines: list[int] = field(default_factory=list)
    nesting: int = 0
    code_lines: int = 0
    characters: int = 0
    comments: int = 0
    tuple_assignments: int = 0
    parameters: int = 0
    parameters_any: int = 0


def source_files() -> list[Path]:
    """Python files of the packages and of ``scripts``."""
    folders = (*PACKAGES, "scripts", "experiments")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines that docstrings take."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def depth_of(node: ast.AST, depth: int = 0) -> int:
    """How deeply blocks are nested below ``node``, functions inside it left out."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            continue
        deepest = max(deepest, depth_of(child, depth + isinstance(child, BLOCKS)))
    return deepest


def measure(path: Path, tally: Tally) -> None:
    """Add the file ``path`` to ``tally``."""
    text = path.read_text()
    tree = ast.parse(text)
    documentation = docstring_lines(tree)
    lines = text.splitlines()
    tally.file_lines.append(len(lines))
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        # By how a line begins: lines of a text that begin so count as well, which is rare.
        if stripped.startswith("#"):
            tally.comments += 1
        elif stripped and number not in documentation:
            tally.code_lines += 1
            tally.characters += len(stripped)
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            tally.function_lines.append((node.end_lineno or node.lineno) - node.lineno + 1)
            tally.nesting = max(tally.nesting, depth_of(node))
        elif isinstance(node, ast.Assign):
            # A target and a value that are both tuples: several statements in one. Unpacking what a
            # call returns has no tuple on the right, and is not counted.
            both = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
            tally.tuple_assignments += both
        elif isinstance(node, ast.arg) and node.annotation is not None:
            tally.parameters += 1
            # Exactly ``Any``: ``dict[str, Any]`` and ``Any | None`` say something, and are not
            # counted.
            is_any = isinstance(node.annotation, ast.Name) and node.annotation.id == "Any"
            tally.parameters_any += is_any


def room(module: str, depth: int) -> str:
    """The package of ``module`` at ``depth``; the composition root stands for itself."""
    if module.startswith(COMPOSITION_ROOT):
        return "(composition root)"
    return ".".join(module.split(".")[:depth])


def packages_in_a_cycle(graph: grimp.ImportGraph, depth: int) -> tuple[list[str], int]:
    """Packages of ``depth`` that import each other in a circle, and how many packages there are."""
    imports: dict[str, set[str]] = {}
    for module in graph.modules:
        own = room(module, depth)
        imports.setdefault(own, set())
        for imported in graph.find_modules_directly_imported_by(module):
            other = room(imported, depth)
            if other != own:
                imports[own].add(other)
    found = [name for name in imports if name in reachable(imports, name)]
    packages = {name for name in imports if (ROOT / name.replace(".", "/")).is_dir()}
    return sorted(packages & set(found)), len(packages)


def reachable(imports: dict[str, set[str]], start: str) -> set[str]:
    """Everything that imports lead to from ``start``, over any number of steps."""
    seen: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        waiting.extend(imports.get(name, ()))
    return seen


def rows(tally: Tally) -> Iterator[tuple[str, str]]:
    """The table, a label and a value per line."""
    functions = sorted(tally.function_lines)
    lines = sum(tally.file_lines)
    yield "files / lines", f"{len(tally.file_lines)} / {lines:,}"
    files = sorted(tally.file_lines)
    median = statistics.median(files)
    yield "file median / p90 / max", f"{median:.0f} / {files[len(files) * 9 // 10]} / {files[-1]}"
    middle = statistics.median(functions)
    p99 = functions[len(functions) * 99 // 100]
    yield "function median / p99 / max", f"{middle:.0f} / {p99} / {functions[-1]}"
    yield "deepest nesting", str(tally.nesting)
    yield "characters per line of code", f"{tally.characters / tally.code_lines:.1f}"
    per_thousand = 1000 * tally.tuple_assignments / tally.code_lines
    yield "tuple assignments per 1,000 lines", f"{per_thousand:.1f}"
    yield "whole-line comments", f"{100 * tally.comments / lines:.1f}%"
    share = 100 * tally.parameters_any / tally.parameters
    yield "parameters typed Any", f"{tally.parameters_any} of {tally.parameters:,} ({share:.1f}%)"


def main() -> int:
    """Print the table."""
    tally = Tally()
    for path in source_files():
        measure(path, tally)
    for label, value in rows(tally):
        print(f"{label:<36}{value}")
    sys.path.insert(0, str(ROOT))
    # Imports that only type checkers see bind nothing at run time.
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    for depth in (1, 2, 3):
        found, count = packages_in_a_cycle(graph, depth)
        names = f"  {', '.join(found)}" if found else ""
        print(f"{f'packages in a cycle, depth {depth}':<36}{len(found)} of {count}{names}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
