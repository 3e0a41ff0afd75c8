"""``main_audit`` as a user starts it: a run that has been trained for a step, and is then asked."""

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs import ROOT, Job
from verl.record.tracking import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TIMEOUT_S = 180
GONE_S = 20
POINTS = 6
PLAYS = 2
BATCH = 2


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> tuple[Job, Path]:
    """The finished audit and its run directory."""
    root = tmp_path_factory.mktemp("audit")
    run = root / "run"
    words = [
        "--config-name",
        "relay",
        f"actor_rollout_ref.model.path={ROOT}/experiments/policies/relay",
        f"trainer.default_local_dir={run}",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
        f"data.train_batch_size={BATCH}",
        "env.rollout.n=4",
    ]
    trained = Job([sys.executable, "-m", "verl.trainer.main_ppo", *words], root / "train.txt")
    trained.finish(TIMEOUT_S)
    few = [f"algorithm.rlvcr.audit_points={POINTS}", f"algorithm.rlvcr.audit_plays={PLAYS}"]
    asked = Job([sys.executable, "-m", "verl.trainer.main_audit", str(run), *few], root / "log.txt")
    asked.finish(TIMEOUT_S)
    return asked, run


def test_every_point_was_played_on_at_every_level(job):
    kept = json.loads((job[1] / "audit" / "audit.json").read_text())
    assert len(kept["points"]) == POINTS
    # From the plays of more tasks than a batch of the run has.
    assert len({point["task"] for point in kept["points"]}) > BATCH
    for point in kept["points"]:
        assert [len(earned) for earned in point["returns"]] == [PLAYS] * 4
        assert {"grpo", "gigpo", "rlvcr_additive", "copo"} <= set(point["step_scores"])
        assert len(point["scores"]["rlvcr_posterior"]) == 4
    assert "values" in kept["skipped"]["gae"]


def test_the_policy_is_the_newest_checkpoint(job):
    said = job[0].log.read_text()
    assert "global_step_1" in said and "has no checkpoint" not in said


def test_what_scores_say_is_on_record_and_in_the_report(job):
    (metrics,) = read_metrics(job[1] / "audit")
    assert metrics["audit/points"] == POINTS
    assert -1 <= metrics["audit/scores/deeper/all_levels"] <= 1
    said = job[0].log.read_text()
    assert "Effects of levels" in said and "Agreement of credit rules with effects" in said
    page = (job[1] / "audit" / "report.html").read_text()
    assert "<h2>Credit audit</h2>" in page
    # The plays whose steps were returned to.
    assert (job[1] / "audit" / "rollouts" / "1.jsonl").exists()


def test_the_run_itself_is_left_as_it_was(job):
    assert len(read_metrics(job[1])) == 1
    assert job[0].left_over(GONE_S) == []
