"""Outcomes of several runs over the same validation set, and paired differences between them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.metrics import find_first_rows, find_graded_rows
from verl.utils.statistics import (
    bootstrap_interval,
    compute_resampled_means,
    percentile_interval,
    rate_interval,
)


@dataclass(frozen=True, slots=True)
class ValidationOutcome:
    """Outcome of one run over the validation set, per task [T] in order of name.

    Args:
        tasks: uids of the tasks.
        success: success rate of each task [T]; NaN if all of its trajectories failed.
        episodes: number of graded trajectories of all tasks.
        steps: turns [T], summed over the graded trajectories of the task.
        turn_tokens: tokens of these turns [T].
        sampled_tokens: those of ``turn_tokens`` that the policy sampled [T]. They are fewer if
            turns were forced to begin with given tokens.
        failed: number of failed trajectories. They are excluded from all other fields.
    """

    tasks: tuple[str, ...]
    success: np.ndarray
    episodes: int
    turns: np.ndarray
    turn_tokens: np.ndarray
    sampled_tokens: np.ndarray
    failed: int = 0

    @property
    def is_graded(self) -> np.ndarray:
        """Mask [T] of the tasks with at least one graded trajectory."""
        return ~np.isnan(self.success)


def summarize_validation(batch: DataProto) -> ValidationOutcome:
    """Return the outcome of the rows of a validation."""
    columns = batch.non_tensor_batch
    uids = columns["uid"].astype(str)
    # Use all rows: the turns of a trajectory may be in several rows.
    tasks, task = np.unique(uids, return_inverse=True)
    graded = find_graded_rows(batch)
    is_graded = np.isin(columns["traj_uid"].astype(str), columns["traj_uid"][graded].astype(str))
    steps = [row if keep else [] for row, keep in zip(columns["steps"], is_graded, strict=True)]
    turns = [sum(step.span[1] - step.span[0] for step in row) for row in steps]
    sampled = [sum(step.num_tokens for step in row) for row in steps]
    episodes = np.bincount(task[graded], minlength=len(tasks))
    successes = np.bincount(
        task[graded], columns["won"][graded].astype(float), minlength=len(tasks)
    )
    return ValidationOutcome(
        tasks=tuple(tasks.tolist()),
        success=_divide_or_nan(successes, episodes),
        episodes=len(graded),
        turns=np.bincount(task, weights=[len(row) for row in steps]),
        turn_tokens=np.bincount(task, weights=turns),
        sampled_tokens=np.bincount(task, weights=sampled),
        failed=len(find_first_rows(batch)) - len(graded),
    )


def compute_outcome_metrics(outcome: ValidationOutcome, prefix: str) -> dict[str, float]:
    """Return the metrics ``<prefix>/...`` of one outcome; only counts if all trajectories failed.

    ``success_rate`` and ``tokens_per_step`` have 95% intervals over tasks. ``tokens_per_step``
    counts all tokens of a turn, forced or sampled, so that it is comparable between outcomes.
    ``sampled_tokens_per_step`` and ``sampled_tokens_per_episode`` count only sampled tokens. The
    number per episode is low if episodes end early without success.
    """
    all_steps = float(outcome.turns.sum())
    sampled = float(outcome.sampled_tokens.sum())
    counts = {"graded": float(outcome.episodes), "failed": float(outcome.failed)}
    if not outcome.episodes:
        return {f"{prefix}/{name}": value for name, value in counts.items()}
    success = outcome.success[outcome.is_graded]
    metrics = {
        **counts,
        **_add_bounds("success_rate", success.mean(), rate_interval(success)),
        "episode_length": all_steps / outcome.episodes,
        "tokens_per_step": float(outcome.turn_tokens.sum()) / max(all_steps, 1.0),
        "sampled_tokens_per_step": sampled / max(all_steps, 1.0),
        "sampled_tokens_per_episode": sampled / outcome.episodes,
    }
    if all_steps:
        tokens, steps = compute_resampled_means(
            [outcome.turn_tokens[outcome.is_graded], outcome.turns[outcome.is_graded]]
        )
        bounds = _compute_interval(_divide_or_nan(tokens, steps))
        metrics |= _add_bounds("tokens_per_step", metrics["tokens_per_step"], bounds)
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def compute_paired_difference(
    outcome: ValidationOutcome, other: ValidationOutcome, prefix: str
) -> dict[str, float]:
    """Return the metrics ``<prefix>/...`` of ``outcome`` minus those of ``other``.

    ``success_difference`` and ``tokens_per_step_difference`` are differences of means.
    ``tokens_per_step_change`` is the latter divided by the tokens per step of ``other``. All have
    95% intervals over resampled tasks. Both outcomes use the same resampled tasks, so task
    difficulty that they share does not widen the intervals.

    Tasks whose trajectories all failed in one outcome are excluded from both. The metric ``tasks``
    then is the number of the other tasks. Token metrics are omitted if one outcome has no tokens.

    Raises:
        ValueError: the outcomes have different tasks.
    """
    if outcome.tasks != other.tasks:
        raise ValueError(
            f"a difference per task needs the same tasks in both runs; the runs have "
            f"{len(outcome.tasks)} and {len(other.tasks)} tasks, of which "
            f"{len({*outcome.tasks} & {*other.tasks})} are common"
        )
    graded_in_both = outcome.is_graded & other.is_graded
    metrics: dict[str, float] = (
        {} if graded_in_both.all() else {"tasks": float(graded_in_both.sum())}
    )
    if graded_in_both.any():
        success = (outcome.success - other.success)[graded_in_both]
        metrics |= _add_bounds("success_difference", success.mean(), bootstrap_interval(success))
    if outcome.turn_tokens[graded_in_both].sum() and other.turn_tokens[graded_in_both].sum():
        metrics |= _compute_token_differences(outcome, other, graded_in_both)
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def compare_outcomes(
    outcomes: Mapping[str, ValidationOutcome], baseline: str, prefix: str
) -> dict[str, float]:
    """Return ``<prefix>/<name>/...``: metrics of outcomes, and differences from ``baseline``."""
    metrics: dict[str, float] = {}
    for name, outcome in outcomes.items():
        metrics |= compute_outcome_metrics(outcome, f"{prefix}/{name}")
    return metrics | compute_differences(outcomes, baseline, prefix)


def compute_differences(
    outcomes: Mapping[str, ValidationOutcome], baseline: str, prefix: str
) -> dict[str, float]:
    """Return ``<prefix>/<name>/...``: differences of every other outcome from ``baseline``."""
    metrics: dict[str, float] = {}
    for name, outcome in outcomes.items():
        if name != baseline:
            metrics |= compute_paired_difference(outcome, outcomes[baseline], f"{prefix}/{name}")
    return metrics


def _compute_token_differences(
    outcome: ValidationOutcome, other: ValidationOutcome, tasks: np.ndarray
) -> dict[str, float]:
    columns = [
        column[tasks]
        for column in (outcome.turn_tokens, outcome.turns, other.turn_tokens, other.turns)
    ]
    tokens, turns, other_tokens, other_turns = compute_resampled_means(columns)
    resampled = _divide_or_nan(tokens, turns)
    other_resampled = _divide_or_nan(other_tokens, other_turns)
    totals = [column.sum() for column in columns]
    value = totals[0] / totals[1]
    other_value = totals[2] / totals[3]
    differences_bounds = _compute_interval(resampled - other_resampled)
    change_bounds = _compute_interval(_divide_or_nan(resampled, other_resampled) - 1)
    return {
        **_add_bounds("tokens_per_step_difference", value - other_value, differences_bounds),
        **_add_bounds("tokens_per_step_change", value / other_value - 1, change_bounds),
    }


def _divide_or_nan(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return ``above / below``; NaN where ``below`` is 0."""
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)


def _compute_interval(values: np.ndarray) -> tuple[float, float]:
    # A resample in which no trajectory has a turn has no tokens per turn (NaN).
    return percentile_interval(values[~np.isnan(values)])


def _add_bounds(name: str, value: float, bounds: tuple[float, float]) -> dict[str, float]:
    low, high = bounds
    return {name: float(value), f"{name}_low": low, f"{name}_high": high}
