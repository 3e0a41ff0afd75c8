"""Measure the language of the code and the docs, and compare it with the limits.

    python scripts/dev/check_language.py [--list KIND]
    python scripts/dev/check_language.py --sample SEED > sample.md

Prints one number per kind of finding (for example ``banned`` words) and the worst files.
``--list KIND`` prints the findings of one kind as ``file:line: text``. Exits with 1 if a number
exceeds its limit.

``--sample`` draws docstrings, comments, identifiers and sentences for a blind reader. The reader
knows the field and not this project, and marks each item that is not clear at first reading. The
limit is 3% of each kind.

Text in backticks and code blocks is a quotation and is not read. The strings of environment
packages are the content of games, so only the texts of their errors are read. Of JavaScript, shell,
TOML and YAML files, only the comments are read.
"""

import argparse
import ast
import inspect
import random
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.dev import language_words as words
from scripts.dev.measure_code import FUNCTIONS, compute_nesting_depth, find_docstrings

PACKAGES = ("verl", "agent_system", "rlvcr", "scripts", "experiments")
PAGE_PATTERNS = ("docs/*.md", "README.md", "CONTRIBUTING.md")
COMMENT_MARKS = {".js": "//", ".sh": "#", ".toml": "#", ".yaml": "#", ".yml": "#"}
GAMES_FOLDER = "agent_system/environments/env_package/"
# Highest allowed number of findings by kind. ``opening`` is a fraction of all docstrings, and
# ``one_word`` a fraction of all functions.
LIMITS = {
    "opening": 0.01,
    "one_word": 0.22,
    "banned": 0,
    "same_class": 0,
    "long_function": 0,
    "deep_nesting": 0,
    "long_file": 0,
}
KINDS = {
    "opening": "docstrings that open with What/Who/Whether/Where/Which/How",
    "one_word": "functions named by one word",
    "unaccepted_word": "of these, words that the field does not use",
    "banned": "banned words",
    "same_class": "classes that share their name with another class",
    "short_docstring": "docstrings of at most five words",
    "long_sentence": "docstring sentences above 25 words",
    "long_function": "functions above 60 lines",
    "deep_nesting": "functions nested deeper than 3",
    "long_file": "files above 600 lines",
}
OPENING = re.compile(r"(What|Who|Whose|Whom|Whether|Where|Which|How)\b")
QUOTED_TEXT = re.compile(r"```.*?```|``.*?``|`[^`]*`", re.DOTALL)
# Keys, paths, overrides, options and identifiers in prose. They are removed before prose is
# checked.
CODE_WORD = re.compile(r'[\w/.-]*(?:\w[_=/.]\w|=)[\w/.=-]*|--[\w-]+|"\w+"(?=:)')
SAMPLE_SIZES = {"docstrings": 100, "comments": 60, "identifiers": 100, "sentences": 60}
TOOL_COMMENT = re.compile(r"#!|# *(noqa|type:|pyright)")  # comments that only tools read


class Finding(NamedTuple):
    """One violation: its kind (a key of ``KINDS``), file, line and the violating text."""

    kind: str
    file: str
    line: int
    text: str


@dataclass
class Totals:
    """Numbers of docstrings and functions, by which the numbers of findings are divided."""

    docstrings: int = 0
    functions: int = 0


@cache
def _compile_patterns(allows_game_words: bool, kind: str) -> list[re.Pattern[str]]:
    banned_words = words.BANNED | getattr(words, f"BANNED_IN_{kind}")
    if not allows_game_words:
        banned_words |= words.BANNED_OUTSIDE_GAMES
    return [re.compile(rf"\b(?:{word})\b") for word in banned_words]


def _list_patterns(file: str, kind: str) -> list[re.Pattern[str]]:
    # The comments of YAML files describe the tasks of their configurations.
    return _compile_patterns(file.startswith(GAMES_FOLDER) or file.endswith(".yaml"), kind)


def split_name(name: str) -> str:
    """Return the words of an identifier in lower case: ``maxTurn_Rows`` gives "max turn rows"."""
    spaced_name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return " ".join(spaced_name.replace("_", " ").lower().split())


def find_banned_in_name(name: str, file: str, line: int) -> Iterator[Finding]:
    """Yield a finding for each banned word in an identifier; names in ``PUBLIC`` are allowed."""
    if name.strip("_") in words.PUBLIC:
        return
    if name.strip("_") in words.BANNED_NAMES:
        yield Finding("banned", file, line, name)
        return
    text = split_name(name)
    for pattern in _list_patterns(file, "NAMES"):
        if match := pattern.search(text):
            yield Finding("banned", file, line, f"{match[0]!r} in {name}")


def find_banned_in_text(text: str, file: str, line: int) -> Iterator[Finding]:
    """Yield a finding for each banned word of a prose text that starts in ``line``."""
    unquoted_text = QUOTED_TEXT.sub(lambda match: "\n" * match[0].count("\n") + " ", text)
    prose = CODE_WORD.sub(" ", unquoted_text).lower()
    for pattern in _list_patterns(file, "TEXT"):
        for match in pattern.finditer(prose):
            line_offset = prose.count("\n", 0, match.start())
            context = " ".join(prose[max(0, match.start() - 30) : match.end() + 30].split())
            yield Finding("banned", file, line + line_offset, f"{match[0]!r} in ...{context}...")


def split_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring. Lists, tables and indented examples are ignored."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if re.search(r"^([-*|]|>>>|[A-Z]\w+:$|\s)", paragraph, re.MULTILINE):
            continue
        yield from re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))


def check_docstring(node: ast.Constant, file: str) -> Iterator[Finding]:
    """Yield the findings of one docstring: its first word, banned words, and long sentences."""
    text = str(node.value).strip()
    first_line = text.splitlines()[0] if text else ""
    if OPENING.match(text):
        yield Finding("opening", file, node.lineno, first_line)
    if len(text.split()) <= 5:
        yield Finding("short_docstring", file, node.lineno, first_line)
    for sentence in split_sentences(text):
        if len(sentence.split()) > 25:
            yield Finding("long_sentence", file, node.lineno, sentence)


def check_function(node: ast.FunctionDef | ast.AsyncFunctionDef, file: str) -> Iterator[Finding]:
    """Yield the findings of one function: one-word name, length and nesting."""
    name = node.name.strip("_")
    if "_" not in name and not node.name.startswith("__"):
        yield Finding("one_word", file, node.lineno, node.name)
        if name not in words.PUBLIC and name not in words.ACCEPTED.split():
            yield Finding("unaccepted_word", file, node.lineno, node.name)
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if num_lines > 60:
        yield Finding("long_function", file, node.lineno, f"{node.name}: {num_lines} lines")
    if compute_nesting_depth(node) > 3:
        yield Finding(
            "deep_nesting", file, node.lineno, f"{node.name}: {compute_nesting_depth(node)} levels"
        )


def list_defined_names(tree: ast.Module) -> dict[str, int]:
    """Return the identifiers that a module defines, with the line of the first definition."""
    first_lines: dict[str, int] = {}
    for node in ast.walk(tree):
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                first_lines.setdefault(name, node.lineno)
    return first_lines


def _find_messages(tree: ast.Module, file: str) -> Iterator[ast.Constant]:
    """Yield the strings that contain a space and are no docstrings, such as messages."""
    docstrings = {docstring for _, docstring in find_docstrings(tree)}
    searched_nodes: list[ast.AST] = [tree]
    if file.startswith(GAMES_FOLDER):
        searched_nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    for node in (node for root in searched_nodes for node in ast.walk(root)):
        match node:
            case ast.Constant(value=str(text)) if " " in text.strip() and node not in docstrings:
                yield node


def _find_comments(path: Path) -> Iterator[tokenize.TokenInfo]:
    with path.open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            if token.type == tokenize.COMMENT:
                yield token


def check_module(path: Path, file: str, totals: Totals) -> Iterator[Finding]:
    """Yield the findings of one Python file and add its docstrings and functions to ``totals``."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    if source.count("\n") > 600:
        yield Finding("long_file", file, 1, f"{source.count(chr(10))} lines")
    yield from find_banned_in_name(path.stem, file, 1)
    docstrings = [docstring for _, docstring in find_docstrings(tree)]
    totals.docstrings += len(docstrings)
    for node in docstrings:
        yield from check_docstring(node, file)
        yield from find_banned_in_text(str(node.value), file, node.lineno)
    for name, line in list_defined_names(tree).items():
        yield from find_banned_in_name(name, file, line)
    for node in _find_messages(tree, file):
        yield from find_banned_in_text(str(node.value), file, node.lineno)
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            totals.functions += not node.name.startswith("__")
            yield from check_function(node, file)
    for token in _find_comments(path):
        yield from find_banned_in_text(token.string, file, token.start[0])


def find_banned_in_comments(path: Path, file: str) -> Iterator[Finding]:
    """Yield a finding for each banned word in a comment of a file that is not Python."""
    comment_pattern = re.compile(rf"(?:^|\s){COMMENT_MARKS[path.suffix]}(.*)")
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if comment := comment_pattern.search(text):
            yield from find_banned_in_text(comment[1], file, line)


def find_duplicate_classes(root: Path) -> Iterator[Finding]:
    """Yield a finding for each class whose name is also the name of a class in another file."""
    class_positions: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, file in _list_modules(root):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                class_positions[node.name].append((file, node.lineno))
    for name, positions in class_positions.items():
        for file, line in positions if len(positions) > 1 else ():
            yield Finding("same_class", file, line, name)


def _list_modules(root: Path) -> Iterator[tuple[Path, str]]:
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if path.name != "language_words.py":
                yield path, path.relative_to(root).as_posix()


def measure_language(root: Path) -> tuple[list[Finding], Totals]:
    """Return all findings under ``root``, and the numbers of docstrings and functions."""
    totals = Totals()
    findings = [*find_duplicate_classes(root)]
    for path, file in _list_modules(root):
        findings += check_module(path, file, totals)
    for pattern in PAGE_PATTERNS:
        for path in sorted(root.glob(pattern)):
            file = path.relative_to(root).as_posix()
            findings += find_banned_in_text(path.read_text(encoding="utf-8"), file, 1)
    folders = [root / name for name in (*PACKAGES, "configs")]
    for path in sorted([*root.glob("*"), *(path for f in folders for path in f.rglob("*"))]):
        if path.suffix in COMMENT_MARKS:
            findings += find_banned_in_comments(path, path.relative_to(root).as_posix())
    return findings, totals


def count_findings(findings: list[Finding], totals: Totals) -> dict[str, float]:
    """Return the number of findings of each kind; ``opening`` and ``one_word`` as shares."""
    counts = Counter(finding.kind for finding in findings)
    numbers: dict[str, float] = {kind: counts[kind] for kind in KINDS}
    numbers["opening"] /= max(1, totals.docstrings)
    numbers["one_word"] /= max(1, totals.functions)
    return numbers


def list_exceeded_limits(numbers: Mapping[str, float]) -> list[str]:
    """Return the kinds of findings whose number is above its limit."""
    return [kind for kind, limit in LIMITS.items() if numbers[kind] > limit]


def _format_value(value: float) -> str:
    return f"{value:.1%}" if isinstance(value, float) else str(value)


def format_findings(findings: list[Finding], totals: Totals) -> Iterator[str]:
    """Yield the lines of two tables: findings of each kind, and files with most findings."""
    numbers = count_findings(findings, totals)
    counts = Counter(finding.kind for finding in findings)
    exceeded_kinds = list_exceeded_limits(numbers)
    for kind, description in KINDS.items():
        limit = f"limit {_format_value(LIMITS[kind])}" if kind in LIMITS else ""
        limit_mark = "EXCEEDED" if kind in exceeded_kinds else ""
        value = _format_value(numbers[kind])
        line = f"{kind:16} {counts[kind]:6} {value:>8}  {limit:12} {limit_mark:9} {description}"
        yield line.rstrip()
    yield f"of {totals.docstrings} docstrings and {totals.functions} functions"
    counts_by_file = Counter(finding.file for finding in findings if finding.kind != "one_word")
    yield "files with most findings:"
    for file, count in counts_by_file.most_common(15):
        yield f"{count:6} {file}"


def _describe_definition(node: ast.AST) -> str:
    """Return the signature of a function, or the name of a class."""
    if isinstance(node, FUNCTIONS):
        return_annotation = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"def {node.name}({ast.unparse(node.args)}){return_annotation}"
    return f"class {node.name}" if isinstance(node, ast.ClassDef) else "module"


def collect_items(root: Path) -> dict[str, list[tuple[str, str]]]:
    """Return (file, text with context) of all items from which ``--sample`` draws, by kind."""
    items: dict[str, list[tuple[str, str]]] = {kind: [] for kind in SAMPLE_SIZES}
    for path, file in _list_modules(root):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        tree = ast.parse(source)
        for node, docstring in find_docstrings(tree):
            text = f"{_describe_definition(node)}\n{inspect.cleandoc(str(docstring.value))}"
            items["docstrings"].append((file, text))
        for token in _find_comments(path):
            line_index = token.start[0] - 1
            if not TOOL_COMMENT.match(token.string):
                items["comments"].append(
                    (file, "\n".join(lines[max(0, line_index - 1) : line_index + 4]))
                )
        for name, line in list_defined_names(tree).items():
            if len(name) > 1 and name[:2] != "__" and name not in ("self", "cls"):
                context = "\n".join(lines[max(0, line - 3) : line + 2])
                items["identifiers"].append((file, f"{name}\n{context}"))
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        items["sentences"] += [(path.name, text) for text in _collect_sentences(path)]
    return items


def _collect_sentences(path: Path) -> Iterator[str]:
    """Yield each sentence of at least five words, together with the sentence before it."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for paragraph in text.split("\n\n"):
        if paragraph.lstrip().startswith(("|", "#", "<!--")):
            continue
        sentences = re.split(r"(?<=[.!?:])\s+", " ".join(paragraph.split()))
        for previous_sentence, sentence in zip(["", *sentences], sentences, strict=False):
            if len(sentence.split()) >= 5:
                yield (
                    f"(before it: {previous_sentence})\n{sentence}"
                    if previous_sentence
                    else sentence
                )


def format_sample(root: Path, seed: int) -> Iterator[str]:
    """Yield the lines of a random sample of items for a blind reader, drawn with ``seed``."""
    rng = random.Random(seed)
    yield f"Seed {seed}"
    for kind, kind_items in collect_items(root).items():
        count = min(SAMPLE_SIZES[kind], len(kind_items))
        yield f"\n## {count} {kind}"
        for item_number, (file, text) in enumerate(rng.sample(kind_items, count), start=1):
            yield f"\n{kind[0].upper()}{item_number}. [{file}]"
            yield from (f"    {line}" for line in text.splitlines())


def main(arguments: list[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to measure")
    parser.add_argument("--sample", type=int, metavar="SEED", help="print a sample of all texts")
    options = parser.parse_args(arguments)
    if options.sample is not None:
        sys.stdout.write("\n".join(format_sample(options.root, options.sample)) + "\n")
        return 0
    findings, totals = measure_language(options.root)
    if options.list:
        lines = [
            f"{finding.file}:{finding.line}: {finding.text}"
            for finding in findings
            if finding.kind == options.list
        ]
    else:
        lines = list(format_findings(findings, totals))
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if list_exceeded_limits(count_findings(findings, totals)) else 0


if __name__ == "__main__":
    sys.exit(main())
