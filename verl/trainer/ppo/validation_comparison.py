"""Outcomes of several runs over the same validation set, and paired differences between them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl.protocol import DataProto
from verl.records import SUMMARY
from verl.trainer.ppo.metrics import list_graded_first_rows, list_trajectory_first_rows
from verl.utils.statistics import (
    bootstrap_interval,
    compute_resampled_means,
    make_interval_metrics,
    percentile_interval,
    rate_interval,
)


@dataclass(frozen=True, slots=True)
class ValidationOutcome:
    """Outcome of one run over the validation set, per task [T] in order of name.

    Args:
        tasks: uids of the tasks.
        success_rates: success rate of each task [T]; NaN if all of its trajectories failed.
        num_graded: number of graded trajectories (those that did not fail) of all tasks.
        turns: number of turns [T] of the graded trajectories.
        turn_tokens: number of tokens in these turns [T].
        sampled_tokens: number of tokens [T] that the policy sampled in these turns and in summaries
            of full rows. Tokens that a rule forced at the beginning of a turn are not counted.
        num_failed: number of failed trajectories. They are excluded from all other fields.
    """

    tasks: tuple[str, ...]
    success_rates: np.ndarray
    num_graded: int
    turns: np.ndarray
    turn_tokens: np.ndarray
    sampled_tokens: np.ndarray
    num_failed: int = 0

    @property
    def is_graded(self) -> np.ndarray:
        """Mask [T]: True for tasks with at least one trajectory that did not fail."""
        return ~np.isnan(self.success_rates)


def summarize_validation(batch: DataProto) -> ValidationOutcome:
    """Return success and token counts per task of a validation with the rows ``batch``."""
    columns = batch.non_tensor_batch
    uids = columns["uid"].astype(str)
    # Use all rows: the turns of a trajectory may be in several rows.
    tasks, task_indices = np.unique(uids, return_inverse=True)
    graded_rows = list_graded_first_rows(batch)
    is_graded = np.isin(
        columns["traj_uid"].astype(str), columns["traj_uid"][graded_rows].astype(str)
    )
    graded_turns = [
        row if is_row_graded else []
        for row, is_row_graded in zip(columns["steps"], is_graded, strict=True)
    ]
    num_turn_tokens = [sum(turn.span[1] - turn.span[0] for turn in row) for row in graded_turns]
    summaries = columns.get(SUMMARY, [None] * len(batch))
    num_sampled_tokens = [
        sum(turn.num_tokens for turn in row)
        + (summary.num_tokens if summary is not None and is_row_graded else 0)
        for row, summary, is_row_graded in zip(graded_turns, summaries, is_graded, strict=True)
    ]
    num_graded = np.bincount(task_indices[graded_rows], minlength=len(tasks))
    success_counts = np.bincount(
        task_indices[graded_rows], columns["won"][graded_rows].astype(float), minlength=len(tasks)
    )
    return ValidationOutcome(
        tasks=tuple(tasks.tolist()),
        success_rates=_divide_or_nan(success_counts, num_graded),
        num_graded=len(graded_rows),
        turns=np.bincount(task_indices, weights=[len(row) for row in graded_turns]),
        turn_tokens=np.bincount(task_indices, weights=num_turn_tokens),
        sampled_tokens=np.bincount(task_indices, weights=num_sampled_tokens),
        num_failed=len(list_trajectory_first_rows(batch)) - len(graded_rows),
    )


def compute_outcome_metrics(outcome: ValidationOutcome, prefix: str) -> dict[str, float]:
    """Return the metrics ``<prefix>/...`` of the outcome of one run over the validation set.

    ``success_rate`` and ``tokens_per_step`` have 95% intervals over tasks. ``tokens_per_step``
    counts all tokens of a turn, forced or sampled, so that it is comparable between outcomes. The
    other token metrics count only sampled tokens. If all trajectories failed, only ``graded`` and
    ``failed`` are returned.
    """
    num_turns = float(outcome.turns.sum())
    num_sampled_tokens = float(outcome.sampled_tokens.sum())
    trajectory_counts = {"graded": float(outcome.num_graded), "failed": float(outcome.num_failed)}
    if not outcome.num_graded:
        return {f"{prefix}/{name}": value for name, value in trajectory_counts.items()}
    success_rates = outcome.success_rates[outcome.is_graded]
    metrics = {
        **trajectory_counts,
        **make_interval_metrics(
            "success_rate", success_rates.mean(), *rate_interval(success_rates)
        ),
        "episode_length": num_turns / outcome.num_graded,
        "tokens_per_step": float(outcome.turn_tokens.sum()) / max(num_turns, 1.0),
        "sampled_tokens_per_step": num_sampled_tokens / max(num_turns, 1.0),
        "sampled_tokens_per_episode": num_sampled_tokens / outcome.num_graded,
    }
    if num_turns:
        resampled_tokens, resampled_turns = compute_resampled_means(
            [outcome.turn_tokens[outcome.is_graded], outcome.turns[outcome.is_graded]]
        )
        interval_bounds = _compute_interval(_divide_or_nan(resampled_tokens, resampled_turns))
        metrics |= make_interval_metrics(
            "tokens_per_step", metrics["tokens_per_step"], *interval_bounds
        )
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def compute_paired_difference(
    outcome: ValidationOutcome, other_outcome: ValidationOutcome, prefix: str
) -> dict[str, float]:
    """Return the metrics ``<prefix>/...`` of ``outcome`` minus those of ``other_outcome``.

    ``tokens_per_step_change`` is the relative difference (-0.1 is 10% less than ``other_outcome``).
    All have 95% intervals over resampled tasks. Both outcomes use the same resampled tasks, so task
    difficulty that they share does not widen the intervals.

    A task is excluded if all of its trajectories failed in one of the outcomes. Then the metric
    ``tasks`` is the number of compared tasks. Token metrics are omitted if one outcome has no
    tokens. Raises ``ValueError`` if the outcomes have different tasks.
    """
    if outcome.tasks != other_outcome.tasks:
        raise ValueError(
            f"a difference per task needs the same tasks in both runs; the runs have "
            f"{len(outcome.tasks)} and {len(other_outcome.tasks)} tasks, of which "
            f"{len({*outcome.tasks} & {*other_outcome.tasks})} are common"
        )
    graded_in_both = outcome.is_graded & other_outcome.is_graded
    metrics: dict[str, float] = (
        {} if graded_in_both.all() else {"tasks": float(graded_in_both.sum())}
    )
    if graded_in_both.any():
        success_differences = (outcome.success_rates - other_outcome.success_rates)[graded_in_both]
        interval_bounds = bootstrap_interval(success_differences)
        metrics |= make_interval_metrics(
            "success_difference", success_differences.mean(), *interval_bounds
        )
    if (
        outcome.turn_tokens[graded_in_both].sum()
        and other_outcome.turn_tokens[graded_in_both].sum()
    ):
        metrics |= _compute_token_differences(outcome, other_outcome, graded_in_both)
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def compare_outcomes(
    outcomes: Mapping[str, ValidationOutcome], baseline: str, prefix: str
) -> dict[str, float]:
    """Return ``<prefix>/<name>/...``: metrics of each run, and differences from ``baseline``."""
    metrics: dict[str, float] = {}
    for name, outcome in outcomes.items():
        metrics |= compute_outcome_metrics(outcome, f"{prefix}/{name}")
    return metrics | compute_differences(outcomes, baseline, prefix)


def compute_differences(
    outcomes: Mapping[str, ValidationOutcome], baseline: str, prefix: str
) -> dict[str, float]:
    """Return the metrics ``<prefix>/<name>/...``: differences of each run from ``baseline``."""
    metrics: dict[str, float] = {}
    for name, outcome in outcomes.items():
        if name != baseline:
            metrics |= compute_paired_difference(outcome, outcomes[baseline], f"{prefix}/{name}")
    return metrics


def _compute_token_differences(
    outcome: ValidationOutcome, other_outcome: ValidationOutcome, task_mask: np.ndarray
) -> dict[str, float]:
    task_columns = [
        column[task_mask]
        for column in (
            outcome.turn_tokens,
            outcome.turns,
            other_outcome.turn_tokens,
            other_outcome.turns,
        )
    ]
    resampled_tokens, resampled_turns, other_resampled_tokens, other_resampled_turns = (
        compute_resampled_means(task_columns)
    )
    tokens_per_turn = _divide_or_nan(resampled_tokens, resampled_turns)
    other_tokens_per_turn = _divide_or_nan(other_resampled_tokens, other_resampled_turns)
    column_sums = [column.sum() for column in task_columns]
    mean_tokens_per_turn = column_sums[0] / column_sums[1]
    other_mean_tokens_per_turn = column_sums[2] / column_sums[3]
    difference_bounds = _compute_interval(tokens_per_turn - other_tokens_per_turn)
    change_bounds = _compute_interval(_divide_or_nan(tokens_per_turn, other_tokens_per_turn) - 1)
    return {
        **make_interval_metrics(
            "tokens_per_step_difference",
            mean_tokens_per_turn - other_mean_tokens_per_turn,
            *difference_bounds,
        ),
        **make_interval_metrics(
            "tokens_per_step_change",
            mean_tokens_per_turn / other_mean_tokens_per_turn - 1,
            *change_bounds,
        ),
    }


def _divide_or_nan(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Return ``numerators / denominators``; NaN where ``denominators`` is 0."""
    return np.divide(
        numerators, denominators, out=np.full(numerators.shape, np.nan), where=denominators > 0
    )


def _compute_interval(values: np.ndarray) -> tuple[float, float]:
    # A resample in which no trajectory has a turn has no tokens per turn (NaN).
    return percentile_interval(values[~np.isnan(values)])
