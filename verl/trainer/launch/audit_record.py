"""Results of ``main_audit``: metrics for report and console, and a file of all measured turns.

A point is one turn of a trajectory that was continued with every thinking level. A score is the
advantage that an estimator gives to a level. The effect of a level is measured from the returns.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from rlvcr.report_sections import AUDIT_FILE, LEVEL_EFFECT_TABLE, SCORE_AGREEMENT_TABLE
from rlvcr.research.audit import AuditPoint, AuditResult, Interval
from verl.algos import compute_group_stats, compute_grpo_outcome_advantage, number_keys
from verl.algos.gigpo import compute_discounted_step_returns, flatten_steps
from verl.config.schema import PPOConfig
from verl.protocol import DataProto
from verl.record.console import show_tables
from verl.utils.files import atomic_write


def compute_turn_scores(data: DataProto, cfg: PPOConfig) -> dict[tuple[str, int], dict[str, float]]:
    """Return the advantages of two estimators without thinking levels, for comparison.

    The keys are (uid of the trajectory, turn number).

    ``grpo`` is the advantage of the trajectory. ``gigpo`` is the discounted return of the turn
    minus the mean discounted return of all turns in the same state.
    """
    columns = data.non_tensor_batch
    steps = flatten_steps(
        columns["uid"],
        columns["traj_uid"],
        columns["step_rewards"],
        columns["step_index"],
        columns["anchor_obs"],
    )
    returns = compute_discounted_step_returns(steps, cfg.algorithm.gamma)
    of_state = (returns - compute_group_stats(returns, number_keys(steps.state)).mean).tolist()
    of_trajectory, _ = compute_grpo_outcome_advantage(
        data.batch["token_level_rewards"],
        data.batch["response_mask"],
        columns["uid"],
        traj_index=columns["traj_uid"],
    )
    # The advantage is equal on all sampled tokens of a row and 0 elsewhere.
    of_row = of_trajectory.sum(-1) / data.batch["response_mask"].sum(-1).clamp(min=1)
    return {
        (str(columns["traj_uid"][row]), turn): {"grpo": float(of_row[row]), "gigpo": advantage}
        for row, turn, advantage in zip(steps.row, steps.number, of_state, strict=True)
    }


def compute_audit_metrics(result: AuditResult) -> dict[str, float]:
    """Return ``audit/*``: measured effects of the levels, and correlations of scores with them."""
    metrics = {
        "audit/points": float(result.points),
        "audit/plays": float(result.plays),
        "audit/reliability": result.reliability,
    }
    for level, interval in enumerate(result.levels, start=1):
        metrics |= _interval_metrics(f"{LEVEL_EFFECT_TABLE.prefix}/level_{level}/effect", interval)
    for score in result.scores:
        line = f"{SCORE_AGREEMENT_TABLE.prefix}/{score.name}"
        for name in ("all_levels", "in_won", "in_lost", "chosen_level"):
            interval = getattr(score, name)
            if interval is not None:
                metrics |= _interval_metrics(f"{line}/{name}", interval)
    # The correlation of a constant score is NaN, which the journal cannot store.
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def write_points(points: Sequence[AuditPoint], result: AuditResult, directory: Path) -> Path:
    """Write all points with returns and scores as JSON below ``directory``; return the file."""
    path = directory / AUDIT_FILE
    content = {
        "audit": dataclasses.asdict(result),
        "points": [dataclasses.asdict(point) for point in points],
    }
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=1) + "\n")
    return path


def print_audit_tables(metrics: dict[str, float]) -> None:
    """Print the tables of effects and correlations to standard output."""
    show_tables((LEVEL_EFFECT_TABLE, SCORE_AGREEMENT_TABLE), metrics)


def _interval_metrics(name: str, interval: Interval) -> dict[str, float]:
    value, low, high = interval
    return {name: value, f"{name}_low": low, f"{name}_high": high}
