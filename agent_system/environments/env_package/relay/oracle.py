"""What whoever knows the needed level of every door would reach: the bar for a policy that chooses
its levels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agent_system.environments.base import Task
from agent_system.environments.env_package.relay.doors import Door, needed_level

# <level> N </level> <think> ... </think> <action> place </action>, in a tokenizer that knows the
# symbols of the environment.
FIXED_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Reached:
    """What is expected of an episode: probability that it is won, steps played, tokens sampled."""

    success: float
    steps: float
    tokens: float

    @property
    def tokens_per_step(self) -> float:
        """Tokens of an average step."""
        return self.tokens / self.steps


def oracle(task: Task, accuracy: Sequence[Sequence[float]], hops: Sequence[int]) -> Reached:
    """What the needed level at every door of ``task`` reaches.

    ``accuracy[k][l]``: probability of the right action where a door asks for ``k`` arrows and level
    ``l + 1`` is thought on. ``hops`` as in the settings: what each level writes. Raises
    ``ValueError`` for an accuracy that is no probability, or lacks a line or a level.
    """
    check_accuracy(accuracy, hops)
    alive, steps, tokens = 1.0, 0.0, 0.0
    for text in task["doors"]:
        count = Door.read(text).hops
        level = needed_level(count, hops)
        steps += alive
        tokens += alive * (FIXED_TOKENS + hops[level - 1])
        alive *= accuracy[count][level - 1]
    return Reached(alive, steps, tokens)


def mean_oracle(
    tasks: Sequence[Task], accuracy: Sequence[Sequence[float]], hops: Sequence[int]
) -> Reached:
    """The mean of ``oracle`` over ``tasks``."""
    found = [oracle(task, accuracy, hops) for task in tasks]
    count = len(found)
    return Reached(
        sum(one.success for one in found) / count,
        sum(one.steps for one in found) / count,
        sum(one.tokens for one in found) / count,
    )


def check_accuracy(accuracy: Sequence[Sequence[float]], hops: Sequence[int]) -> None:
    """Raise ``ValueError`` unless there is a probability for every question and level."""
    lines = hops[-1] + 1
    whole = len(accuracy) == lines and all(len(line) == len(hops) for line in accuracy)
    if not whole or not all(0 <= share <= 1 for line in accuracy for share in line):
        raise ValueError(
            f"accuracy must hold {lines} lines of {len(hops)} probabilities each, a line for every "
            f"number of arrows from 0 to {hops[-1]}; got {accuracy!r}"
        )
