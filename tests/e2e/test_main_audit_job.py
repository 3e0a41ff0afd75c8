"""Runs ``main_audit`` as a user does, on a run that was trained for one step."""

import json
import sys
from pathlib import Path

import pytest

from tests.helpers.jobs import ROOT, Job
from tests.helpers.refusals import list_log_lines
from verl.record.tracking import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TIMEOUT_S = 180
GONE_S = 20
POINTS = 6
ALTERNATIVES_PER_LEVEL = 2
BATCH = 2


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> tuple[Job, Path]:
    """Return the finished audit and its run directory."""
    root = tmp_path_factory.mktemp("audit")
    run = root / "run"
    overrides = [
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
    trained = Job([sys.executable, "-m", "verl.trainer.main_ppo", *overrides], root / "train.txt")
    trained.finish(TIMEOUT_S)
    audit_overrides = [
        f"algorithm.rlvcr.audit_points={POINTS}",
        f"algorithm.rlvcr.audit_plays={ALTERNATIVES_PER_LEVEL}",
    ]
    audit = Job(
        [sys.executable, "-m", "verl.trainer.main_audit", str(run), *audit_overrides],
        root / "log.txt",
    )
    audit.finish(TIMEOUT_S)
    return audit, run


def test_every_point_has_executed_alternatives_at_every_level(job):
    record = json.loads((job[1] / "audit" / "audit.json").read_text())
    assert len(record["points"]) == POINTS
    # The points come from more tasks than one batch of the run has.
    assert len({point["task"] for point in record["points"]}) > BATCH
    for point in record["points"]:
        assert [len(returns) for returns in point["returns"]] == [ALTERNATIVES_PER_LEVEL] * 4
        assert {"grpo", "gigpo", "rlvcr_additive", "copo"} <= set(point["step_scores"])
        assert len(point["scores"]["rlvcr_posterior"]) == 4
    assert "values" in record["skipped"]["gae"]


def test_policy_is_the_newest_checkpoint(job):
    log = job[0].log.read_text()
    lines = list_log_lines(log, "verl.trainer.launch.audit")
    assert "global_step_1" in log and not any(" WARNING " in line for line in lines)


def test_score_agreement_is_recorded_and_in_the_report(job):
    (metrics,) = read_metrics(job[1] / "audit")
    assert metrics["audit/points"] == POINTS
    assert -1 <= metrics["audit/scores/deeper/all_levels"] <= 1
    log = job[0].log.read_text()
    assert "Effects of levels" in log and "Agreement of credit rules with effects" in log
    page = (job[1] / "audit" / "report.html").read_text()
    assert "<h2>Credit audit</h2>" in page
    # The trajectories that were continued from their steps.
    assert (job[1] / "audit" / "rollouts" / "1.jsonl").exists()


def test_audited_run_is_unchanged(job):
    assert len(read_metrics(job[1])) == 1
    assert job[0].left_over(GONE_S) == []
