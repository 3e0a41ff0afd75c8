"""Memory of an agent: the last turns of an episode, as the text that a window prompt shows."""

from collections import deque


class WindowMemory:
    """Remembers the last ``length`` turns as (observation, action) texts; 0 remembers nothing.

    Raises:
        ValueError: ``length`` is negative.
    """

    def __init__(self, length: int) -> None:
        if length < 0:
            raise ValueError(f"env.history_length must be 0 or more, got {length}")
        self._turns: deque[tuple[str, str]] = deque(maxlen=length)

    def add(self, observation: str, action: str) -> None:
        """Remember that ``action`` answered ``observation``."""
        self._turns.append((observation, action))

    def turns(self) -> list[tuple[str, str]]:
        """What is remembered, oldest first."""
        return list(self._turns)
