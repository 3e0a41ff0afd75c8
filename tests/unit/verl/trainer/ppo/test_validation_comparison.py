"""Metrics that compare validation outcomes, against numbers computed by hand."""

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


def turn(start: int, end: int, sampled: int):
    """Return a turn of ``end - start`` tokens, of which ``sampled`` were sampled."""
    return SimpleNamespace(span=(start, end), num_tokens=sampled)


def outcome_of_success(success: list[float]) -> ValidationOutcome:
    """Return the outcome of tasks with the given success and equal token counts."""
    return outcome_of_tokens([10.0] * len(success), [1.0] * len(success), success)


def outcome_of_tokens(
    tokens: list[float], turns: list[float], success: list[float] | None = None
) -> ValidationOutcome:
    """Return an outcome with the tokens and turns of each task."""
    tasks = tuple(f"task {number:02}" for number in range(len(tokens)))
    won = np.zeros(len(tokens)) if success is None else np.array(success)
    return ValidationOutcome(
        tasks, won, len(tasks), np.array(turns), np.array(tokens), np.array(tokens)
    )


def interval(metrics: dict[str, float], name: str) -> tuple[float, float]:
    """Return the bounds of ``name`` in ``metrics``."""
    return metrics[f"{name}_low"], metrics[f"{name}_high"]


def test_summary_counts_tasks_turns_and_tokens():
    batch = DataProto.from_dict(
        {"response_mask": torch.ones(4, 2)},
        {
            # Task b comes first and has two trajectories; the second has two rows.
            "uid": ["b", "b", "b", "a"],
            "traj_uid": ["b/0", "b/1", "b/1", "a/0"],
            "won": [True, False, False, True],
            "steps": [[turn(5, 15, 10), turn(20, 26, 2)], [turn(5, 9, 4)], [turn(5, 9, 0)], []],
        },
    )
    outcome = summarize_validation(batch)
    assert outcome.tasks == ("a", "b") and outcome.success_rates.tolist() == [1.0, 0.5]
    assert outcome.num_graded == 3 and outcome.turns.tolist() == [0, 4]
    assert outcome.turn_tokens.tolist() == [0, 10 + 6 + 4 + 4]
    assert outcome.sampled_tokens.tolist() == [0, 10 + 2 + 4]
    metrics = compute_outcome_metrics(outcome, "val/x")
    assert metrics["val/x/success_rate"] == 0.75
    assert metrics["val/x/tokens_per_step"] == 6.0
    # A resample of task a alone has no turn, so it has no tokens per turn and is not counted.
    assert interval(metrics, "val/x/tokens_per_step") == (6.0, 6.0)
    assert metrics["val/x/sampled_tokens_per_step"] == 4.0
    assert metrics["val/x/sampled_tokens_per_episode"] == pytest.approx(16 / 3)
    assert metrics["val/x/episode_length"] == pytest.approx(4 / 3)
    # Two tasks, drawn twice with replacement: means 1/2, 3/4 and 1.
    assert interval(metrics, "val/x/success_rate") == (0.5, 1.0)


def test_tasks_are_sorted_for_any_order_of_trajectories():
    def outcome_of_tasks(*names: str) -> ValidationOutcome:
        # Task b has longer turns, more of them, and no success.
        steps = {"a": [turn(0, 4, 4)], "b": [turn(0, 9, 9), turn(0, 9, 9)]}
        columns = {
            "uid": list(names),
            "traj_uid": [f"{name}/0" for name in names],
            "won": [name == "a" for name in names],
            "steps": [steps[name] for name in names],
        }
        return summarize_validation(
            DataProto.from_dict({"response_mask": torch.ones(2, 2)}, columns)
        )

    metrics = compute_paired_difference(outcome_of_tasks("a", "b"), outcome_of_tasks("b", "a"), "d")
    assert len(metrics) == 9 and set(metrics.values()) == {0.0}


def test_outcome_without_sampled_tokens_has_no_token_metrics():
    without_tokens = outcome_of_tokens([0.0], [0.0])
    metrics = compute_outcome_metrics(without_tokens, "x")
    assert metrics["x/tokens_per_step"] == 0.0 == metrics["x/sampled_tokens_per_episode"]
    assert "x/tokens_per_step_low" not in metrics
    for pair in (
        (without_tokens, outcome_of_tokens([5.0], [1.0])),
        (outcome_of_tokens([5.0], [1.0]), without_tokens),
    ):
        assert not [name for name in compute_paired_difference(*pair, "x") if "tokens" in name]


def test_tokens_per_step_is_a_ratio_of_totals():
    # The longer task counts twice: 70 / 3, while the mean of 10 and 30 is 20. Resamples give 10, 70
    # / 3 and 30.
    metrics = compute_outcome_metrics(outcome_of_tokens([10.0, 60.0], [1.0, 2.0]), "x")
    assert metrics["x/tokens_per_step"] == pytest.approx(70 / 3)
    assert interval(metrics, "x/tokens_per_step") == pytest.approx((10.0, 30.0))


def test_differences_are_taken_task_by_task():
    # Means 0.5 and 0.25. The difference of every task is 0.25, so resampling does not change it.
    metrics = compute_paired_difference(
        outcome_of_success([0.25, 1.0, 0.25, 0.5]), outcome_of_success([0.0, 0.75, 0.0, 0.25]), "d"
    )
    assert {name: value for name, value in metrics.items() if "success" in name} == {
        "d/success_difference": 0.25,
        "d/success_difference_low": 0.25,
        "d/success_difference_high": 0.25,
    }


def test_interval_of_a_difference_resamples_tasks():
    # Differences 1 and -1: two draws give -1, 0, 1 with shares 1/4, 1/2, 1/4.
    metrics = compute_paired_difference(
        outcome_of_success([1.0, 0.0]), outcome_of_success([0.0, 1.0]), "d"
    )
    assert list(metrics.values())[:3] == [0.0, -1.0, 1.0]
    # 39 of 40 tasks are equal. A resample contains the other one at most twice with probability
    # 92%.
    equal = [0.0] * 40
    one = [1.0, *equal[1:]]
    metrics = compute_paired_difference(outcome_of_success(one), outcome_of_success(equal), "d")
    assert list(metrics.values())[:3] == [1 / 40, 0.0, 3 / 40]


def test_tokens_are_compared_in_the_same_resamples():
    # Each task once: 70 / 3 minus 30 / 3. The first task twice: 10 minus 5; the second: 30 minus
    # 20.
    metrics = compute_paired_difference(
        outcome_of_tokens([10.0, 60.0], [1.0, 2.0]),
        outcome_of_tokens([10.0, 20.0], [2.0, 1.0]),
        "d",
    )
    assert metrics["d/tokens_per_step_difference"] == pytest.approx(40 / 3)
    assert interval(metrics, "d/tokens_per_step_difference") == pytest.approx((5.0, 40 / 3))
    # Relative to 10, 5 and 20.
    assert metrics["d/tokens_per_step_change"] == pytest.approx(4 / 3)
    assert interval(metrics, "d/tokens_per_step_change") == pytest.approx((0.5, 4 / 3))


def test_variation_between_tasks_does_not_widen_paired_intervals():
    # Tasks of 2 to 41 tokens per turn. One outcome has 10% more everywhere, another one token more.
    tokens = [2.0 + number for number in range(40)]
    base = outcome_of_tokens(tokens, [1.0] * 40)
    tenth = compute_paired_difference(
        outcome_of_tokens([1.1 * count for count in tokens], [1.0] * 40), base, "d"
    )
    token = compute_paired_difference(
        outcome_of_tokens([1.0 + count for count in tokens], [1.0] * 40), base, "d"
    )
    low, high = interval(compute_outcome_metrics(base, "x"), "x/tokens_per_step")
    assert high - low > 6
    assert interval(tenth, "d/tokens_per_step_change") == pytest.approx((0.1, 0.1))
    assert interval(token, "d/tokens_per_step_difference") == pytest.approx((1.0, 1.0))
    # The same token counts in reverse order belong to other tasks.
    reversed_order = compute_paired_difference(
        outcome_of_tokens(tokens[::-1], [1.0] * 40), base, "d"
    )
    low, high = interval(reversed_order, "d/tokens_per_step_difference")
    assert low < -6 and high > 6


def test_outcomes_of_other_tasks_are_refused():
    with pytest.raises(ValueError, check=mentions(2, 3, 2)):
        compute_paired_difference(
            outcome_of_success([1.0, 0.0]), outcome_of_success([0.0, 1.0, 1.0]), "d"
        )


def test_every_outcome_is_compared_with_the_baseline():
    outcomes = {"base": outcome_of_success([0.5, 0.5]), "other": outcome_of_success([1.0, 0.5])}
    metrics = compare_outcomes(outcomes, "base", "val/rules")
    assert metrics["val/rules/base/success_rate"] == 0.5
    assert metrics["val/rules/other/success_difference"] == 0.25
    assert "val/rules/base/success_difference" not in metrics
    # Comparison with another baseline uses the same function.
    less_other = compute_differences(outcomes, "other", "val/rules_less_other")
    assert {name.rpartition("/")[0] for name in less_other} == {"val/rules_less_other/base"}
    assert less_other["val/rules_less_other/base/success_difference"] == -0.25


def test_failed_trajectories_are_in_no_comparison():
    def outcome_of_tasks(*failed: str) -> ValidationOutcome:
        names = ["a", "b", "c"]
        columns = {
            "uid": names,
            "traj_uid": names,
            "won": [True, False, True],
            "aborted": [name in failed for name in names],
            "steps": [[turn(0, 4, 4)], [turn(0, 9, 9)], [turn(0, 2, 2)]],
        }
        return summarize_validation(
            DataProto.from_dict({"response_mask": torch.ones(3, 2)}, columns)
        )

    metrics = compute_outcome_metrics(outcome_of_tasks("b"), "x")
    assert (metrics["x/success_rate"], metrics["x/graded"], metrics["x/failed"]) == (1.0, 2, 1)
    assert metrics["x/tokens_per_step"] == 3.0 and metrics["x/episode_length"] == 1.0
    metrics = compute_paired_difference(outcome_of_tasks("b"), outcome_of_tasks("c"), "d")
    assert metrics["d/tasks"] == 1.0 and metrics["d/success_difference"] == 0.0
    assert "d/tasks" not in compute_paired_difference(outcome_of_tasks(), outcome_of_tasks(), "d")
    without_tokens = outcome_of_tasks("a", "b", "c")
    assert compute_outcome_metrics(without_tokens, "x") == {"x/graded": 0.0, "x/failed": 3.0}
    assert compute_paired_difference(without_tokens, outcome_of_tasks(), "d") == {"d/tasks": 0.0}
