"""The credit audit by hand: effects, correlations with their intervals, and how much is signal."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest

from rlvcr.research.audit import AuditPoint, audit_scores, compute_reliability


def planted(count: int, plays: int, noise: float = 0.0, seed: int = 0) -> list[AuditPoint]:
    """Points at which one level is worth most, and a score that says which, up to ``noise``."""
    rng = np.random.default_rng(seed)
    points = []
    for number in range(count):
        chances = rng.permutation([0.1, 0.4, 0.7, 0.95])
        returns = tuple(
            tuple((rng.random(plays) < chance).astype(float).tolist()) for chance in chances
        )
        told = chances + noise * rng.normal(size=4)
        level = int(rng.integers(1, 5))
        points.append(
            AuditPoint(
                f"t{number}",
                number % 5,
                level,
                number % 3 == 0,
                returns,
                {"score": tuple(told.tolist()), "flat": (1.0, 1.0, 1.0, 1.0)},
                {"step": float(told[level - 1] - told.mean())},
            )
        )
    return points


SAMPLES = 60
GOLDEN_ALL = (0.684025, 0.549318, 0.866390)
GOLDEN_CHOSEN = (0.619966, 0.248686, 0.960611)


def named(found, name):
    return next(score for score in found.scores if score.name == name)


def test_an_effect_that_was_planted_is_found():
    found = audit_scores(planted(60, 64), resamples=SAMPLES)
    for interval in (named(found, "score").all_levels, named(found, "score").chosen):
        assert (
            interval is not None and interval[0] > 0.9 and interval[1] < interval[0] < interval[2]
        )
    step = named(found, "step")
    assert step.all_levels is None and step.chosen is not None
    assert step.chosen[0] > 0.9
    assert (found.points, found.plays) == (60, 64)
    assert found.reliability > 0.95


def test_scores_that_know_nothing_are_found_out():
    points = planted(200, 16)
    strangers = [point.scores for point in points[1:]] + [points[0].scores]
    shuffled = [
        AuditPoint(p.traj_uid, p.step, p.chosen, p.won, p.returns, scores)
        for p, scores in zip(points, strangers, strict=True)
    ]
    found = audit_scores(shuffled, resamples=SAMPLES)
    for name in ("score", "random"):
        interval = named(found, name).all_levels
        assert interval is not None
        value, low, high = interval
        assert abs(value) < 0.12 and low < 0 < high, name


def test_a_score_that_says_the_same_of_all_levels_has_no_correlation():
    flat = named(audit_scores(planted(20, 4), resamples=SAMPLES), "flat").all_levels
    assert flat is not None and all(math.isnan(value) for value in flat)


def test_won_and_lost_plays_are_told_apart():
    """A score that is right in won plays and turned round in lost ones."""
    points = [
        replace(p, scores={"score": tuple(v if p.won else -v for v in p.scores["score"])})
        for p in planted(60, 32)
    ]
    found = named(audit_scores(points, resamples=SAMPLES), "score")
    assert found.in_won is not None and found.in_lost is not None
    assert found.in_won[0] > 0.9 and found.in_lost[0] < -0.9
    won = [p for p in points if p.won]
    alone = named(audit_scores(won, resamples=SAMPLES), "score")
    assert alone.all_levels is not None and alone.all_levels[0] == found.in_won[0]
    assert alone.in_lost is not None and all(math.isnan(value) for value in alone.in_lost)


def test_points_of_a_task_are_no_independent_evidence():
    """Ten times the same ten points: as much is known as from the ten."""
    once = [replace(point, task=point.traj_uid) for point in planted(10, 8, noise=0.3)]
    alone = audit_scores(once, resamples=200)
    together = audit_scores(once * 10, resamples=200)
    apart = audit_scores([replace(point, task=None) for point in once * 10], resamples=200)
    for name in ("all_levels", "chosen"):
        widths = []
        for found in (alone, together, apart):
            interval = getattr(named(found, "score"), name)
            assert interval[0] == pytest.approx(getattr(named(alone, "score"), name)[0])
            widths.append(interval[2] - interval[1])
        assert widths[1] == pytest.approx(widths[0], rel=1e-9)
        assert widths[2] < widths[0] / 2
    for one, other in zip(together.levels, alone.levels, strict=True):
        assert one == pytest.approx(other)


def test_effects_of_levels_are_means_over_points():
    scores = {"score": (0.0, 1.0, 2.0, 3.0)}
    found = audit_scores(
        [
            AuditPoint("a", 0, 1, True, ((0.0,), (1.0,), (1.0,), (0.0,)), scores),
            AuditPoint("b", 0, 4, True, ((0.0,), (0.0,), (1.0,), (1.0,)), scores),
        ]
    )
    assert [level[0] for level in found.levels] == [-0.5, 0.0, 0.5, 0.0]
    assert found.levels[0][1:] == (-0.5, -0.5)
    assert (found.levels[1][1], found.levels[1][2]) == (-0.5, 0.5)


def test_reliability_is_that_of_twice_the_half():
    """Halves that correlate by r make a whole that correlates by 2 r / (1 + r) with its like."""
    points = [
        AuditPoint("a", 0, 1, True, ((1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (0.0, 0.0)), {}),
        AuditPoint("b", 0, 1, True, ((0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.0, 0.0)), {}),
    ]
    first = np.array([[0.75, -0.25, -0.25, -0.25], [-0.5, 0.5, 0.5, -0.5]]).ravel()
    second = np.array([[0.5, -0.5, 0.5, -0.5], [-0.25, 0.75, -0.25, -0.25]]).ravel()
    half = np.corrcoef(first, second)[0, 1]
    assert compute_reliability(points) == pytest.approx(2 * half / (1 + half))


def test_halves_take_every_other_play():
    first, second = (1.0, 0.0, 1.0, 0.0, 1.0, 0.0), (0.0,) * 6
    even = AuditPoint("a", 0, 1, True, (first, second, second, second), {})
    odd = AuditPoint("b", 0, 1, True, (second, first, second, second), {})
    # Effects of one half are (3, -1, -1, -1) / 4 and (-1, 3, -1, -1) / 4, of the other nothing.
    assert math.isnan(compute_reliability([even, odd]))
    ones = (1.0,) * 6
    whole = AuditPoint("c", 0, 1, True, (ones, second, second, second), {})
    a = np.array([0.75, -0.25, -0.25, -0.25, 0.75, -0.25, -0.25, -0.25])
    b = np.array([0.0, 0.0, 0.0, 0.0, 0.75, -0.25, -0.25, -0.25])
    half = np.corrcoef(a, b)[0, 1]
    assert compute_reliability([even, whole]) == pytest.approx(2 * half / (1 + half))


def test_halves_that_contradict_each_other_or_say_nothing_raise_no_warning():
    first, second = (1.0, 0.0), (0.0, 1.0)
    opposite = AuditPoint("a", 0, 1, True, (first, second, first, second), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compute_reliability([opposite]) == -math.inf
        assert math.isnan(compute_reliability([AuditPoint("a", 0, 1, True, ((1.0, 1.0),) * 4, {})]))


def test_one_point_is_enough():
    (point,) = planted(1, 8)
    found = audit_scores([point], resamples=SAMPLES)
    assert found.points == 1
    assert named(found, "score").all_levels is not None


def test_intervals_are_expanded_percentiles():
    """Ranks and quantiles of the same resamples, computed apart, with Student's t from a table:
    for 12 tasks the tails are ``Phi(-sqrt(12 / 11) * 2.20099)`` = 0.010757.
    """
    found = named(audit_scores(planted(12, 4, noise=0.4, seed=3), resamples=40), "score")
    assert found.all_levels == pytest.approx(GOLDEN_ALL, abs=1e-4)
    assert found.chosen == pytest.approx(GOLDEN_CHOSEN, abs=1e-4)


def test_one_play_says_nothing_about_reliability():
    assert math.isnan(compute_reliability(planted(5, 1)))
    same = AuditPoint("a", 0, 1, True, ((1.0, 1.0),) * 4, {})
    assert math.isnan(compute_reliability([same, same]))


def test_an_audit_is_the_same_again_and_needs_points():
    points = planted(30, 4, noise=0.3, seed=7)
    once = named(audit_scores(points, resamples=SAMPLES), "score")
    assert named(audit_scores(points, resamples=SAMPLES), "score") == once
    assert named(audit_scores(points, seed=1, resamples=SAMPLES), "score") != once
    drawn = [named(audit_scores(points, resamples=SAMPLES), "random").all_levels for _ in range(2)]
    assert drawn[0] == drawn[1]
    with pytest.raises(ValueError):
        audit_scores([])


def test_the_second_audit_is_told_by_column():
    """Reliabilities of all options, of won and lost plays, and of the chosen options by hand."""
    points = [
        AuditPoint("a", 0, 1, True, ((1.0, 1.0), (0.0, 0.0)), {"s": (1.0, 0.0)}),
        AuditPoint("b", 0, 2, True, ((0.0, 1.0), (0.0, 0.0)), {"s": (1.0, 0.0)}),
        AuditPoint("c", 0, 1, False, ((0.0, 1.0), (1.0, 0.0)), {"s": (1.0, 0.0)}),
    ]
    second = audit_scores(points, resamples=SAMPLES).second_audit
    assert second.all_levels is not None and second.in_won is not None

    def stepped_up(first: list[float], other: list[float]) -> float:
        half = np.corrcoef(first, other)[0, 1]
        return 2 * half / (1 + half)

    first = [0.5, -0.5, 0.0, 0.0, -0.5, 0.5]
    other = [0.5, -0.5, 0.5, -0.5, 0.5, -0.5]
    assert second.all_levels[0] == pytest.approx(stepped_up(first, other))
    assert second.in_won[0] == pytest.approx(stepped_up(first[:4], other[:4]))
    assert second.in_lost is not None and second.in_lost[0] == -math.inf
    chosen = stepped_up([0.5, 0.0, -0.5], [0.5, -0.5, 0.5])
    assert second.chosen[0] == pytest.approx(chosen)


def test_rules_are_sorted_by_their_agreement_at_chosen_levels():
    points = [
        replace(p, step_scores={"best": float(p.option_effects[p.chosen - 1]), "worst": float(-i)})
        for i, p in enumerate(sorted(planted(30, 8), key=lambda p: p.option_effects[p.chosen - 1]))
    ]
    found = audit_scores(points, resamples=SAMPLES)
    names = [score.name for score in found.scores]
    assert names[0] == "best" and names[-2:] == ["worst", "flat"]
    assert named(found, "best").chosen[0] == pytest.approx(1)


def test_points_without_an_external_score_are_left_out():
    """The order of the three points with a score is right; the fourth point would spoil it."""
    returns = [((0.0,), (1.0,)), ((0.5,), (1.0,)), ((1.0,), (1.0,)), ((0.0,), (4.0,))]
    graded = [1.0, 2.0, 3.0, math.nan]
    points = [
        AuditPoint(str(i), 0, 1, True, r, {}, {"external": score}, options=("a", "b"))
        for i, (r, score) in enumerate(zip(returns, graded, strict=True))
    ]
    found = audit_scores(points, resamples=SAMPLES)
    assert named(found, "external").chosen[0] == pytest.approx(1)
    assert found.levels == () and named(found, "external").all_levels is None


def test_points_may_have_different_numbers_of_actions():
    points = [
        AuditPoint("a", 0, 1, True, ((1.0, 1.0), (0.0, 0.0)), {}, options=("x", "y")),
        AuditPoint(
            "b", 0, 1, True, ((0.0, 0.0), (1.0, 1.0), (0.5, 0.5)), {}, options=("x", "y", "z")
        ),
    ]
    found = audit_scores(points, resamples=SAMPLES)
    assert [point.option_effects[0] for point in points] == [0.5, -0.5]
    assert found.reliability == pytest.approx(1)


def test_one_task_has_no_interval():
    points = [replace(point, task="t") for point in planted(5, 8)]
    value, low, high = named(audit_scores(points, resamples=SAMPLES), "score").chosen
    assert math.isfinite(value) and math.isnan(low) and math.isnan(high)
