"""Level rules: the policy chooses the thinking level of a turn, or a rule forces it.

free       the policy chooses.
level_1    level 1 in every turn (level_2, level_3, level_4: that level in every turn).
random     levels drawn independently of the state, with the frequencies of the policy's choices.
oracle     the required level (the lowest that suffices), which the environment names.
"""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlvcr.levels import LEVELS
from rlvcr.records import ThinkingTurnRecord
from rlvcr.settings import LEVEL_RULES, LevelRuleName
from verl.config.settings.hints import did_you_mean

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LevelRule:
    """Rule that forces thinking level k with probability ``shares[k - 1]``.

    Otherwise the policy chooses the level. With ``forces_required_level`` the rule forces the
    required level: the lowest that suffices, which the environment names. The policy chooses in
    turns without a required level. Raises ``ValueError`` for invalid shares.
    """

    shares: tuple[float, ...] = (0.0,) * len(LEVELS)
    forces_required_level: bool = False

    def __post_init__(self) -> None:
        total_share = math.fsum(self.shares)
        # Rounding: shares computed from counts may add up to slightly more than 1.
        if len(self.shares) != len(LEVELS) or min(self.shares) < 0 or total_share > 1 + 1e-9:
            raise ValueError(
                f"the shares of the levels are {self.shares}; allowed: four numbers of at least 0 "
                "that add up to at most 1"
            )

    @classmethod
    def from_uniform_share(cls, share: float) -> "LevelRule":
        """Return the rule that forces a uniformly drawn level in a ``share`` of the turns."""
        return cls((share / len(LEVELS),) * len(LEVELS))

    @classmethod
    def from_level_frequencies(cls, levels: Sequence[int]) -> "LevelRule":
        """Return the rule that forces each thinking level with its frequency in ``levels``."""
        return cls(tuple(levels.count(level) / len(levels) for level in LEVELS))

    @property
    def can_force_level(self) -> bool:
        """False for the rule ``free``, under which the policy chooses in every turn."""
        return self.forces_required_level or any(self.shares)

    def draw_level(self, uniform_number: float, required_level: int | None) -> int | None:
        """Return the thinking level to force in a turn, or None if the policy chooses.

        ``uniform_number`` is a random number in [0, 1). ``required_level`` is the lowest level that
        suffices in this turn, if the environment names it.

            shares (0.1, 0.1, 0.1, 0.1): number 0.15 gives level 2, number 0.5 gives None
        """
        if self.forces_required_level:
            return required_level
        cumulative_share = 0.0
        for level, share in zip(LEVELS, self.shares, strict=True):
            cumulative_share += share
            if uniform_number < cumulative_share:
                return level
        return None


FREE_RULE = LevelRule()
_FIXED_RULES: dict[str, LevelRule] = {"free": FREE_RULE} | {
    f"level_{level}": LevelRule.from_level_frequencies([level]) for level in LEVELS
}


def build_level_rule(name: str, turns: Iterable[ThinkingTurnRecord]) -> LevelRule | None:
    """Return the rule ``name``, which determines the thinking level of every turn.

    ``turns`` are those of a rollout in which the policy chose the levels. The rule ``random`` draws
    levels with the frequencies that they have in ``turns``. The rule ``oracle`` forces the lowest
    level that suffices. Returns None for ``random`` if no turn has a readable level, and for
    ``oracle`` if the environment names no required level. Raises ``ValueError`` for an unknown
    name.
    """
    if name in _FIXED_RULES:
        return _FIXED_RULES[name]
    if name == "random":
        chosen_levels = [step.level for step in turns if step.level and not step.level_forced]
        return LevelRule.from_level_frequencies(chosen_levels) if chosen_levels else None
    if name == "oracle":
        is_known = any(step.needed_level is not None for step in turns)
        return LevelRule(forces_required_level=True) if is_known else None
    hint = did_you_mean(name, LEVEL_RULES)
    raise ValueError(
        f"algorithm.rlvcr.eval_levels has {name!r}; allowed: {', '.join(LEVEL_RULES)}{hint}"
    )


_MISSING_REASONS = {
    "random": "no turn of the free rollout has a level that can be read",
    "oracle": "the environment does not name the required level of a turn",
}


def select_level_rules(
    names: Sequence[LevelRuleName], turns: Sequence[ThinkingTurnRecord]
) -> dict[LevelRuleName, LevelRule]:
    """Return the rules ``names`` that force thinking levels, by name.

    Rollouts under these rules are compared with the rollout of ``turns``, in which the policy chose
    the levels. So the rule ``free`` is not included. A rule that needs levels which ``turns`` do
    not have is dropped with a warning.
    """
    rules: dict[LevelRuleName, LevelRule] = {}
    for name in names:
        rule = build_level_rule(name, turns)
        if rule is None:
            logger.warning(
                "algorithm.rlvcr.eval_levels: %s is not evaluated, because %s",
                name,
                _MISSING_REASONS[name],
            )
        elif rule.can_force_level:
            rules[name] = rule
    return rules
