"""Coverage of the confidence intervals of ``main_audit``, by simulation:
``python -m scripts.dev.audit_coverage [REPETITIONS]``.

At some turns (points), an audit measures the effect of each thinking level on the return of the
episode. It reports the rank correlation of these effects with scores of the levels. Here scores and
effects are drawn at random, jointly normal with correlation r. The true rank correlation is
``6 / pi * asin(r / 2)``. The points of one task have a part of their random values in common, as
the turns of one task do in a real audit.

Every repetition audits new points with ``correlate_scores``. The table has the share of repetitions
in which the 95% interval contains the true rank correlation. Its last columns are for all levels,
and for the level that the policy chose at each point.
"""

import itertools
import math
import sys
from collections.abc import Sequence

import numpy as np

from rlvcr.levels import LEVELS
from rlvcr.research.audit import AuditedTurn, correlate_scores

SIMULATIONS = tuple(
    itertools.product(((10, 10), (20, 5), (64, 2)), (0.0, 0.5, 0.9))
)  # ((tasks, points per task), correlation) of each simulation
TASK_VARIANCE_SHARE = 0.5  # share of the variance that the points of a task have in common
REPETITIONS = 200  # simulated audits for each line of the table
RESAMPLES = 400  # bootstrap resamples for the interval of one audit


def draw_audit_points(
    rng: np.random.Generator, tasks: int, points_per_task: int, correlation: float
) -> list[AuditedTurn]:
    """Draw audited turns. Their scores ``planted`` correlate with the effects of the levels."""
    mixing_matrix = np.linalg.cholesky([[1 + 1e-9, correlation], [correlation, 1 + 1e-9]])
    task_noise = rng.normal(size=(tasks, 1, len(LEVELS), 2))
    point_noise = rng.normal(size=(tasks, points_per_task, len(LEVELS), 2))
    independent_values = (
        math.sqrt(TASK_VARIANCE_SHARE) * task_noise
        + math.sqrt(1 - TASK_VARIANCE_SHARE) * point_noise
    )
    correlated_values = independent_values @ mixing_matrix.T
    chosen_levels = rng.integers(1, len(LEVELS) + 1, size=(tasks, points_per_task))
    return [
        AuditedTurn(
            traj_uid=f"{task}/{point_number}",
            step=0,
            chosen=int(chosen_levels[task, point_number]),
            won=True,
            returns=tuple(
                (float(effect),) for effect in correlated_values[task, point_number, :, 0]
            ),
            scores={"planted": tuple(correlated_values[task, point_number, :, 1].tolist())},
            task=str(task),
        )
        for task in range(tasks)
        for point_number in range(points_per_task)
    ]


def measure_coverage(
    tasks: int,
    points_per_task: int,
    correlation: float,
    repetitions: int,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the shares of simulated audits whose 95% interval contains the true correlation.

    The first share is for intervals over all levels, the second for those over chosen levels.
    """
    rng = np.random.default_rng(seed)
    true_correlation = 6 / math.pi * math.asin(correlation / 2)
    covered_counts = np.zeros(2)
    for _ in range(repetitions):
        points = draw_audit_points(rng, tasks, points_per_task, correlation)
        score_correlations = correlate_scores(
            points, seed=int(rng.integers(2**31)), resamples=resamples
        ).scores
        (planted_audit,) = (score for score in score_correlations if score.name == "planted")
        for column, interval in enumerate((planted_audit.all_levels, planted_audit.chosen)):
            covered_counts[column] += (
                interval is not None and interval[1] <= true_correlation <= interval[2]
            )
    all_level_coverage, chosen_level_coverage = covered_counts / repetitions
    return float(all_level_coverage), float(chosen_level_coverage)


def main(argv: Sequence[str]) -> int:
    """Print how often 95% intervals contain the true value, for each size and correlation."""
    repetitions = int(argv[0]) if argv else REPETITIONS
    print("tasks  points per task  correlation  all levels  chosen levels")
    for (tasks, points_per_task), correlation in SIMULATIONS:
        coverage = measure_coverage(tasks, points_per_task, correlation, repetitions)
        print(
            f"{tasks:5d}  {points_per_task:15d}  {correlation:11.1f}  "
            f"{coverage[0]:10.1%}  {coverage[1]:13.1%}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
