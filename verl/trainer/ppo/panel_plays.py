"""Outcomes of several runs over the same validation set, and paired differences between them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.metrics import first_rows, graded_rows
from verl.utils.statistics import (
    bootstrap_interval,
    percentile_interval,
    rate_interval,
    resampled_means,
)


@dataclass(frozen=True, slots=True)
class PanelPlay:
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
    steps: np.ndarray
    turn_tokens: np.ndarray
    sampled_tokens: np.ndarray
    failed: int = 0

    @property
    def is_graded(self) -> np.ndarray:
        """Mask [T] of the tasks with at least one graded trajectory."""
        return ~np.isnan(self.success)


def panel_play(batch: DataProto) -> PanelPlay:
    """Return the outcome of the rows of a validation."""
    columns = batch.non_tensor_batch
    uids = columns["uid"].astype(str)
    # Use all rows: the turns of a trajectory may be in several rows.
    tasks, task = np.unique(uids, return_inverse=True)
    graded = graded_rows(batch)
    kept = np.isin(columns["traj_uid"].astype(str), columns["traj_uid"][graded].astype(str))
    steps = [row if keep else [] for row, keep in zip(columns["steps"], kept, strict=True)]
    turns = [sum(step.span[1] - step.span[0] for step in row) for row in steps]
    sampled = [sum(step.num_tokens for step in row) for row in steps]
    episodes = np.bincount(task[graded], minlength=len(tasks))
    successes = np.bincount(
        task[graded], columns["won"][graded].astype(float), minlength=len(tasks)
    )
    return PanelPlay(
        tasks=tuple(tasks.tolist()),
        success=_quotient(successes, episodes),
        episodes=len(graded),
        steps=np.bincount(task, weights=[len(row) for row in steps]),
        turn_tokens=np.bincount(task, weights=turns),
        sampled_tokens=np.bincount(task, weights=sampled),
        failed=len(first_rows(batch)) - len(graded),
    )


def play_metrics(play: PanelPlay, prefix: str) -> dict[str, float]:
    """Return the metrics ``<prefix>/...`` of one outcome; only counts if all trajectories failed.

    ``success_rate`` and ``tokens_per_step`` have 95% intervals over tasks. ``tokens_per_step``
    counts all tokens of a turn, forced or sampled, so that it is comparable between outcomes.
    ``sampled_tokens_per_step`` and ``sampled_tokens_per_episode`` count only sampled tokens. The
    number per episode is low if episodes end early without success.
    """
    all_steps = float(play.steps.sum())
    sampled = float(play.sampled_tokens.sum())
    counts = {"graded": float(play.episodes), "failed": float(play.failed)}
    if not play.episodes:
        return {f"{prefix}/{name}": value for name, value in counts.items()}
    success = play.success[play.is_graded]
    metrics = {
        **counts,
        **_with_bounds("success_rate", success.mean(), rate_interval(success)),
        "episode_length": all_steps / play.episodes,
        "tokens_per_step": float(play.turn_tokens.sum()) / max(all_steps, 1.0),
        "sampled_tokens_per_step": sampled / max(all_steps, 1.0),
        "sampled_tokens_per_episode": sampled / play.episodes,
    }
    if all_steps:
        tokens, steps = resampled_means(
            [play.turn_tokens[play.is_graded], play.steps[play.is_graded]]
        )
        bounds = _interval(_quotient(tokens, steps))
        metrics |= _with_bounds("tokens_per_step", metrics["tokens_per_step"], bounds)
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def paired_difference(play: PanelPlay, other: PanelPlay, prefix: str) -> dict[str, float]:
    """Return the metrics ``<prefix>/...`` of ``outcome`` minus those of ``other``.

    ``success_difference`` and ``tokens_per_step_difference`` are differences of means.
    ``tokens_per_step_change`` is the latter divided by the tokens per step of ``other``. All have
    95% intervals over resampled tasks. Both outcomes use the same resampled tasks, so task
    difficulty that they share does not widen the intervals.

    Tasks that lack a graded trajectory in one outcome are excluded from both; ``tasks`` then is the
    number of the remaining ones. Token metrics are omitted if one outcome has no tokens.

    Raises:
        ValueError: the outcomes have different tasks.
    """
    if play.tasks != other.tasks:
        raise ValueError(
            f"a difference per task needs the same tasks in both runs; the runs have "
            f"{len(play.tasks)} and {len(other.tasks)} tasks, of which "
            f"{len({*play.tasks} & {*other.tasks})} are common"
        )
    both = play.is_graded & other.is_graded
    metrics: dict[str, float] = {} if both.all() else {"tasks": float(both.sum())}
    if both.any():
        success = (play.success - other.success)[both]
        metrics |= _with_bounds("success_difference", success.mean(), bootstrap_interval(success))
    if play.turn_tokens[both].sum() and other.turn_tokens[both].sum():
        metrics |= _token_differences(play, other, both)
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def comparison(plays: Mapping[str, PanelPlay], baseline: str, prefix: str) -> dict[str, float]:
    """Return the metrics ``<prefix>/<name>/...`` of every outcome, and those of
    ``compute_differences`` from ``baseline``.
    """
    metrics: dict[str, float] = {}
    for name, play in plays.items():
        metrics |= play_metrics(play, f"{prefix}/{name}")
    return metrics | differences(plays, baseline, prefix)


def differences(plays: Mapping[str, PanelPlay], baseline: str, prefix: str) -> dict[str, float]:
    """Return ``<prefix>/<name>/...``: differences of every other outcome from ``baseline``."""
    metrics: dict[str, float] = {}
    for name, play in plays.items():
        if name != baseline:
            metrics |= paired_difference(play, plays[baseline], f"{prefix}/{name}")
    return metrics


def _token_differences(play: PanelPlay, other: PanelPlay, tasks: np.ndarray) -> dict[str, float]:
    columns = [
        column[tasks] for column in (play.turn_tokens, play.steps, other.turn_tokens, other.steps)
    ]
    tokens, turns, other_tokens, other_turns = resampled_means(columns)
    resampled = _quotient(tokens, turns)
    other_resampled = _quotient(other_tokens, other_turns)
    totals = [column.sum() for column in columns]
    value = totals[0] / totals[1]
    other_value = totals[2] / totals[3]
    differences_bounds = _interval(resampled - other_resampled)
    change_bounds = _interval(_quotient(resampled, other_resampled) - 1)
    return {
        **_with_bounds("tokens_per_step_difference", value - other_value, differences_bounds),
        **_with_bounds("tokens_per_step_change", value / other_value - 1, change_bounds),
    }


def _quotient(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return ``above / below``; NaN where ``below`` is 0."""
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)


def _interval(values: np.ndarray) -> tuple[float, float]:
    # A resample in which no trajectory has a turn has no tokens per turn (NaN).
    return percentile_interval(values[~np.isnan(values)])


def _with_bounds(name: str, value: float, bounds: tuple[float, float]) -> dict[str, float]:
    low, high = bounds
    return {name: float(value), f"{name}_low": low, f"{name}_high": high}
