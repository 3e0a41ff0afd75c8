"""Memory for ``env.history=window``: the last turns of an episode, shown in the prompt."""

from collections import deque


class WindowMemory:
    """Store of the last ``length`` turns as (observation, action) texts. 0 stores nothing."""

    def __init__(self, length: int) -> None:
        self._turns: deque[tuple[str, str]] = deque(maxlen=length)

    def add(self, observation: str, action: str) -> None:
        """Store one turn: ``action`` is the answer to ``observation``."""
        self._turns.append((observation, action))

    def stored_turns(self) -> list[tuple[str, str]]:
        """Return the stored turns, oldest first."""
        return list(self._turns)
