"""Tests recognise refusals by class, code, key and values, not by the wording of messages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PHRASE = re.compile(r"[a-z]{3,} [a-z]{3,}")  # two words of a sentence
CHECKS = ("mentions", "has_problem", "suggests", "missing_parts")
# Texts that tests may look for, and the reason. For ``match=`` without a constant, its source.
ALLOWED_TEXTS = {
    "--explain env": "an option and its value",
    "custom_reward_function leaving": "a key and the name of a function",
    "pip install ": "a command",
    "`ray start": "a command",
    "inf nats": "a number with its unit",
    "No such file": "message of the operating system",
    "No space left": "message of the operating system",
    "two devices": "message of PyTorch",
    "no such engine": "message of an environment in tests/helpers",
    "no such policy": "output of a process that the test replaces",
    "message": "test_ray_start raises messages of Ray",
}


def list_searched_parts(node: ast.AST) -> list[ast.AST]:
    """Return the expressions with texts that ``node`` looks for in a message."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in CHECKS:
        return [*node.args]
    if isinstance(node, ast.Compare):
        message = ast.unparse(node.comparators[0])
        return [node.left] if re.search(r"problem|refus|\.value\b", message) else []
    return []


def find_texts(file: Path) -> Iterator[str]:
    """Yield the texts of messages that a test file looks for, without those that it contains."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    searched: list[str] = []
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg == "match":
            if isinstance(node.value, ast.Constant):
                searched.append(str(node.value.value))
            else:
                yield ast.unparse(node.value)
        for part in list_searched_parts(node):
            constants = [child for child in ast.walk(part) if isinstance(child, ast.Constant)]
            searched += [str(child.value) for child in constants if PHRASE.search(str(child.value))]
    for text in searched:
        if sum(text in other for other in texts if isinstance(other, str)) < 2:
            yield text


def test_no_test_recognises_a_refusal_by_its_wording():
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = {file.name: sorted({*find_texts(file)} - {*ALLOWED_TEXTS}) for file in files}
    assert {name: texts for name, texts in found.items() if texts} == {}
