"""What a credit audit leaves: metrics for the report and the console, and every point in a file."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from rlvcr.report_sections import AUDIT_FILE, AUDITED_LEVELS, AUDITED_SCORES
from rlvcr.research.audit import Audit, AuditPoint, Interval
from verl.algos import compute_grpo_outcome_advantage, factorize, group_mean_std
from verl.algos.gigpo import discounted_step_returns, flatten_steps
from verl.config.schema import PPOConfig
from verl.protocol import DataProto
from verl.record.console import show_tables
from verl.utils.files import atomic_write


def step_scores(data: DataProto, cfg: PPOConfig) -> dict[tuple[str, int], dict[str, float]]:
    """What estimators without thinking credit say of every step of ``data``, by trajectory and
    step: ``grpo``, the advantage of its play, and ``gigpo``, that of its state's group.
    """
    columns = data.non_tensor_batch
    steps = flatten_steps(
        columns["uid"],
        columns["traj_uid"],
        columns["step_rewards"],
        columns["step_index"],
        columns["anchor_obs"],
    )
    returns = discounted_step_returns(steps, cfg.algorithm.gamma)
    of_state = (returns - group_mean_std(returns, factorize(steps.state)).mean).tolist()
    of_play, _ = compute_grpo_outcome_advantage(
        data.batch["token_level_rewards"],
        data.batch["response_mask"],
        columns["uid"],
        traj_index=columns["traj_uid"],
    )
    # The same at every sampled token of a row, and 0 elsewhere.
    of_row = of_play.sum(-1) / data.batch["response_mask"].sum(-1).clamp(min=1)
    return {
        (str(columns["traj_uid"][row]), number): {"grpo": float(of_row[row]), "gigpo": advantage}
        for row, number, advantage in zip(steps.row, steps.number, of_state, strict=True)
    }


def audit_metrics(found: Audit) -> dict[str, float]:
    """``audit/*``: effects of the levels, and how every score agrees with them."""
    metrics = {
        "audit/points": float(found.points),
        "audit/plays": float(found.plays),
        "audit/reliability": found.reliability,
    }
    for level, interval in enumerate(found.levels, start=1):
        metrics |= _bounds(f"{AUDITED_LEVELS.prefix}/level_{level}/effect", interval)
    for score in found.scores:
        line = f"{AUDITED_SCORES.prefix}/{score.name}"
        for name in ("all_levels", "in_won", "in_lost", "chosen_level"):
            interval = getattr(score, name)
            if interval is not None:
                metrics |= _bounds(f"{line}/{name}", interval)
    # A score that says the same everywhere has no correlation, and a journal holds numbers alone.
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def write_points(points: Sequence[AuditPoint], found: Audit, directory: Path) -> Path:
    """Every point with its returns and scores as JSON below ``directory``; returns the file."""
    path = directory / AUDIT_FILE
    content = {
        "audit": dataclasses.asdict(found),
        "points": [dataclasses.asdict(point) for point in points],
    }
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=1) + "\n")
    return path


def show(metrics: dict[str, float]) -> None:
    """Write the tables of the audit to standard output."""
    show_tables((AUDITED_LEVELS, AUDITED_SCORES), metrics)


def _bounds(name: str, interval: Interval) -> dict[str, float]:
    value, low, high = interval
    return {name: value, f"{name}_low": low, f"{name}_high": high}
