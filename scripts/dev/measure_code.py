"""Measure the code: sizes of files and functions, line density, types and imports, as a table.

    python scripts/dev/measure_code.py

The tests are not counted. Blank lines, comments and docstrings are no lines of code. Characters of
a line are counted without indentation. A package is in a cycle if it imports itself through other
packages of the same depth (``verl`` has depth 1, ``verl.utils`` depth 2). The composition root
(``verl.trainer.launch`` and the entry points above it) imports all packages, so it counts as a
separate package. A PPO run imports ``verl.trainer.launch.ppo``. A test checks that this import
loads at most ``MAX_LOADED_MODULES`` modules of this repository.
"""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("verl", "agent_system", "rlvcr")
COMPOSITION_ROOT = ("verl.trainer.launch", "verl.trainer.main_", "verl.doctor")
PPO_RUN_MODULE = "verl.trainer.launch.ppo"
MAX_LOADED_MODULES = 200
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Tally:
    """Counts and sizes, summed over all measured files."""

    file_lines: list[int] = field(default_factory=list)
    function_lines: list[int] = field(default_factory=list)
    max_nesting: int = 0
    code_lines: int = 0
    code_characters: int = 0
    comment_lines: int = 0
    tuple_assignments: int = 0
    typed_parameters: int = 0
    any_parameters: int = 0


def list_source_files() -> list[Path]:
    """Return the Python files of the packages, ``scripts`` and ``experiments``."""
    folders = (*PACKAGES, "scripts", "experiments")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def find_docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.Constant]]:
    """Yield each module, class and function that has a docstring, with the docstring."""
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            continue
        match node.body[:1]:
            case [ast.Expr(value=ast.Constant(value=str()) as docstring)]:
                yield node, docstring


def compute_nesting_depth(node: ast.AST, depth: int = 0) -> int:
    """Return the nesting depth of the blocks in ``node``, without functions and classes inside it.

    An ``elif`` has the depth of its ``if``.
    """
    max_depth = depth
    elifs = node.orelse if isinstance(node, ast.If) and len(node.orelse) == 1 else []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            continue
        is_elif = isinstance(child, ast.If) and child in elifs
        max_depth = max(
            max_depth,
            compute_nesting_depth(child, depth + (isinstance(child, BLOCKS) and not is_elif)),
        )
    return max_depth


def measure_file(path: Path, tally: Tally) -> None:
    """Add the counts and sizes of the file ``path`` to ``tally``."""
    text = path.read_text()
    tree = ast.parse(text)
    docstring_lines: set[int] = set()
    for _, docstring in find_docstrings(tree):
        docstring_lines.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    lines = text.splitlines()
    tally.file_lines.append(len(lines))
    for line_number, line in enumerate(lines, 1):
        stripped_line = line.strip()
        # Lines inside a string that begin with # are counted too, but they are rare.
        if stripped_line.startswith("#"):
            tally.comment_lines += 1
        elif stripped_line and line_number not in docstring_lines:
            tally.code_lines += 1
            tally.code_characters += len(stripped_line)
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            tally.function_lines.append((node.end_lineno or node.lineno) - node.lineno + 1)
            tally.max_nesting = max(tally.max_nesting, compute_nesting_depth(node))
        match node:
            # An assignment of a tuple to a tuple is several statements in one line.
            case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
                tally.tuple_assignments += 1
            case ast.arg(annotation=ast.expr() as annotation):
                tally.typed_parameters += 1
                # Count ``Any`` alone, not ``dict[str, Any]`` or ``Any | None``.
                tally.any_parameters += ast.unparse(annotation) == "Any"


def get_package_at_depth(module: str, depth: int) -> str:
    """Return the first ``depth`` parts of ``module``: ``verl.utils.files`` gives ``verl.utils``."""
    if module.startswith(COMPOSITION_ROOT):
        return "(composition root)"
    return ".".join(module.split(".")[:depth])


def find_cyclic_packages(graph: grimp.ImportGraph, depth: int) -> tuple[list[str], int]:
    """Return the packages in import cycles, sorted, and the number of all packages."""
    imports: dict[str, set[str]] = {}
    for module in graph.modules:
        importer = get_package_at_depth(module, depth)
        imports.setdefault(importer, set())
        for imported in graph.find_modules_directly_imported_by(module):
            imported_package = get_package_at_depth(imported, depth)
            if imported_package != importer:
                imports[importer].add(imported_package)
    cyclic_packages = [name for name in imports if name in find_reachable_packages(imports, name)]
    packages = {name for name in imports if (ROOT / name.replace(".", "/")).is_dir()}
    return sorted(packages & set(cyclic_packages)), len(packages)


def find_reachable_packages(imports: dict[str, set[str]], start: str) -> set[str]:
    """Return all packages that ``start`` imports, directly or indirectly."""
    reachable_names: set[str] = set()
    pending_names = list(imports[start])
    while pending_names:
        name = pending_names.pop()
        if name in reachable_names:
            continue
        reachable_names.add(name)
        pending_names.extend(imports.get(name, ()))
    return reachable_names


def count_loaded_modules(module: str) -> int:
    """Return the number of modules of this repository that an import of ``module`` loads."""
    # Import in a new process, because the static graph lacks the lazy exports of packages.
    code = f"import sys, {module}; print(*sys.modules, sep='\\n')"
    names = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    return sum(name.partition(".")[0] in PACKAGES for name in names)


def format_table_rows(tally: Tally) -> Iterator[tuple[str, str]]:
    """Yield the lines of the table as (label, value)."""
    lines = sum(tally.file_lines)
    yield "files / lines", f"{len(tally.file_lines)} / {lines:,}"
    for kind, percent, lengths in (
        ("file", 90, sorted(tally.file_lines)),
        ("function", 99, sorted(tally.function_lines)),
    ):
        percentile = lengths[len(lengths) * percent // 100]
        value = f"{statistics.median(lengths):.0f} / {percentile} / {lengths[-1]}"
        yield f"{kind} median / p{percent} / max", value
    yield "deepest nesting", str(tally.max_nesting)
    yield "characters per line of code", f"{tally.code_characters / tally.code_lines:.1f}"
    tuple_assignments_per_1000 = 1000 * tally.tuple_assignments / tally.code_lines
    yield "tuple assignments per 1,000 lines", f"{tuple_assignments_per_1000:.1f}"
    yield "whole-line comments", f"{100 * tally.comment_lines / lines:.1f}%"
    any_percent = 100 * tally.any_parameters / tally.typed_parameters
    yield (
        "parameters typed Any",
        f"{tally.any_parameters} of {tally.typed_parameters:,} ({any_percent:.1f}%)",
    )


def main() -> int:
    """Measure all files and print the table."""
    tally = Tally()
    for path in list_source_files():
        measure_file(path, tally)
    for label, value in format_table_rows(tally):
        print(f"{label:<36}{value}")
    print(f"{'modules that a PPO run imports':<36}{count_loaded_modules(PPO_RUN_MODULE)}")
    sys.path.insert(0, str(ROOT))
    # Imports for type checkers are not executed, so they cause no cycle.
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    for depth in (1, 2, 3):
        cyclic_packages, num_packages = find_cyclic_packages(graph, depth)
        names = f"  {', '.join(cyclic_packages)}" if cyclic_packages else ""
        print(
            f"{f'packages in a cycle, depth {depth}':<36}"
            f"{len(cyclic_packages)} of {num_packages}{names}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
