"""Print the messages of representative mistakes, the golden file of their wording.

    python -m tests.golden.messages > tests/golden/messages.md

Tests elsewhere check types, keys and codes. Messages about the configuration follow their code in
brackets. After a change of wording, run this command and read the difference.
"""

import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

import verl.trainer.launch.extensions  # noqa: F401  adds environments and method to the schema
from agent_system.environments.env_package.tools.calls import MalformedCallError, parse_call
from tests.unit.verl.config.test_config import WRONG_VALUES, load_problems
from tests.unit.verl.config.test_config_validate import IMPOSSIBLE, problems
from verl.config.settings import Problem
from verl.utils.message_rows import DataRow, InvalidRowError, read_prompt_messages, read_table

GOLDEN = Path(__file__).with_name("messages.md")
USER = {"role": "user", "content": "2+2?"}
DATA_FILES = {
    "a.csv": b"n\n1",
    "broken.jsonl": b"{}\n{",
    "list.jsonl": b"[]",
    "array.json": b'[\n{"a": 1}\n]',
    "twice.jsonl": b'{"a": 1, "a": 2}',
    "latin.jsonl": '{"a": "é"}'.encode("latin-1"),
    "utf16.jsonl": "{}".encode("utf-16"),
    "empty.jsonl": b"",
}
ROWS: tuple[dict[str, object], ...] = (
    {"text": "a"},
    {"prompt": None},
    {"prompt": []},
    {"prompt": USER},
    {"prompt": 5},
    {"prompt": " "},
    {"prompt": [{"role": "robot", "content": "?"}]},
    {"prompt": [USER, {"role": "assistant", "content": "4"}]},
    {"prompt": [{**USER, "name": "bob"}]},
    {"prompt": [{**USER, "weight": 0.5}]},
    {"prompt": "a", "images": ["a.png"]},
    {"prompt": "a", "system": "Be brief."},
)
CALLS = ("{", "[1]", '{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": "{"}')
# Names after the fourth of a list: they change with every key that is added.
MORE_NAMES = re.compile(r"((?:allowed|there are)[^:;]*:? (?:[\w.-]+, ){4})[^;\n]*")


def shorten_lists(text: str) -> str:
    """Return ``text`` with the first four names of each list of names."""
    return MORE_NAMES.sub(r"\1...", text)


def format_problems(reported: Iterable[Problem]) -> list[str]:
    """Return a line for each problem: its code and its message."""
    return [f"[{problem.code}] {problem}" for problem in reported]


def config_section() -> str:
    """Return the messages about wrong values and impossible combinations of keys."""
    lines = ["# Configuration"]
    for override, _ in WRONG_VALUES:
        lines += ["", f"## {override}", "", *format_problems(load_problems(override))]
    for overrides, _ in IMPOSSIBLE:
        lines += ["", f"## {' '.join(overrides)}", "", *format_problems(problems(*overrides))]
    return shorten_lists("\n".join(lines) + "\n")


def file_section() -> str:
    """Return the messages about data files, about their rows, and about calls of tools."""
    lines = ["# Data files, rows and calls of tools"]
    with tempfile.TemporaryDirectory() as folder:
        for name, content in DATA_FILES.items():
            path = Path(folder, name)
            path.write_bytes(content)
            with pytest.raises(InvalidRowError) as refused:
                list(read_table("data.train_files", [str(path)]))
            problem_lines = format_problems(refused.value.problems)
            lines += [
                "",
                f"## {name}",
                "",
                *(line.replace(folder, "DIR") for line in problem_lines),
            ]
    for cells in ROWS:
        with pytest.raises(InvalidRowError) as refused:
            read_prompt_messages(DataRow("data.path='a'", 3, cells), "prompt", "data.prompt_key")
        lines += ["", f"## {cells}", "", *format_problems(refused.value.problems)]
    for text in CALLS:
        with pytest.raises(MalformedCallError) as malformed:
            parse_call(text)
        lines += ["", f"## {text}", "", str(malformed.value)]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the golden file."""
    sys.stdout.write(f"{config_section()}\n{file_section()}")


if __name__ == "__main__":
    main()
