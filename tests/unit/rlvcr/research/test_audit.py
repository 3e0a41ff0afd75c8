"""Credit audit by hand: effects, correlations with their intervals, and the share of signal."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest

from rlvcr.research.audit import AuditedTurn, compute_reliability, correlate_scores


def planted(count: int, num_episodes: int, noise: float = 0.0, seed: int = 0) -> list[AuditedTurn]:
    """Return points at which one level is best, with a score that shows it up to ``noise``."""
    rng = np.random.default_rng(seed)
    points = []
    for number in range(count):
        chances = rng.permutation([0.1, 0.4, 0.7, 0.95])
        returns = tuple(
            tuple((rng.random(num_episodes) < chance).astype(float).tolist()) for chance in chances
        )
        noisy_scores = chances + noise * rng.normal(size=4)
        level = int(rng.integers(1, 5))
        points.append(
            AuditedTurn(
                f"t{number}",
                number % 5,
                level,
                number % 3 == 0,
                returns,
                {"score": tuple(noisy_scores.tolist()), "flat": (1.0, 1.0, 1.0, 1.0)},
                {"step": float(noisy_scores[level - 1] - noisy_scores.mean())},
            )
        )
    return points


SAMPLES = 60
GOLDEN_ALL = (0.684025, 0.549318, 0.866390)
GOLDEN_CHOSEN = (0.619966, 0.248686, 0.960611)


def find_score(audit, name):
    return next(score for score in audit.scores if score.name == name)


def test_planted_effect_is_detected():
    audit = correlate_scores(planted(60, 64), resamples=SAMPLES)
    for interval in (find_score(audit, "score").all_levels, find_score(audit, "score").chosen):
        assert (
            interval is not None and interval[0] > 0.9 and interval[1] < interval[0] < interval[2]
        )
    step = find_score(audit, "step")
    assert step.all_levels is None and step.chosen is not None
    assert step.chosen[0] > 0.9
    assert (audit.points, audit.rollouts_per_option) == (60, 64)
    assert audit.reliability > 0.95


def test_scores_without_information_correlate_with_nothing():
    points = planted(200, 16)
    strangers = [point.scores for point in points[1:]] + [points[0].scores]
    shuffled = [
        AuditedTurn(p.traj_uid, p.step, p.chosen, p.won, p.returns, scores)
        for p, scores in zip(points, strangers, strict=True)
    ]
    audit = correlate_scores(shuffled, resamples=SAMPLES)
    for name in ("score", "random"):
        interval = find_score(audit, name).all_levels
        assert interval is not None
        value, low, high = interval
        assert abs(value) < 0.12 and low < 0 < high, name


def test_constant_score_has_no_correlation():
    flat = find_score(correlate_scores(planted(20, 4), resamples=SAMPLES), "flat").all_levels
    assert flat is not None and all(math.isnan(value) for value in flat)


def test_success_and_failure_are_correlated_separately():
    """The score is right in successful trajectories and reversed in the others."""
    points = [
        replace(p, scores={"score": tuple(v if p.won else -v for v in p.scores["score"])})
        for p in planted(60, 32)
    ]
    audit = find_score(correlate_scores(points, resamples=SAMPLES), "score")
    assert audit.in_won is not None and audit.in_lost is not None
    assert audit.in_won[0] > 0.9 and audit.in_lost[0] < -0.9
    won = [p for p in points if p.won]
    alone = find_score(correlate_scores(won, resamples=SAMPLES), "score")
    assert alone.all_levels is not None and alone.all_levels[0] == audit.in_won[0]
    assert alone.in_lost is not None and all(math.isnan(value) for value in alone.in_lost)


def test_points_of_one_task_are_not_independent():
    """Ten copies of the same ten points give the intervals of the ten."""
    points = [replace(point, task=point.traj_uid) for point in planted(10, 8, noise=0.3)]
    alone = correlate_scores(points, resamples=200)
    together = correlate_scores(points * 10, resamples=200)
    apart = correlate_scores([replace(point, task=None) for point in points * 10], resamples=200)
    for name in ("all_levels", "chosen"):
        widths = []
        for audit in (alone, together, apart):
            interval = getattr(find_score(audit, "score"), name)
            assert interval[0] == pytest.approx(getattr(find_score(alone, "score"), name)[0])
            widths.append(interval[2] - interval[1])
        assert widths[1] == pytest.approx(widths[0], rel=1e-9)
        assert widths[2] < widths[0] / 2
    for one, expected in zip(together.level_effects, alone.level_effects, strict=True):
        assert one == pytest.approx(expected)


def test_level_effects_are_means_over_points():
    scores = {"score": (0.0, 1.0, 2.0, 3.0)}
    audit = correlate_scores(
        [
            AuditedTurn("a", 0, 1, True, ((0.0,), (1.0,), (1.0,), (0.0,)), scores),
            AuditedTurn("b", 0, 4, True, ((0.0,), (0.0,), (1.0,), (1.0,)), scores),
        ]
    )
    assert [level[0] for level in audit.level_effects] == [-0.5, 0.0, 0.5, 0.0]
    assert audit.level_effects[0][1:] == (-0.5, -0.5)
    assert (audit.level_effects[1][1], audit.level_effects[1][2]) == (-0.5, 0.5)


def test_reliability_is_corrected_for_half_the_length():
    """Spearman-Brown: halves with correlation r give a whole with reliability 2 r / (1 + r)."""
    points = [
        AuditedTurn("a", 0, 1, True, ((1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (0.0, 0.0)), {}),
        AuditedTurn("b", 0, 1, True, ((0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.0, 0.0)), {}),
    ]
    first = np.array([[0.75, -0.25, -0.25, -0.25], [-0.5, 0.5, 0.5, -0.5]]).ravel()
    second = np.array([[0.5, -0.5, 0.5, -0.5], [-0.25, 0.75, -0.25, -0.25]]).ravel()
    half = np.corrcoef(first, second)[0, 1]
    assert compute_reliability(points) == pytest.approx(2 * half / (1 + half))


def test_halves_take_every_second_return():
    first, second = (1.0, 0.0, 1.0, 0.0, 1.0, 0.0), (0.0,) * 6
    even = AuditedTurn("a", 0, 1, True, (first, second, second, second), {})
    odd = AuditedTurn("b", 0, 1, True, (second, first, second, second), {})
    # Effects are (3, -1, -1, -1) / 4 and (-1, 3, -1, -1) / 4 in one half each, and 0 in the other.
    assert math.isnan(compute_reliability([even, odd]))
    ones = (1.0,) * 6
    whole = AuditedTurn("c", 0, 1, True, (ones, second, second, second), {})
    a = np.array([0.75, -0.25, -0.25, -0.25, 0.75, -0.25, -0.25, -0.25])
    b = np.array([0.0, 0.0, 0.0, 0.0, 0.75, -0.25, -0.25, -0.25])
    half = np.corrcoef(a, b)[0, 1]
    assert compute_reliability([even, whole]) == pytest.approx(2 * half / (1 + half))


def test_opposite_or_constant_halves_raise_no_warning():
    first, second = (1.0, 0.0), (0.0, 1.0)
    opposite = AuditedTurn("a", 0, 1, True, (first, second, first, second), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compute_reliability([opposite]) == -1.0
        assert math.isnan(
            compute_reliability([AuditedTurn("a", 0, 1, True, ((1.0, 1.0),) * 4, {})])
        )


def test_one_point_can_be_audited():
    (point,) = planted(1, 8)
    audit = correlate_scores([point], resamples=SAMPLES)
    assert audit.points == 1
    assert find_score(audit, "score").all_levels is not None


def test_intervals_are_expanded_percentiles():
    """Ranks and quantiles of the same resamples, computed apart, with Student's t from a table:
    for 12 tasks the tails are ``Phi(-sqrt(12 / 11) * 2.20099)`` = 0.010757.
    """
    audit = find_score(correlate_scores(planted(12, 4, noise=0.4, seed=3), resamples=40), "score")
    assert audit.all_levels == pytest.approx(GOLDEN_ALL, abs=1e-4)
    assert audit.chosen == pytest.approx(GOLDEN_CHOSEN, abs=1e-4)


def test_one_return_per_level_has_no_reliability():
    assert math.isnan(compute_reliability(planted(5, 1)))
    constant = AuditedTurn("a", 0, 1, True, ((1.0, 1.0),) * 4, {})
    assert math.isnan(compute_reliability([constant, constant]))


def test_audit_is_repeatable_and_needs_points():
    points = planted(30, 4, noise=0.3, seed=7)
    expected = find_score(correlate_scores(points, resamples=SAMPLES), "score")
    assert find_score(correlate_scores(points, resamples=SAMPLES), "score") == expected
    assert find_score(correlate_scores(points, seed=1, resamples=SAMPLES), "score") != expected
    intervals = [
        find_score(correlate_scores(points, resamples=SAMPLES), "random").all_levels
        for _ in range(2)
    ]
    assert intervals[0] == intervals[1]
    with pytest.raises(ValueError):
        correlate_scores([])


def test_second_reliability_is_reported_by_column():
    """Compare the reliabilities by hand: all options, both outcomes, and the chosen options."""
    points = [
        AuditedTurn("a", 0, 1, True, ((1.0, 1.0), (0.0, 0.0)), {"s": (1.0, 0.0)}),
        AuditedTurn("b", 0, 2, True, ((0.0, 1.0), (0.0, 0.0)), {"s": (1.0, 0.0)}),
        AuditedTurn("c", 0, 1, False, ((0.0, 1.0), (1.0, 0.0)), {"s": (1.0, 0.0)}),
    ]
    second = correlate_scores(points, resamples=SAMPLES).second_audit
    assert second.all_levels is not None and second.in_won is not None

    def stepped_up(first: list[float], other: list[float]) -> float:
        half = np.corrcoef(first, other)[0, 1]
        return 2 * half / (1 + half)

    first = [0.5, -0.5, 0.0, 0.0, -0.5, 0.5]
    other = [0.5, -0.5, 0.5, -0.5, 0.5, -0.5]
    assert second.all_levels[0] == pytest.approx(stepped_up(first, other))
    assert second.in_won[0] == pytest.approx(stepped_up(first[:4], other[:4]))
    assert second.in_lost is not None and second.in_lost[0] == -1.0
    chosen = stepped_up([0.5, 0.0, -0.5], [0.5, -0.5, 0.5])
    assert second.chosen[0] == pytest.approx(chosen)


def test_rules_are_sorted_by_their_agreement_at_chosen_levels():
    points = [
        replace(p, step_scores={"best": float(p.option_effects[p.chosen - 1]), "worst": float(-i)})
        for i, p in enumerate(sorted(planted(30, 8), key=lambda p: p.option_effects[p.chosen - 1]))
    ]
    audit = correlate_scores(points, resamples=SAMPLES)
    names = [score.name for score in audit.scores]
    assert names[0] == "best" and names[-2:] == ["worst", "flat"]
    assert find_score(audit, "best").chosen[0] == pytest.approx(1)


def test_points_without_an_external_score_are_dropped():
    """The order of the three points with a score is right; the fourth point would break it."""
    returns = [((0.0,), (1.0,)), ((0.5,), (1.0,)), ((1.0,), (1.0,)), ((0.0,), (4.0,))]
    graded = [1.0, 2.0, 3.0, math.nan]
    points = [
        AuditedTurn(str(i), 0, 1, True, r, {}, {"external": score}, options=("a", "b"))
        for i, (r, score) in enumerate(zip(returns, graded, strict=True))
    ]
    audit = correlate_scores(points, resamples=SAMPLES)
    assert find_score(audit, "external").chosen[0] == pytest.approx(1)
    assert audit.level_effects == () and find_score(audit, "external").all_levels is None


def test_points_may_have_different_numbers_of_actions():
    points = [
        AuditedTurn("a", 0, 1, True, ((1.0, 1.0), (0.0, 0.0)), {}, options=("x", "y")),
        AuditedTurn(
            "b", 0, 1, True, ((0.0, 0.0), (1.0, 1.0), (0.5, 0.5)), {}, options=("x", "y", "z")
        ),
    ]
    audit = correlate_scores(points, resamples=SAMPLES)
    assert [point.option_effects[0] for point in points] == [0.5, -0.5]
    assert audit.reliability == pytest.approx(1)


def test_one_task_has_no_interval():
    points = [replace(point, task="t") for point in planted(5, 8)]
    value, low, high = find_score(correlate_scores(points, resamples=SAMPLES), "score").chosen
    assert math.isfinite(value) and math.isnan(low) and math.isnan(high)
