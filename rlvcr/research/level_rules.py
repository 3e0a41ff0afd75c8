"""Level rules: the policy chooses the thinking level, or a rule forces it.

free       the policy chooses.
level_1    level 1 in every turn; level_2 to level_4 alike.
random     drawn with the shares of the policy: removes only the dependence on the state.
oracle     the required level that the environment names.
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
    """Rule that forces levels 1 to 4 with ``shares``. The policy chooses in the remaining turns.

    ``forces_required_level`` forces the required level instead; the policy chooses where the
    environment names none. Raises ``ValueError`` for invalid shares.
    """

    shares: tuple[float, ...] = (0.0,) * len(LEVELS)
    needed: bool = False

    def __post_init__(self) -> None:
        total = math.fsum(self.shares)
        # Rounding: shares computed from counts may add up to slightly more than 1.
        if len(self.shares) != len(LEVELS) or min(self.shares) < 0 or total > 1 + 1e-9:
            raise ValueError(
                f"the shares of the levels are {self.shares}; allowed: four numbers of at least 0 "
                "that add up to at most 1"
            )

    @classmethod
    def always(cls, level: int) -> "LevelRule":
        """Return the rule that forces ``level`` in every turn."""
        return cls.like([level])

    @classmethod
    def uniform(cls, share: float) -> "LevelRule":
        """Return the rule that forces a level, drawn uniformly, at this ``share`` of the turns."""
        return cls((share / len(LEVELS),) * len(LEVELS))

    @classmethod
    def like(cls, levels: Sequence[int]) -> "LevelRule":
        """Return the rule that forces levels with their shares among ``levels``, which is not
        empty.
        """
        return cls(tuple(levels.count(level) / len(levels) for level in LEVELS))

    @property
    def forces(self) -> bool:
        """True if the rule may force a level."""
        return self.needed or any(self.shares)

    def level(self, draw: float, needed: int | None) -> int | None:
        """Return the level to force for the random number ``draw`` in [0, 1).

        ``required_level`` is that of the turn. None where the policy chooses.

            shares (0.1, 0.1, 0.1, 0.1): draw 0.15 gives level 2, draw 0.5 gives None
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
    """Return the rule ``name``, with shares from the free rollout of ``turns``.

    None where these do not determine it. Raises ``ValueError`` for an unknown name.
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
    "random": "no turn of the free rollout has a level that can be read",
    "oracle": "the environment does not name the required level of a turn",
}


def rules_after(
    names: Sequence[LevelRuleName], steps: Sequence[ThinkingStep]
) -> dict[LevelRuleName, LevelRule]:
    """Return the rules among ``names`` to compare with the free rollout of ``turns``.

    The rule ``free`` is not included. A rule that ``turns`` do not determine is dropped with a
    warning.
    """
    found: dict[LevelRuleName, LevelRule] = {}
    for name in names:
        rule = level_rule(name, steps)
        if rule is None:
            logger.warning(
                "algorithm.rlvcr.eval_levels: %s is not evaluated, because %s", name, _UNKNOWN[name]
            )
        elif rule.forces:
            found[name] = rule
    return found
