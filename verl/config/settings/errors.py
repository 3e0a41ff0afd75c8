"""Errors of a configuration: one message for each mistake, with its key and its code."""

import re
from collections.abc import Iterable
from typing import Any, Literal

from verl.config.settings.secret_values import mask_text

# Kinds of a user's mistake, in a configuration, a command line, a data file or a model.
ProblemCode = Literal[
    "wrong_type",  # a value has another type than its key
    "out_of_range",  # a value is not among the values that its key allows
    "invalid_syntax",  # a text cannot be parsed, or is no valid name
    "unknown_key",  # no key has this name
    "unknown_name",  # a value names a config, an environment, a function etc. that does not exist
    "missing_key",  # a required key is not set
    "no_effect",  # a value would be ignored
    "conflicting_keys",  # values of several keys or options exclude each other
    "does_not_fit",  # the machine, a row or a limit is too small for what it must hold
    "missing_file",  # a file or directory does not exist
    "no_model",  # a directory has no config.json, no weights or no tokenizer
    "no_checkpoint",  # a directory has no valid checkpoint, or none of this model
    "altered_file",  # a file is damaged, or is not the one that was written
    "unreadable_file",  # a file is not of its format
    "wrong_weights",  # weights have the wrong names, shapes or values
    "file_exists",  # the path has content that must not be replaced, or another run uses it
    "not_writable",  # nothing can be written to the path
    "no_rows",  # no row, task or episode can be used
    "missing_column",  # a row lacks a column
    "wrong_cell",  # a row has a value that is not allowed
    "unsupported_model",  # a model lacks what the run needs
    "unsupported_template",  # a chat template or tokenizer cannot render the messages
    "missing_package",  # a module, package or program is not installed
    "untrusted_code",  # a stored config names code that the user has not allowed
    "failed_call",  # a call of user code, of an engine or of a service failed
]

# Codes of errors that Python raises for files, modules and names. The first matching type counts.
CODES_BY_TYPE: dict[type[Exception], ProblemCode] = {
    FileNotFoundError: "missing_file",
    OSError: "unreadable_file",
    ImportError: "missing_package",
    LookupError: "unknown_name",
    AttributeError: "unknown_name",
    TypeError: "wrong_type",
}


class Problem(str):
    """Message about one mistake: ``key=value: why; allowed: ...; fix: ...``."""

    code: ProblemCode

    def __new__(cls, text: str, code: ProblemCode) -> "Problem":
        # Mask secrets, because messages quote the values of keys.
        problem = super().__new__(cls, mask_text(text))
        problem.code = code
        return problem

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.code)

    @property
    def key_path(self) -> str:
        """Return the dotted key, option or file that the message is about."""
        match = re.match(r"(?:cold start: )?[^=:\s]+", self)
        return match[0] if match else ""


class ConfigError(ValueError):
    """Error raised for an invalid configuration. ``problems`` has one message per mistake.

    A message that is a plain string becomes a ``Problem`` with ``code``.
    """

    def __init__(self, problems: str | Iterable[str], code: ProblemCode = "out_of_range") -> None:
        problem_texts = [problems] if isinstance(problems, str) else problems
        self.problems = [
            text if isinstance(text, Problem) else Problem(text, code) for text in problem_texts
        ]
        noun = "problem" if len(self.problems) == 1 else "problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{len(self.problems)} {noun} in the configuration:\n{lines}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,), vars(self)


class UserError(ValueError):
    """Error about a user's mistake outside of a configuration. ``code`` names its kind."""

    def __init__(self, message: str, code: ProblemCode) -> None:
        super().__init__(message)
        self.code: ProblemCode = code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.code)


def names_fix(text: str) -> bool:
    """Return True if the error message ``text`` says what the user can do."""
    return "; fix: " in text


def get_problem_code(error: BaseException, fallback: ProblemCode) -> ProblemCode:
    """Return the kind of mistake that ``error`` reports, by its ``code`` or its type.

    Return ``fallback`` for a type that stands for no kind, such as ``ValueError``.
    """
    if isinstance(error, UserError):
        return error.code
    for error_type, code in CODES_BY_TYPE.items():
        if isinstance(error, error_type):
            return code
    return fallback


class InvalidSettingError(ValueError):
    """Error that a section's validator raises if the value of ``key`` is not allowed."""

    def __init__(self, key: str, why: str, allowed: str, fix: str):
        self.key = key
        self.reason = f"{why}; allowed: {allowed}; fix: {fix}"
        super().__init__(f"{key}: {self.reason}")


class MissingKeyError(AttributeError):
    """Error raised on access to a key without value: it was refused, or is not declared."""
