"""The one error a wrong configuration raises: every problem found, each with what, where, allowed
and fix.
"""

from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration that cannot run. ``problems`` holds one message per mistake."""

    def __init__(self, problems: str | Iterable[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        count = len(self.problems)
        head = (
            "1 problem in the configuration"
            if count == 1
            else f"{count} problems in the configuration"
        )
        super().__init__(head + ":\n" + "\n".join(f"  - {problem}" for problem in self.problems))
