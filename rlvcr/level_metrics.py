"""What the levels did in an update: shares, success per level, parse failures, and a watch for
collapse.
"""

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rlvcr.levels import LEVELS
from rlvcr.records import ThinkingStep

logger = logging.getLogger(__name__)
PERMUTATIONS = 20  # of the levels, for what chance makes of their information
MOST_SITUATIONS = 16  # of which a table can be read


def level_metrics(
    levels: Sequence[int | None], success: Sequence[bool], failures: Sequence[str | None] = ()
) -> dict[str, float]:
    """Metrics over the S steps of an update.

    ``levels``: 1..4, or None for a step whose level could not be read; ``success``: whether the
    step's trajectory was won; ``failures``: parse failure reasons, None for none.
    ``rlvcr/level_share_k`` is a share of the ``rlvcr/level_steps`` steps with a level,
    ``rlvcr/level_success_k`` is absent for an unseen level, ``rlvcr/parse_fail_<reason>`` is a
    share of all.
    """
    counts: Counter[int] = Counter()
    wins: Counter[int] = Counter()
    for level, won in zip(levels, success, strict=True):
        if level is not None:
            counts[level] += 1
            wins[level] += bool(won)
    total = counts.total()
    # Every level has a share, also one that nobody took: a curve that ends would hide a collapse.
    metrics = {f"rlvcr/level_share_{k}": counts[k] / total if total else 0.0 for k in LEVELS}
    metrics["rlvcr/level_steps"] = float(total)
    for level in LEVELS:
        # A 0 would draw a level that nobody took as one that always loses.
        if counts[level]:
            metrics[f"rlvcr/level_success_{level}"] = wins[level] / counts[level]
    reasons = Counter(reason for reason in failures if reason is not None)
    for reason, count in sorted(reasons.items()):
        metrics[f"rlvcr/parse_fail_{reason}"] = count / len(failures)
    return metrics


def level_information(
    levels: Sequence[int | None], situations: Sequence[str], seed: int = 0
) -> dict[str, float]:
    """How much the level says about the situation that it was chosen in, in nats.

    ``rlvcr/level_information`` is the mutual information of the observed counts (at most
    ``log 4``), ``rlvcr/level_information_null`` its mean over levels dealt anew among the steps,
    which is what chance makes of so many steps and situations: only what lies above it is use of
    the levels. Steps without a level do not count; without any, there is nothing to say.
    """
    known = [(level, name) for level, name in zip(levels, situations, strict=True) if level]
    if not known:
        return {}
    columns = np.array([LEVELS.index(level) for level, _ in known])
    _, rows = np.unique([name for _, name in known], return_inverse=True)
    rng = np.random.default_rng(seed)
    dealt = [_information(rows, rng.permutation(columns)) for _ in range(PERMUTATIONS)]
    return {
        "rlvcr/level_information": _information(rows, columns),
        "rlvcr/level_information_null": float(np.mean(dealt)),
    }


def levels_by_situation(steps: Sequence[ThinkingStep], prefix: str) -> dict[str, float]:
    """What was chosen in every situation that the environment names, under
    ``<prefix>/<situation>``.

    ``share_1..4`` of the steps with a level that the policy chose, ``steps``, their number, and the
    mean ``needed_level`` where the environment names it. Nothing for more than ``MOST_SITUATIONS``.
    """
    chosen: dict[str, list[ThinkingStep]] = {}
    for step in steps:
        if step.situation and step.level and not step.level_forced:
            chosen.setdefault(step.situation, []).append(step)
    if len(chosen) > MOST_SITUATIONS:
        return {}
    metrics: dict[str, float] = {}
    for situation, found in sorted(chosen.items()):
        place = f"{prefix}/{situation}"
        counts = Counter(step.level for step in found)
        metrics[f"{place}/steps"] = float(len(found))
        metrics |= {f"{place}/share_{level}": counts[level] / len(found) for level in LEVELS}
        needed = [step.needed_level for step in found if step.needed_level is not None]
        if needed:
            metrics[f"{place}/needed_level"] = float(np.mean(needed))
    return metrics


def _information(rows: np.ndarray, columns: np.ndarray) -> float:
    """What the levels ``columns`` [S] say about the situations ``rows`` [S], both as numbers."""
    table = np.zeros((rows.max() + 1, len(LEVELS)))
    np.add.at(table, (rows, columns), 1.0)
    return mutual_information(table)


def mutual_information(counts: np.ndarray | Sequence[Sequence[float]]) -> float:
    """What the columns of a table of counts say about its lines, in nats; 0 for an empty one."""
    table = np.asarray(counts, dtype=np.float64)
    joint = table / (table.sum() or 1.0)
    independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    seen = joint > 0
    return float((joint[seen] * np.log(joint[seen] / independent[seen])).sum())


class CollapseWatch:
    """Warns when a level was not seen for ``patience`` updates in a row: collapse is the method's
    known failure.

    ``unseen`` counts updates since each level was last seen.
    """

    def __init__(self, patience: int) -> None:
        if patience < 1:
            raise ValueError(f"collapse_patience must be at least 1, got {patience}")
        self.patience = patience
        self.unseen = dict.fromkeys(LEVELS, 0)

    def update(self, levels: Sequence[int | None]) -> list[int]:
        """Record the levels of one update; return those unseen for ``patience`` updates or more.

        Each is logged as a warning when it reaches ``patience`` and again every ``patience``
        updates.
        """
        seen = set(levels)
        for level in LEVELS:
            self.unseen[level] = 0 if level in seen else self.unseen[level] + 1
            if self.unseen[level] and self.unseen[level] % self.patience == 0:
                logger.warning(
                    "thinking level %d was not sampled for %d updates; raise "
                    "algorithm.rlvcr.thinking_diversity_w, set algorithm.rlvcr.epsilon_levels or "
                    "use combine=gated",
                    level,
                    self.unseen[level],
                )
        return [level for level in LEVELS if self.unseen[level] >= self.patience]

    def state(self) -> list[int]:
        """``unseen`` in the order of levels."""
        return [self.unseen[level] for level in LEVELS]

    def resume(self, state: Sequence[int]) -> None:
        """Count on from ``state``; from 0 where it is empty."""
        self.unseen = dict(zip(LEVELS, state or [0] * len(LEVELS), strict=True))
