"""Tests recognise refusals and logs by class, code, key and values, not by their wording."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PHRASE = re.compile(r"[a-z]{3,} [a-z]{3,}")  # two words of a sentence
# The first argument of these is the searched text or log.
CHECKS_OF_TEXTS = ("missing_parts", "list_logged", "list_log_lines")
CHECKS = ("mentions", "has_problem", "suggests", *CHECKS_OF_TEXTS)
# Names of messages: errors, logs and remarks. Printed tables (``.out``) are no messages.
EXACT_MESSAGE = re.compile(r"problem|refus|\.value\b|caplog|__notes__|\.err\b|silent_nodes")
MESSAGE = re.compile(
    rf"{EXACT_MESSAGE.pattern}|captured|stderr|error|messages?\b|sentence|verdict|detail|\blog\b|log_"
)
REGEX_CALLS = ("re.search", "re.match", "re.fullmatch", "re.findall")
TEXT_METHODS = ("startswith", "endswith", "count")
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
    "Agreement of credit rules with effects": "title of a table",
    "Levels chosen in each situation": "title of a table",
    "Success and tokens of level rules": "title of a table",
    "Nothing moves.\nup wall": "observation of an environment",
    "Secret word: dog": "prompt of an environment",
    "custom_reward_function mine, task_id 'number_line": "a key, a name and a task",
    "env.search.val_questions=nq/dev.jsonl data.val_files=[]": "two keys",
    "ActorWorker rank 0 on ": "name of a process",
    "Segmentation fault": "message of the operating system",
    "5 training steps": "a number with its unit",
    "20 optimizer steps": "a number with its unit",
}


def list_searched_parts(node: ast.AST) -> list[ast.AST]:
    """Return the expressions with texts that ``node`` looks for in a message."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in CHECKS:
        num_skipped = 1 if ast.unparse(node.func) in CHECKS_OF_TEXTS else 0
        return [*node.args[num_skipped:]]
    if isinstance(node, ast.Compare):
        left, right = node.left, node.comparators[0]
        if isinstance(node.ops[0], ast.Eq) and EXACT_MESSAGE.search(ast.unparse(left)):
            return [right]
        return [left] if MESSAGE.search(ast.unparse(right)) else []
    if isinstance(node, ast.Call) and ast.unparse(node.func) in REGEX_CALLS:
        return [*node.args[:1]] if MESSAGE.search(ast.unparse(node.args[-1])) else []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_message = MESSAGE.search(ast.unparse(node.func.value))
        return [*node.args] if node.func.attr in TEXT_METHODS and is_message else []
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
