"""Errors of a configuration: one message for each mistake, with its key and its code."""

from collections.abc import Iterable

from verl.config.settings.secret_values import mask_text


class Problem(str):
    """Message about one mistake: ``key=value: why; allowed: ...; fix: ...``.

    ``code`` names the kind of mistake, such as ``unknown_key`` or ``out_of_range``. It is empty if
    the key can have only one kind of mistake.
    """

    code: str

    def __new__(cls, text: str, code: str = "") -> "Problem":
        """Mask the secrets of ``text``, because messages quote the values of keys."""
        problem = super().__new__(cls, mask_text(text))
        problem.code = code or getattr(text, "code", "")
        return problem

    @property
    def key_path(self) -> str:
        """Return the dotted key that the message is about."""
        return self.partition("=")[0]


class ConfigError(ValueError):
    """Error raised for an invalid configuration. ``problems`` has one message per mistake."""

    def __init__(self, problems: str | Iterable[str]):
        problem_list = [problems] if isinstance(problems, str) else problems
        self.problems = [Problem(problem) for problem in problem_list]
        count = len(self.problems)
        noun = "problem" if count == 1 else "problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{count} {noun} in the configuration:\n{lines}")


class Refusal(ValueError):
    """Error that a section's validator raises if the value of ``key`` is not allowed."""

    def __init__(self, key: str, why: str, allowed: str, fix: str):
        self.key = key
        self.reason = f"{why}; allowed: {allowed}; fix: {fix}"
        super().__init__(f"{key}: {self.reason}")


class MissingKey(AttributeError):
    """Error raised on access to a key without value: it was refused, or is not declared."""
