"""The same panel played in several ways: what each came to, and how it differs from one of them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl.protocol import DataProto
from verl.trainer.ppo.metrics import first_rows, mean_per_task
from verl.utils.statistics import bootstrap_interval


@dataclass(frozen=True, slots=True)
class PanelPlay:
    """One way of playing the panel: its tasks in order of name, the share of each one's plays that
    was won [T], and sums over all plays.

    ``turn_tokens`` are the tokens of all turns, ``sampled_tokens`` those of them that the policy
    sampled. The two differ where turns were made to begin with tokens.
    """

    tasks: tuple[str, ...]
    success: np.ndarray
    episodes: int
    steps: int
    turn_tokens: int
    sampled_tokens: int


def panel_play(batch: DataProto) -> PanelPlay:
    """What the rows of a validation came to."""
    rows = first_rows(batch)
    columns = batch.non_tensor_batch
    uids = columns["uid"][rows].astype(str)
    steps = [step for row in columns["steps"] for step in row]
    return PanelPlay(
        tasks=tuple(np.unique(uids).tolist()),
        success=mean_per_task(columns["won"][rows].astype(float), uids),
        episodes=len(rows),
        steps=len(steps),
        turn_tokens=sum(step.span[1] - step.span[0] for step in steps),
        sampled_tokens=sum(step.num_tokens for step in steps),
    )


def play_metrics(play: PanelPlay, prefix: str) -> dict[str, float]:
    """``<prefix>/success_rate`` with its interval over tasks, ``episode_length`` and tokens.

    Ways of playing are compared by ``tokens_per_step``, which counts whole turns: what one way
    makes a turn begin with, another one has the policy sample. ``sampled_tokens_per_step`` and
    ``sampled_tokens_per_episode`` are what the policy itself wrote; per episode, a way that loses
    early looks cheap.
    """
    low, high = bootstrap_interval(play.success)
    steps = max(play.steps, 1)
    found = {
        "success_rate": float(play.success.mean()),
        "success_rate_low": low,
        "success_rate_high": high,
        "episode_length": play.steps / play.episodes,
        "tokens_per_step": play.turn_tokens / steps,
        "sampled_tokens_per_step": play.sampled_tokens / steps,
        "sampled_tokens_per_episode": play.sampled_tokens / play.episodes,
    }
    return {f"{prefix}/{name}": value for name, value in found.items()}


def paired_difference(play: PanelPlay, other: PanelPlay, prefix: str) -> dict[str, float]:
    """``<prefix>/success_difference``: success of ``play`` less that of ``other``, task by task,
    with a 95% interval of its mean over resampled tasks.

    Tasks that are hard for both widen no interval. Raises ``ValueError`` where the two did not
    play the same tasks.
    """
    if play.tasks != other.tasks:
        raise ValueError(
            f"a difference per task needs the same tasks; {len(play.tasks)} and "
            f"{len(other.tasks)} were played, and {len({*play.tasks} & {*other.tasks})} are common"
        )
    differences = play.success - other.success
    low, high = bootstrap_interval(differences)
    return {
        f"{prefix}/success_difference": float(differences.mean()),
        f"{prefix}/success_difference_low": low,
        f"{prefix}/success_difference_high": high,
    }


def comparison(plays: Mapping[str, PanelPlay], baseline: str, prefix: str) -> dict[str, float]:
    """Metrics of every play under ``<prefix>/<name>``, and the others' differences to
    ``baseline``.
    """
    metrics: dict[str, float] = {}
    for name, play in plays.items():
        metrics |= play_metrics(play, f"{prefix}/{name}")
        if name != baseline:
            metrics |= paired_difference(play, plays[baseline], f"{prefix}/{name}")
    return metrics
