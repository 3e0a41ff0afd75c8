"""How a wrong configuration is refused: every mistake found, with what, where, allowed and fix."""

from collections.abc import Iterable

from verl.config.settings.secret_values import masked_text


class ConfigError(ValueError):
    """A configuration that cannot run. ``problems`` holds one message per mistake."""

    def __init__(self, problems: str | Iterable[str]):
        named = [problems] if isinstance(problems, str) else list(problems)
        # Messages repeat what was written, which may be a secret.
        self.problems = [masked_text(problem) for problem in named]
        count = len(self.problems)
        noun = "problem" if count == 1 else "problems"
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        super().__init__(f"{count} {noun} in the configuration:\n{lines}")


class Refusal(ValueError):
    """What the validator of a section raises about the value of ``key``, a key of that section."""

    def __init__(self, key: str, why: str, allowed: str, fix: str):
        self.key = key
        self.reason = f"{why}; allowed: {allowed}; fix: {fix}"
        super().__init__(f"{key}: {self.reason}")


class MissingKey(AttributeError):
    """A key has no value: what was written is wrong, or nobody declares it."""
