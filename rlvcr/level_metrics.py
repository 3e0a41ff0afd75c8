"""Metrics of the thinking levels in a training step, and a warning for levels no longer sampled."""

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rlvcr.levels import LEVELS
from rlvcr.records import ThinkingTurnRecord
from verl.utils.saved_state import check_state_value, is_count

logger = logging.getLogger(__name__)
NUM_PERMUTATIONS = 20  # shuffles of the levels; they estimate the information expected by chance
MAX_SITUATIONS = 16  # the report has one table row per situation; more are unreadable


def compute_level_metrics(
    levels: Sequence[int | None], success: Sequence[bool], failures: Sequence[str | None] = ()
) -> dict[str, float]:
    """Return metrics of the thinking levels and parse failures in the S turns of one training step.

    ``levels``: 1..4, or None if the level could not be read or was forced. ``success``: success of
    the turn's trajectory. ``failures``: reason why the turn could not be parsed, None if it could.

    ``rlvcr/level_share_k`` is the share of level k in the ``rlvcr/level_steps`` turns with a level.
    ``rlvcr/level_success_k`` is the success rate of turns at level k, absent if there are none.
    ``rlvcr/parse_fail_<reason>`` is a share of all turns.
    """
    level_counts: Counter[int] = Counter()
    success_counts: Counter[int] = Counter()
    for level, is_success in zip(levels, success, strict=True):
        if level is not None:
            level_counts[level] += 1
            success_counts[level] += bool(is_success)
    num_turns_with_level = level_counts.total()
    # Report share 0 for a level that was not sampled: a missing value would hide a collapse.
    metrics = {
        f"rlvcr/level_share_{k}": level_counts[k] / num_turns_with_level
        if num_turns_with_level
        else 0.0
        for k in LEVELS
    }
    metrics["rlvcr/level_steps"] = float(num_turns_with_level)
    for level in LEVELS:
        # The success rate of a level that was not sampled is unknown, not 0.
        if level_counts[level]:
            metrics[f"rlvcr/level_success_{level}"] = success_counts[level] / level_counts[level]
    failure_counts = Counter(reason for reason in failures if reason is not None)
    for reason, count in sorted(failure_counts.items()):
        metrics[f"rlvcr/parse_fail_{reason}"] = count / len(failures)
    return metrics


def compute_level_mutual_information(
    levels: Sequence[int | None], situations: Sequence[str]
) -> dict[str, float]:
    """Return the mutual information of thinking level and situation (kind of state), in nats.

    ``rlvcr/level_information`` is computed from the observed counts and is at most ``log 4``.
    ``rlvcr/level_information_null`` is the mean for permuted levels, the value expected by chance.
    A value clearly above it shows that levels depend on situations. Turns without a level are
    ignored. The result is empty if no turn has a level.
    """
    levels_and_situations = [
        (level, name) for level, name in zip(levels, situations, strict=True) if level
    ]
    if not levels_and_situations:
        return {}
    level_indices = np.array([LEVELS.index(level) for level, _ in levels_and_situations])
    # Number the situations with a dict: an array would reserve the longest text for each of them.
    situation_numbers: dict[str, int] = {}
    situation_indices = np.array(
        [
            situation_numbers.setdefault(name, len(situation_numbers))
            for _, name in levels_and_situations
        ]
    )
    rng = np.random.default_rng(0)
    permuted_information = [
        _compute_index_mutual_information(situation_indices, rng.permutation(level_indices))
        for _ in range(NUM_PERMUTATIONS)
    ]
    return {
        "rlvcr/level_information": _compute_index_mutual_information(
            situation_indices, level_indices
        ),
        "rlvcr/level_information_null": float(np.mean(permuted_information)),
    }


def compute_levels_by_situation(
    turns: Sequence[ThinkingTurnRecord], prefix: str
) -> dict[str, float]:
    """Return metrics ``<prefix>/<situation>/*`` of the thinking levels that the policy chose.

    A situation is a kind of state that the environment names. ``steps`` is the number of turns in
    which the policy chose the level. ``share_1..4`` are the shares of the levels in these turns.
    ``needed_level`` is the mean required level (lowest level that suffices), if the environment
    names it. The result is empty for more than ``MAX_SITUATIONS`` situations.
    """
    turns_by_situation: dict[str, list[ThinkingTurnRecord]] = {}
    for turn in turns:
        if turn.situation and turn.level and not turn.level_forced:
            turns_by_situation.setdefault(turn.situation, []).append(turn)
    if len(turns_by_situation) > MAX_SITUATIONS:
        return {}
    metrics: dict[str, float] = {}
    for situation, situation_turns in sorted(turns_by_situation.items()):
        key_prefix = f"{prefix}/{situation}"
        counts = Counter(turn.level for turn in situation_turns)
        metrics[f"{key_prefix}/steps"] = float(len(situation_turns))
        metrics |= {
            f"{key_prefix}/share_{level}": counts[level] / len(situation_turns) for level in LEVELS
        }
        required_levels = [
            turn.needed_level for turn in situation_turns if turn.needed_level is not None
        ]
        if required_levels:
            metrics[f"{key_prefix}/needed_level"] = float(np.mean(required_levels))
    return metrics


def _compute_index_mutual_information(
    situation_indices: np.ndarray, level_indices: np.ndarray
) -> float:
    """Return the mutual information of S pairs of a situation index and a level index, in nats."""
    table = np.zeros((situation_indices.max() + 1, len(LEVELS)))
    np.add.at(table, (situation_indices, level_indices), 1.0)
    return compute_mutual_information(table)


def compute_mutual_information(counts: np.ndarray | Sequence[Sequence[float]]) -> float:
    """Return the mutual information of rows and columns of a table of counts, in nats."""
    table = np.asarray(counts, dtype=np.float64)
    joint_probs = table / (table.sum() or 1.0)
    independent_probs = joint_probs.sum(1, keepdims=True) * joint_probs.sum(0, keepdims=True)
    is_nonzero = joint_probs > 0
    log_ratios = np.log(joint_probs[is_nonzero] / independent_probs[is_nonzero])
    return float((joint_probs[is_nonzero] * log_ratios).sum())


class LevelCollapseDetector:
    """Detector of thinking levels that the policy no longer samples, a known failure of the method.

    ``steps_since_sampled`` maps each level (1 to 4) to the number of training steps since it was
    last sampled.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.steps_since_sampled = dict.fromkeys(LEVELS, 0)

    def update(self, levels: Sequence[int | None]) -> list[int]:
        """Record the thinking levels sampled in one training step; return those no longer sampled.

        These are the levels that were not sampled for ``patience`` steps or more. A warning is
        logged every ``patience`` steps in which a level was not sampled.
        """
        sampled_levels = set(levels)
        for level in LEVELS:
            num_steps = 0 if level in sampled_levels else self.steps_since_sampled[level] + 1
            self.steps_since_sampled[level] = num_steps
            if num_steps and num_steps % self.patience == 0:
                logger.warning(
                    "thinking level %d was not sampled for %d steps; raise "
                    "algorithm.rlvcr.thinking_diversity_w, set algorithm.rlvcr.epsilon_levels or "
                    "use algorithm.rlvcr.combine=gated",
                    level,
                    num_steps,
                )
        return [level for level in LEVELS if self.steps_since_sampled[level] >= self.patience]

    def state(self) -> list[int]:
        """Return the steps since each thinking level was last sampled, in order of level."""
        return [self.steps_since_sampled[level] for level in LEVELS]

    def resume(self, state: Sequence[int]) -> None:
        """Restore the counts that ``state()`` returned; an empty ``state`` sets them to 0.

        Raises ``InvalidStateError`` for other values.
        """
        are_counts = isinstance(state, list) and all(map(is_count, state))
        has_all_levels = are_counts and len(state) in (0, len(LEVELS))
        allowed = f"a list of {len(LEVELS)} integers of at least 0"
        check_state_value("levels_unseen", state, has_all_levels, allowed)
        self.steps_since_sampled = dict(zip(LEVELS, state or [0] * len(LEVELS), strict=True))
