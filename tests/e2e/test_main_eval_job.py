"""Runs ``main_eval`` as a user does: the trained relay policy on a few tasks, with all level
rules.
"""

import sys
from pathlib import Path

import pytest

from tests.helpers.jobs import ROOT, Job
from verl.record.tracking import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TIMEOUT_S = 240
GONE_S = 20
RULES = ["free", "level_1", "level_2", "level_3", "level_4", "random", "oracle"]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> tuple[Job, Path]:
    """Return the finished evaluation and its run directory."""
    root = tmp_path_factory.mktemp("evaluation")
    overrides = [
        "--config-name",
        "relay",
        f"actor_rollout_ref.model.path={ROOT}/experiments/policies/relay",
        f"trainer.default_local_dir={root}/run",
        "env.val_tasks=8",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
    ]
    evaluation = Job([sys.executable, "-m", "verl.trainer.main_eval", *overrides], root / "log.txt")
    evaluation.finish(TIMEOUT_S)
    return evaluation, root / "run"


def test_every_rule_is_recorded(job):
    (metrics,) = read_metrics(job[1])
    recorded_rules = [key.split("/")[2] for key in metrics if key.startswith("val/levels/")]
    assert list(dict.fromkeys(recorded_rules)) == RULES
    for rule in RULES:
        values = {
            name: metrics[f"val/levels/{rule}/{name}"]
            for name in ("success_rate", "success_rate_low", "success_rate_high")
        }
        low, high = values["success_rate_low"], values["success_rate_high"]
        assert 0 <= low <= values["success_rate"] <= high <= 1
        whole = metrics[f"val/levels/{rule}/tokens_per_step"]
        bounds = [metrics[f"val/levels/{rule}/tokens_per_step_{end}"] for end in ("low", "high")]
        assert bounds[0] <= whole <= bounds[1]
        sampled = metrics[f"val/levels/{rule}/sampled_tokens_per_step"]
        assert whole == sampled if rule == "free" else whole > sampled
    assert metrics["val/levels/free/success_rate"] == metrics["val/success_rate"]
    tokens = [metrics[f"val/levels/level_{level}/tokens_per_step"] for level in (1, 2, 3, 4)]
    assert tokens == sorted(tokens)
    difference = tokens[3] - metrics["val/levels/oracle/tokens_per_step"]
    key = "val/levels_less_oracle/level_4/tokens_per_step_difference"
    assert metrics[key] == pytest.approx(difference)
    assert metrics[f"{key}_low"] <= difference <= metrics[f"{key}_high"]


def test_situations_are_recorded(job):
    (metrics,) = read_metrics(job[1])
    shares = [metrics[f"val/levels_in/+7/share_{level}"] for level in (1, 2, 3, 4)]
    assert sum(shares) == pytest.approx(1.0)
    assert metrics["val/levels_in/+7/needed_level"] == 4.0


def test_tables_and_frontier_are_shown(job):
    evaluation, run = job
    log = evaluation.log.read_text()
    assert "Success and tokens of level rules" in log and "Levels chosen in each situation" in log
    assert (
        "Difference to free, paired by task" in log
        and "Difference to oracle, paired by task" in log
    )
    page = (run / "report.html").read_text()
    assert "<h2>The choice of level</h2>" in page
    assert "tokens per turn, including forced levels" in page
    assert all(f">{rule.replace('_', ' ')}</text>" in page for rule in RULES)
    # Each point has an interval in both directions.
    frontier = page.partition("<h2>The choice of level</h2>")[2].partition("</section>")[0]
    assert frontier.count('class="whisker') == 2 * len(RULES)


def test_no_process_is_left(job):
    assert job[0].left_over(GONE_S) == []
