"""Draw the random sample that a blind reader rates: docstrings, comments, identifiers, sentences.

    python -m scripts.dev.sample_language --seed 7 > sample.md

The reader knows the field and not this project. He reads the sample alone and marks each item that
he does not understand at first reading. The limit is 3% of each kind.
"""

import argparse
import ast
import random
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("verl", "agent_system", "rlvcr", "scripts")
COUNTS = {"docstrings": 100, "comments": 60, "identifiers": 100, "sentences": 60}
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
DIRECTIVE = re.compile(r"#!|# *(noqa|type:|pyright)")
MIN_WORDS = 5  # of a sentence of the docs


def _describe_definition(node: ast.AST) -> str:
    """Return the signature of a function, or the name of a class."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            return f"def {node.name}({ast.unparse(node.args)}){returns}"
        case ast.ClassDef():
            return f"class {node.name}"
    return "module"


def list_docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield each docstring of a module below the signature that it belongs to."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *DEFINITIONS)) and (text := ast.get_docstring(node)):
            yield f"{_describe_definition(node)}\n{text}"


def list_comments(path: Path) -> Iterator[str]:
    """Yield each comment of a file with the line before it and three lines after it."""
    lines = path.read_text(encoding="utf-8").splitlines()
    with path.open("rb") as stream:
        for token in tokenize.tokenize(stream.readline):
            if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
                row = token.start[0] - 1
                yield "\n".join(lines[max(0, row - 1) : row + 4])


def list_identifiers(tree: ast.Module) -> Iterator[str]:
    """Yield the names of definitions, parameters and variables, once per place that sets them."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                name = node.name
            case ast.Name(ctx=ast.Store()):
                name = node.id
            case ast.arg():
                name = node.arg
            case _:
                continue
        if len(name) > 1 and not name.startswith("__") and name not in ("self", "cls"):
            yield name


def list_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page. Code, headings and tables are omitted."""
    for paragraph in re.sub(r"```.*?```", "", text, flags=re.DOTALL).split("\n\n"):
        if paragraph.lstrip().startswith(("|", "#", "<!--")):
            continue
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
            if len(sentence.split()) >= MIN_WORDS:
                yield sentence


def collect_items(root: Path) -> dict[str, list[tuple[str, str]]]:
    """Return (file, text) of every item below ``root``, by kind."""
    items: dict[str, list[tuple[str, str]]] = {kind: [] for kind in COUNTS}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            tree = ast.parse(path.read_text(encoding="utf-8"))
            items["docstrings"] += [(file, text) for text in list_docstrings(tree)]
            items["comments"] += [(file, text) for text in list_comments(path)]
            items["identifiers"] += [(file, text) for text in list_identifiers(tree)]
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        sentences = list_sentences(path.read_text(encoding="utf-8"))
        items["sentences"] += [(path.name, text) for text in sentences]
    return items


def format_sample(root: Path, seed: int) -> Iterator[str]:
    """Yield the lines of the sample that ``seed`` draws."""
    generator = random.Random(seed)
    yield f"Seed {seed}"
    for kind, available in collect_items(root).items():
        count = min(COUNTS[kind], len(available))
        yield f"\n## {count} {kind}"
        for number, (file, text) in enumerate(generator.sample(available, count), start=1):
            yield f"\n{kind[0].upper()}{number}. [{file}]"
            yield from (f"    {line}" for line in text.splitlines())


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True, help="seed of the sample")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to read")
    options = parser.parse_args(arguments)
    sys.stdout.write("\n".join(format_sample(options.root, options.seed)) + "\n")


if __name__ == "__main__":
    main()
