"""What ways of playing a panel are compared by, against numbers worked out by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.panel_plays import (
    PanelPlay,
    comparison,
    paired_difference,
    panel_play,
    play_metrics,
)


def step(start: int, end: int, sampled: int):
    """A step of ``end - start`` tokens, of which so many were sampled."""
    return SimpleNamespace(span=(start, end), num_tokens=sampled)


def play(success: list[float], tasks: str = "abcd") -> PanelPlay:
    """A play of tasks of which only the success counts."""
    return PanelPlay(tuple(tasks[: len(success)]), np.array(success), 4, 8, 80, 40)


def test_a_play_counts_tasks_steps_and_tokens():
    batch = DataProto.from_dict(
        {"response_mask": torch.ones(4, 2)},
        {
            # Task b comes first and is played twice; its second play has two rows.
            "uid": ["b", "b", "b", "a"],
            "traj_uid": ["b/0", "b/1", "b/1", "a/0"],
            "won": [True, False, False, True],
            "steps": [[step(5, 15, 10), step(20, 26, 2)], [step(5, 9, 4)], [step(5, 9, 0)], []],
        },
    )
    found = panel_play(batch)
    assert found.tasks == ("a", "b") and found.success.tolist() == [1.0, 0.5]
    assert (found.episodes, found.steps) == (3, 4)
    assert (found.turn_tokens, found.sampled_tokens) == (10 + 6 + 4 + 4, 10 + 2 + 4)
    metrics = play_metrics(found, "val/x")
    assert metrics["val/x/success_rate"] == 0.75
    assert metrics["val/x/tokens_per_step"] == 6.0
    assert metrics["val/x/sampled_tokens_per_step"] == 4.0
    assert metrics["val/x/sampled_tokens_per_episode"] == pytest.approx(16 / 3)
    assert metrics["val/x/episode_length"] == pytest.approx(4 / 3)
    # Two tasks, drawn twice with replacement: means 1/2, 3/4 and 1.
    assert (metrics["val/x/success_rate_low"], metrics["val/x/success_rate_high"]) == (0.5, 1.0)


def test_a_play_in_which_nothing_was_sampled_has_no_tokens():
    metrics = play_metrics(PanelPlay(("a",), np.array([0.0]), 1, 0, 0, 0), "x")
    assert metrics["x/tokens_per_step"] == 0.0 == metrics["x/sampled_tokens_per_episode"]


def test_differences_are_taken_task_by_task():
    # Means 0.5 and 0.25; by task the differences are 0.25 each: there is nothing to resample.
    found = paired_difference(play([0.25, 1.0, 0.25, 0.5]), play([0.0, 0.75, 0.0, 0.25]), "d")
    assert found == {
        "d/success_difference": 0.25,
        "d/success_difference_low": 0.25,
        "d/success_difference_high": 0.25,
    }


def test_the_interval_of_a_difference_is_that_of_its_mean_over_resampled_tasks():
    # Differences 1 and -1: two draws give -1, 0, 1 with shares 1/4, 1/2, 1/4.
    found = paired_difference(play([1.0, 0.0]), play([0.0, 1.0]), "d")
    assert list(found.values()) == [0.0, -1.0, 1.0]
    # 39 of 40 tasks are equal; a resample holds the other one not at all with a chance of 36%, at
    # most twice with 92% and at most three times with 98%.
    equal = [0.0] * 40
    one = [1.0, *equal[1:]]
    tasks = tuple(map(str, range(40)))
    plays = [PanelPlay(tasks, np.array(won), 40, 40, 40, 40) for won in (one, equal)]
    found = paired_difference(plays[0], plays[1], "d")
    assert list(found.values()) == [1 / 40, 0.0, 3 / 40]


def test_plays_of_other_tasks_are_refused():
    with pytest.raises(ValueError, match="2 and 3 were played, and 2 are common"):
        paired_difference(play([1.0, 0.0]), play([0.0, 1.0, 1.0]), "d")


def test_every_play_is_compared_with_the_baseline_but_itself():
    plays = {"own": play([0.5, 0.5]), "other": play([1.0, 0.5])}
    found = comparison(plays, "own", "val/ways")
    assert found["val/ways/own/success_rate"] == 0.5
    assert found["val/ways/other/success_difference"] == 0.25
    assert "val/ways/own/success_difference" not in found
