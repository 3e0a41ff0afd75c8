"""Who says how deep a step is thought: the policy, or a rule that forces a level on it.

free       the policy itself
level_1    level 1 at every step, and so on up to level_4
random     drawn with the shares that the policy chose: nothing is lost but the choice by state
oracle     the level that the environment calls needed
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlvcr.levels import LEVELS
from rlvcr.names import LEVEL_RULES, LevelRuleName
from rlvcr.records import ThinkingStep
from verl.config.settings.hints import did_you_mean

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LevelRule:
    """Forces level 1 to 4 at these ``shares`` of the steps; what they lack to 1 is the policy's.

    ``needed`` forces the level that the environment calls needed instead; where it names none, the
    policy chooses. Raises ``ValueError`` for shares that are none.
    """

    shares: tuple[float, ...] = (0.0,) * len(LEVELS)
    needed: bool = False

    def __post_init__(self) -> None:
        total = math.fsum(self.shares)
        # A share may be off by rounding: 1 is what counts add up to, not their quotients.
        if len(self.shares) != len(LEVELS) or min(self.shares) < 0 or total > 1 + 1e-9:
            raise ValueError(
                f"shares of the levels are {self.shares}: allowed are four numbers from 0 on that "
                "add up to at most 1"
            )

    @classmethod
    def always(cls, level: int) -> "LevelRule":
        """Force ``level`` at every step."""
        return cls.like([level])

    @classmethod
    def uniform(cls, share: float) -> "LevelRule":
        """Force a level at this ``share`` of the steps, each as often as the others."""
        return cls((share / len(LEVELS),) * len(LEVELS))

    @classmethod
    def like(cls, levels: Sequence[int]) -> "LevelRule":
        """Force levels with the shares that they have among ``levels``, of which there is one."""
        return cls(tuple(levels.count(level) / len(levels) for level in LEVELS))

    @property
    def forces(self) -> bool:
        """Whether a level may be forced at all."""
        return self.needed or any(self.shares)

    def level(self, draw: float, needed: int | None) -> int | None:
        """The level of a step whose lot is ``draw`` in [0, 1) and that needs the level ``needed``;
        None where the policy is to choose.
        """
        if self.needed:
            return needed
        edge = 0.0
        for level, share in zip(LEVELS, self.shares, strict=True):
            edge += share
            if draw < edge:
                return level
        return None


FREE = LevelRule()
_FIXED: dict[str, LevelRule] = {"free": FREE} | {
    f"level_{level}": LevelRule.always(level) for level in LEVELS
}


def level_rule(name: str, steps: Iterable[ThinkingStep]) -> LevelRule | None:
    """The rule ``name`` after a free play of ``steps``; None where these do not tell what to force.

    Raises ``ValueError`` for an unknown name.
    """
    if name in _FIXED:
        return _FIXED[name]
    if name == "random":
        chosen = [step.level for step in steps if step.level and not step.level_forced]
        return LevelRule.like(chosen) if chosen else None
    if name == "oracle":
        known = any(step.needed_level is not None for step in steps)
        return LevelRule(needed=True) if known else None
    hint = did_you_mean(name, LEVEL_RULES)
    raise ValueError(
        f"algorithm.rlvcr.eval_levels has {name!r}; allowed: {', '.join(LEVEL_RULES)}{hint}"
    )


_UNKNOWN = {
    "random": "no step of the free play has a level that can be read",
    "oracle": "the environment does not name the level that a step needs",
}


def rules_after(
    names: Sequence[LevelRuleName], steps: Sequence[ThinkingStep]
) -> dict[LevelRuleName, LevelRule]:
    """The rules ``names`` to compare with a free play of ``steps``, which is not among them.

    What ``steps`` do not tell enough for is left out, and the log says why.
    """
    found: dict[LevelRuleName, LevelRule] = {}
    for name in names:
        rule = level_rule(name, steps)
        if rule is None:
            logger.warning("%s is left out: %s", name, _UNKNOWN[name])
        elif rule.forces:
            found[name] = rule
    return found
