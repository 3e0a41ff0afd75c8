"""Print the messages of representative mistakes, the golden file of their wording.

    python -m tests.golden.messages > tests/golden/messages.md

Tests elsewhere check types, keys and codes. After a change of wording, run this command and read
the difference.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.dev.mistakes import MISTAKES, SCRATCH, Mistake, run_mistake, write_scratch_files
from tests.unit.verl.config.test_config import WRONG_VALUES, load_problems
from tests.unit.verl.config.test_config_validate import IMPOSSIBLE, problems

GOLDEN = Path(__file__).with_name("messages.md")
# Names after the fourth of a list: they change with every key that is added.
MORE_NAMES = re.compile(r"((?:allowed|there are)[^:;]*:? (?:[\w.-]+, ){4})[^;\n]*")


def shorten_lists(text: str) -> str:
    """Return ``text`` with the first four names of each list of names."""
    return MORE_NAMES.sub(r"\1...", text)


def config_section() -> str:
    """Return the messages about wrong values and impossible combinations of keys."""
    lines = ["# Configuration"]
    for override, _ in WRONG_VALUES:
        lines += ["", f"## {override}", "", *load_problems(override)]
    for overrides, _ in IMPOSSIBLE:
        lines += ["", f"## {' '.join(overrides)}", "", *problems(*overrides)]
    return shorten_lists("\n".join(lines) + "\n")


def command_section(mistake: Mistake, text: str) -> str:
    """Return the message of a mistaken command, from the ``text`` that it prints."""
    messages = [
        line for line in text.splitlines() if line.startswith(f"  - {mistake.expected_start}")
    ]
    command = " ".join(mistake.words)
    section = "\n".join([f"## {mistake.description}", "", f"`{command}`", "", *messages]) + "\n"
    return shorten_lists(section)


def sections(scratch: Path) -> Iterator[str]:
    """Yield the sections of the file: the config's, then one per mistaken command."""
    yield config_section()
    yield f"# Commands ({SCRATCH} holds a tiny policy and broken files)\n"
    for mistake in MISTAKES:
        yield command_section(mistake, run_mistake(mistake, scratch)[1])


def main() -> None:
    """Print the golden file."""
    with tempfile.TemporaryDirectory(prefix="messages-") as name:
        write_scratch_files(Path(name))
        sys.stdout.write("\n".join(sections(Path(name))))


if __name__ == "__main__":
    main()
