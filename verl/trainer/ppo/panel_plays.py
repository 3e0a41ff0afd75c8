"""The same panel played in several ways: what each came to, and how any two of them differ."""

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
    """One way of playing the panel: its tasks in order of name, of each one the share of its plays
    that was won [T] and sums over its plays [T], and how many plays there were of all tasks.

    Plays that failed have no grade and count nowhere but in ``failed``: the success of a task is
    NaN where all of its plays failed.

    ``turn_tokens`` are the tokens of all turns, ``sampled_tokens`` those of them that the policy
    sampled. The two differ where turns were made to begin with tokens.
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
        """Tasks [T] of which a play has a grade."""
        return ~np.isnan(self.success)


def panel_play(batch: DataProto) -> PanelPlay:
    """What the rows of a validation came to."""
    columns = batch.non_tensor_batch
    uids = columns["uid"].astype(str)
    # Of all rows: the steps of a play may lie in several.
    tasks, task = np.unique(uids, return_inverse=True)
    graded = graded_rows(batch)
    kept = np.isin(columns["traj_uid"].astype(str), columns["traj_uid"][graded].astype(str))
    steps = [row if keep else [] for row, keep in zip(columns["steps"], kept, strict=True)]
    turns = [sum(step.span[1] - step.span[0] for step in row) for row in steps]
    sampled = [sum(step.num_tokens for step in row) for row in steps]
    plays = np.bincount(task[graded], minlength=len(tasks))
    won = np.bincount(task[graded], columns["won"][graded].astype(float), minlength=len(tasks))
    return PanelPlay(
        tasks=tuple(tasks.tolist()),
        success=_quotient(won, plays),
        episodes=len(graded),
        steps=np.bincount(task, weights=[len(row) for row in steps]),
        turn_tokens=np.bincount(task, weights=turns),
        sampled_tokens=np.bincount(task, weights=sampled),
        failed=len(first_rows(batch)) - len(graded),
    )


def play_metrics(play: PanelPlay, prefix: str) -> dict[str, float]:
    """``<prefix>/success_rate`` and ``tokens_per_step`` with their intervals over tasks,
    ``episode_length`` and what was sampled, over ``graded`` plays; ``failed`` more have no grade.

    Ways of playing are compared by ``tokens_per_step``, which counts whole turns: what one way
    makes a turn begin with, another one has the policy sample. ``sampled_tokens_per_step`` and
    ``sampled_tokens_per_episode`` are what the policy itself wrote; per episode, a way that loses
    early looks cheap.
    """
    all_steps = float(play.steps.sum())
    sampled = float(play.sampled_tokens.sum())
    counts = {"graded": float(play.episodes), "failed": float(play.failed)}
    if not play.episodes:
        return {f"{prefix}/{name}": value for name, value in counts.items()}
    success = play.success[play.is_graded]
    found = {
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
        found |= _with_bounds("tokens_per_step", found["tokens_per_step"], bounds)
    return {f"{prefix}/{name}": value for name, value in found.items()}


def paired_difference(play: PanelPlay, other: PanelPlay, prefix: str) -> dict[str, float]:
    """``<prefix>/success_difference``: success of ``play`` less that of ``other``;
    ``tokens_per_step_difference``: the same of tokens per step; ``tokens_per_step_change``: that as
    a share of the tokens per step of ``other``. All with 95% intervals over resampled tasks.

    A resample has the same tasks for both, so what is hard or long for both widens no interval.
    Tasks without a grade on one side are left out of both; ``tasks`` is the number of the others,
    where some are. Tokens are left out where one of the two has none. Raises ``ValueError`` where
    the two did not play the same tasks.
    """
    if play.tasks != other.tasks:
        raise ValueError(
            f"a difference per task needs the same tasks; {len(play.tasks)} and "
            f"{len(other.tasks)} were played, and {len({*play.tasks} & {*other.tasks})} are common"
        )
    both = play.is_graded & other.is_graded
    found: dict[str, float] = {} if both.all() else {"tasks": float(both.sum())}
    if both.any():
        success = (play.success - other.success)[both]
        found |= _with_bounds("success_difference", success.mean(), bootstrap_interval(success))
    if play.turn_tokens[both].sum() and other.turn_tokens[both].sum():
        found |= _token_differences(play, other, both)
    return {f"{prefix}/{name}": value for name, value in found.items()}


def comparison(plays: Mapping[str, PanelPlay], baseline: str, prefix: str) -> dict[str, float]:
    """Metrics of every play under ``<prefix>/<name>``, and the others' differences to
    ``baseline``.
    """
    metrics: dict[str, float] = {}
    for name, play in plays.items():
        metrics |= play_metrics(play, f"{prefix}/{name}")
    return metrics | differences(plays, baseline, prefix)


def differences(plays: Mapping[str, PanelPlay], baseline: str, prefix: str) -> dict[str, float]:
    """What every other play differs by from ``baseline``, under ``<prefix>/<name>``."""
    metrics: dict[str, float] = {}
    for name, play in plays.items():
        if name != baseline:
            metrics |= paired_difference(play, plays[baseline], f"{prefix}/{name}")
    return metrics


def _token_differences(play: PanelPlay, other: PanelPlay, tasks: np.ndarray) -> dict[str, float]:
    columns = [
        column[tasks] for column in (play.turn_tokens, play.steps, other.turn_tokens, other.steps)
    ]
    own_tokens, own_steps, other_tokens, other_steps = resampled_means(columns)
    own = _quotient(own_tokens, own_steps)
    others = _quotient(other_tokens, other_steps)
    totals = [column.sum() for column in columns]
    own_value = totals[0] / totals[1]
    other_value = totals[2] / totals[3]
    difference = own_value - other_value
    change = own_value / other_value - 1
    return {
        **_with_bounds("tokens_per_step_difference", difference, _interval(own - others)),
        **_with_bounds("tokens_per_step_change", change, _interval(_quotient(own, others) - 1)),
    }


def _quotient(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """``above / below``, NaN where nothing is below."""
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)


def _interval(values: np.ndarray) -> tuple[float, float]:
    # A resample of nothing but plays that broke before their first step has no tokens per step.
    return percentile_interval(values[~np.isnan(values)])


def _with_bounds(name: str, value: float, bounds: tuple[float, float]) -> dict[str, float]:
    low, high = bounds
    return {name: float(value), f"{name}_low": low, f"{name}_high": high}
