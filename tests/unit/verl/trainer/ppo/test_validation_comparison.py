"""What ways of playing a panel are compared by, against numbers worked out by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.refusals import mentions
from verl.protocol import DataProto
from verl.trainer.ppo.validation_comparison import (
    ValidationOutcome,
    compare_outcomes,
    compute_differences,
    compute_outcome_metrics,
    compute_paired_difference,
    summarize_validation,
)


def step(start: int, end: int, sampled: int):
    """A step of ``end - start`` tokens, of which so many were sampled."""
    return SimpleNamespace(span=(start, end), num_tokens=sampled)


def play(success: list[float]) -> ValidationOutcome:
    """A play of tasks of which only the success counts."""
    return spent([10.0] * len(success), [1.0] * len(success), success)


def spent(
    tokens: list[float], steps: list[float], success: list[float] | None = None
) -> ValidationOutcome:
    """A play with tokens and steps of each task."""
    tasks = tuple(f"task {number:02}" for number in range(len(tokens)))
    won = np.zeros(len(tokens)) if success is None else np.array(success)
    return ValidationOutcome(
        tasks, won, len(tasks), np.array(steps), np.array(tokens), np.array(tokens)
    )


def interval(metrics: dict[str, float], name: str) -> tuple[float, float]:
    """The bounds that ``metrics`` hold of ``name``."""
    return metrics[f"{name}_low"], metrics[f"{name}_high"]


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
    found = summarize_validation(batch)
    assert found.tasks == ("a", "b") and found.success.tolist() == [1.0, 0.5]
    assert found.episodes == 3 and found.turns.tolist() == [0, 4]
    assert found.turn_tokens.tolist() == [0, 10 + 6 + 4 + 4]
    assert found.sampled_tokens.tolist() == [0, 10 + 2 + 4]
    metrics = compute_outcome_metrics(found, "val/x")
    assert metrics["val/x/success_rate"] == 0.75
    assert metrics["val/x/tokens_per_step"] == 6.0
    # A resample of a alone has no step, and so no tokens per step that would count.
    assert interval(metrics, "val/x/tokens_per_step") == (6.0, 6.0)
    assert metrics["val/x/sampled_tokens_per_step"] == 4.0
    assert metrics["val/x/sampled_tokens_per_episode"] == pytest.approx(16 / 3)
    assert metrics["val/x/episode_length"] == pytest.approx(4 / 3)
    # Two tasks, drawn twice with replacement: means 1/2, 3/4 and 1.
    assert interval(metrics, "val/x/success_rate") == (0.5, 1.0)


def test_the_tasks_of_a_play_stand_in_one_order_whatever_was_played_first():
    def played(*names: str) -> ValidationOutcome:
        # Task b has longer turns, more of them, and is lost.
        steps = {"a": [step(0, 4, 4)], "b": [step(0, 9, 9), step(0, 9, 9)]}
        columns = {
            "uid": list(names),
            "traj_uid": [f"{name}/0" for name in names],
            "won": [name == "a" for name in names],
            "steps": [steps[name] for name in names],
        }
        return summarize_validation(
            DataProto.from_dict({"response_mask": torch.ones(2, 2)}, columns)
        )

    metrics = compute_paired_difference(played("a", "b"), played("b", "a"), "d")
    assert len(metrics) == 9 and set(metrics.values()) == {0.0}


def test_a_play_in_which_nothing_was_sampled_has_no_tokens():
    nothing = spent([0.0], [0.0])
    metrics = compute_outcome_metrics(nothing, "x")
    assert metrics["x/tokens_per_step"] == 0.0 == metrics["x/sampled_tokens_per_episode"]
    assert "x/tokens_per_step_low" not in metrics
    for pair in ((nothing, spent([5.0], [1.0])), (spent([5.0], [1.0]), nothing)):
        assert not [name for name in compute_paired_difference(*pair, "x") if "tokens" in name]


def test_tokens_per_step_are_a_ratio_of_totals():
    # The longer task counts twice: 70 / 3, where the mean of 10 and 30 were 20. Resamples give
    # 10, 70 / 3 and 30.
    metrics = compute_outcome_metrics(spent([10.0, 60.0], [1.0, 2.0]), "x")
    assert metrics["x/tokens_per_step"] == pytest.approx(70 / 3)
    assert interval(metrics, "x/tokens_per_step") == pytest.approx((10.0, 30.0))


def test_differences_are_taken_task_by_task():
    # Means 0.5 and 0.25; by task the differences are 0.25 each: there is nothing to resample.
    found = compute_paired_difference(
        play([0.25, 1.0, 0.25, 0.5]), play([0.0, 0.75, 0.0, 0.25]), "d"
    )
    assert {name: value for name, value in found.items() if "success" in name} == {
        "d/success_difference": 0.25,
        "d/success_difference_low": 0.25,
        "d/success_difference_high": 0.25,
    }


def test_the_interval_of_a_difference_is_that_of_its_mean_over_resampled_tasks():
    # Differences 1 and -1: two draws give -1, 0, 1 with shares 1/4, 1/2, 1/4.
    found = compute_paired_difference(play([1.0, 0.0]), play([0.0, 1.0]), "d")
    assert list(found.values())[:3] == [0.0, -1.0, 1.0]
    # 39 of 40 tasks equal: the chance that a resample holds the other one twice or less is 92%.
    equal = [0.0] * 40
    one = [1.0, *equal[1:]]
    found = compute_paired_difference(play(one), play(equal), "d")
    assert list(found.values())[:3] == [1 / 40, 0.0, 3 / 40]


def test_tokens_of_two_plays_are_compared_in_the_same_resamples():
    # Both drawn once: 70 / 3 less 30 / 3. The first task twice: 10 less 5; the second: 30 less 20.
    found = compute_paired_difference(
        spent([10.0, 60.0], [1.0, 2.0]), spent([10.0, 20.0], [2.0, 1.0]), "d"
    )
    assert found["d/tokens_per_step_difference"] == pytest.approx(40 / 3)
    assert interval(found, "d/tokens_per_step_difference") == pytest.approx((5.0, 40 / 3))
    # As shares of 10, 5 and 20.
    assert found["d/tokens_per_step_change"] == pytest.approx(4 / 3)
    assert interval(found, "d/tokens_per_step_change") == pytest.approx((0.5, 4 / 3))


def test_what_is_long_for_both_widens_no_interval():
    # Tasks of 2 to 41 tokens a step. One play takes a tenth more everywhere, another one token.
    tokens = [2.0 + number for number in range(40)]
    own = spent(tokens, [1.0] * 40)
    tenth = compute_paired_difference(
        spent([1.1 * count for count in tokens], [1.0] * 40), own, "d"
    )
    token = compute_paired_difference(
        spent([1.0 + count for count in tokens], [1.0] * 40), own, "d"
    )
    low, high = interval(compute_outcome_metrics(own, "x"), "x/tokens_per_step")
    assert high - low > 6
    assert interval(tenth, "d/tokens_per_step_change") == pytest.approx((0.1, 0.1))
    assert interval(token, "d/tokens_per_step_difference") == pytest.approx((1.0, 1.0))
    # The same tokens the other way round belong to other tasks.
    turned = compute_paired_difference(spent(tokens[::-1], [1.0] * 40), own, "d")
    low, high = interval(turned, "d/tokens_per_step_difference")
    assert low < -6 and high > 6


def test_plays_of_other_tasks_are_refused():
    with pytest.raises(ValueError, check=mentions(2, 3, 2)):
        compute_paired_difference(play([1.0, 0.0]), play([0.0, 1.0, 1.0]), "d")


def test_every_play_is_compared_with_the_baseline_but_itself():
    plays = {"own": play([0.5, 0.5]), "other": play([1.0, 0.5])}
    found = compare_outcomes(plays, "own", "val/ways")
    assert found["val/ways/own/success_rate"] == 0.5
    assert found["val/ways/other/success_difference"] == 0.25
    assert "val/ways/own/success_difference" not in found
    # Of any other one it is the same function.
    less_other = compute_differences(plays, "other", "val/ways_less_other")
    assert {name.rpartition("/")[0] for name in less_other} == {"val/ways_less_other/own"}
    assert less_other["val/ways_less_other/own/success_difference"] == -0.25


def test_failed_plays_are_in_no_comparison():
    def played(*failed: str) -> ValidationOutcome:
        names = ["a", "b", "c"]
        columns = {
            "uid": names,
            "traj_uid": names,
            "won": [True, False, True],
            "aborted": [name in failed for name in names],
            "steps": [[step(0, 4, 4)], [step(0, 9, 9)], [step(0, 2, 2)]],
        }
        return summarize_validation(
            DataProto.from_dict({"response_mask": torch.ones(3, 2)}, columns)
        )

    metrics = compute_outcome_metrics(played("b"), "x")
    assert (metrics["x/success_rate"], metrics["x/graded"], metrics["x/failed"]) == (1.0, 2, 1)
    assert metrics["x/tokens_per_step"] == 3.0 and metrics["x/episode_length"] == 1.0
    found = compute_paired_difference(played("b"), played("c"), "d")
    assert found["d/tasks"] == 1.0 and found["d/success_difference"] == 0.0
    assert "d/tasks" not in compute_paired_difference(played(), played(), "d")
    nothing = played("a", "b", "c")
    assert compute_outcome_metrics(nothing, "x") == {"x/graded": 0.0, "x/failed": 3.0}
    assert compute_paired_difference(nothing, played(), "d") == {"d/tasks": 0.0}
