"""Coverage of audit intervals on planted effects; seeded, so that the result is always the same."""

import numpy as np
import pytest

from scripts.dev.audit_coverage import draw_audit_points, main, measure_coverage


def test_planted_scores_correlate_as_asked():
    points = draw_audit_points(np.random.default_rng(0), 400, 5, 0.6)
    effects = np.array([point.returns for point in points])[..., 0].ravel()
    scores = np.array([point.scores["planted"] for point in points]).ravel()
    assert np.corrcoef(effects, scores)[0, 1] == pytest.approx(0.6, abs=0.05)
    # Half of the variance is shared by the points of a task.
    of_task = effects.reshape(400, 5, 4)
    assert np.corrcoef(of_task[:, 0].ravel(), of_task[:, 1].ravel())[0, 1] == pytest.approx(
        0.5, abs=0.08
    )


def test_intervals_contain_the_truth():
    """Of 60 intervals at 95%, 57 are expected, and fewer than 51 have a probability of 0.3%."""
    for correlation in (0.0, 0.8):
        covered = measure_coverage(12, 3, correlation, repetitions=60, resamples=200)
        assert min(covered) >= 0.85


def test_the_table_has_a_line_for_each_setting(capsys, monkeypatch):
    monkeypatch.setattr("scripts.dev.audit_coverage.SIMULATIONS", (((3, 2), 0.5),))
    assert main(["1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
