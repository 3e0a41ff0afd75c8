"""Checks of refusals and logged texts that do not depend on their wording.

``pytest.raises(ValueError, check=mentions("data.path", 3))`` requires the key and the value in the
message. ``check=has_problem("missing_file", "data.path")`` requires the code and the key. The
markers below are part of every message, and only this module names them.
"""

import re
from collections.abc import Callable

import pytest

from verl.config.settings.errors import ConfigError, Problem, ProblemCode, UserError

SUGGESTION = "did you mean "
ALLOWED = "; allowed: "
FIX = "; fix: "


def raise_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make command lines raise the errors whose messages they would print."""
    for module in ("verl.trainer.cli", "verl.trainer.command"):
        monkeypatch.setattr(
            f"{module}.run_and_report_mistakes", lambda main, *args, **_: main(*args) or 0
        )


def missing_parts(text: str, *parts: object) -> list[str]:
    """Return the parts that ``text`` does not contain. Numbers must stand alone."""
    missing: list[str] = []
    for part in map(str, parts):
        border = r"\b" if part.isdigit() else ""
        if not re.search(border + re.escape(part) + border, text):
            missing.append(part)
    return missing


def list_logged(caplog: pytest.LogCaptureFixture, module: str, *parts: object) -> list[str]:
    """Return the messages that ``module`` logged and that have all ``parts``."""
    messages = [record.getMessage() for record in caplog.records if record.name == module]
    return [message for message in messages if not missing_parts(message, *parts)]


def list_log_lines(log: str, module: str, *parts: object) -> list[str]:
    """Return the lines of a log file that ``module`` wrote and that have all ``parts``."""
    lines = [line for line in log.splitlines() if f" {module}: " in line]
    return [line for line in lines if not missing_parts(line, *parts)]


def mentions(*parts: object) -> Callable[[BaseException], bool]:
    """Return a check that the message of an exception has all ``parts``, in any order."""

    def check(error: BaseException) -> bool:
        missing = missing_parts(str(error), *parts)
        assert not missing, f"{missing} not in: {error}"
        return True

    return check


def has_problem(
    code: ProblemCode, key: str = "", *parts: object
) -> Callable[[BaseException], bool]:
    """Return a check that an exception reports a mistake of kind ``code`` about ``key``.

    The message must also have all ``parts``. The empty key stands for any key or file.
    """

    def check(error: BaseException) -> bool:
        assert isinstance(error, ConfigError | UserError)
        problems = (
            error.problems if isinstance(error, ConfigError) else [Problem(str(error), error.code)]
        )
        reported = {(problem.code, problem.key_path if key else "") for problem in problems}
        assert (code, key) in reported, f"{(code, key)} not in {reported}: {error}"
        return mentions(*parts)(error)

    return check


def suggests(name: str, *parts: object) -> Callable[[BaseException], bool]:
    """Return a check that the message proposes the nearest ``name``, and has all ``parts``."""

    def check(error: BaseException) -> bool:
        assert suggestion(str(error)) == name, str(error)
        return mentions(*parts)(error)

    return check


def suggestion(text: str) -> str | None:
    """Return the nearest name that a message proposes, if it does."""
    match = re.search(rf"{SUGGESTION}'?([^'?]+)'?\?", text)
    return match[1] if match else None


def allowed(text: str) -> str:
    """Return the part of a message that says what is allowed."""
    return text.partition(ALLOWED)[2].partition(FIX)[0]


def fix(text: str) -> str:
    """Return the part of a message that says how to correct the mistake."""
    return text.partition(FIX)[2]
