"""Check the message of a commit, as the hook of ``.pre-commit-config.yaml`` does.

    python scripts/dev/check_commit_message.py FILE

The first line has at most 72 characters and an empty line follows it. A commit that changes more
than 30 lines has a body that says why, and what was measured. Merges are not checked.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FIRST_LINE_LENGTH = 72  # characters
MAX_LINES_WITHOUT_BODY = 30  # changed lines
SCISSORS_LINE = "------------------------ >8 ------------------------"  # git ignores the rest


def find_message_problems(message: str, changed_lines: int) -> Iterator[str]:
    """Yield each rule that ``message`` breaks for a commit of ``changed_lines``."""
    subject, *body_lines = message.splitlines() or [""]
    if not subject:
        yield "the message is empty; fix: say in one line what the software now does"
    if len(subject) > MAX_FIRST_LINE_LENGTH:
        yield (
            f"the first line has {len(subject)} characters; allowed: at most "
            f"{MAX_FIRST_LINE_LENGTH}; fix: shorten it, and move details to the body"
        )
    if body_lines and body_lines[0]:
        yield "the second line is not empty; fix: leave a line empty below the first"
    if changed_lines > MAX_LINES_WITHOUT_BODY and not any(body_lines):
        yield (
            f"there is no body; allowed: none up to {MAX_LINES_WITHOUT_BODY} changed lines, "
            f"these are {changed_lines}; fix: say why, and what was measured, below an empty line"
        )


def count_changed_lines(numstat: str) -> int:
    """Return the lines that ``git diff --numstat`` adds and removes; binary files have none.

    >>> count_changed_lines("2\\t1\\tone.py\\n-\\t-\\tpicture.png\\n")
    3
    """
    counts = (line_count for line in numstat.splitlines() for line_count in line.split("\t")[:2])
    return sum(int(count) for count in counts if count != "-")


def main(arguments: list[str]) -> int:
    """Check the message in the file ``arguments[0]``. Return 1 if it breaks a rule."""
    if (Path(_run_git("rev-parse", "--git-dir").strip()) / "MERGE_HEAD").exists():
        return 0
    uncut_message = Path(arguments[0]).read_text(encoding="utf-8").partition(SCISSORS_LINE)[0]
    message = _run_git("stripspace", "--strip-comments", text=uncut_message)
    changed_lines = count_changed_lines(_run_git("diff", "--cached", "--numstat", "-M"))
    problems = list(find_message_problems(message, changed_lines))
    sys.stderr.writelines(f"commit message: {problem}\n" for problem in problems)
    return 1 if problems else 0


def _run_git(*arguments: str, text: str | None = None) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
