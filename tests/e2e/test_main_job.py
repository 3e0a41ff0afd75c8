"""Runs the main job from cold start to report (Ray, vLLM, ALFWorld, RLVCR), and reads its run
directory.
"""

import json
import math
import re

import pytest
import yaml

from tests.helpers.smoke_job import NEEDS_VLLM, STEPS, TIMEOUT_S
from verl.record.tracking import read_metrics
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointManager, verify_checkpoint

pytestmark = [NEEDS_VLLM, pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)]
GONE_S = 20
LOADS = (
    r"""\b(?:src|href|action|data)\s*=\s*["']([^"']+)""",
    r"""url\(\s*["']?([^"')]+)""",
    r"@import\s+(\S+)",
)
NAMES = (
    "training/global_step",
    "training/epoch",
    "episode/success_rate",
    "episode/reward",
    "episode/length",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/lr",
    "rlvcr/level_share_1",
    "rlvcr/level_share_4",
    "rlvcr/score_logprob",
    "rlvcr/score_entropy",
    "rlvcr/thought_tokens_mean",
    "rlvcr/expanded_steps",
    "timing_s/gen",
    "timing_s/step",
    "timing_s/adv",
    "timing_s/update_actor",
    "timing_s/update_weights",
    "perf/throughput",
    "perf/total_num_tokens",
    "perf/time_per_step",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_std",
)


@pytest.fixture(scope="module")
def metrics(main_job) -> list[dict]:
    """Return one dictionary per step; index 0 is the validation before the first step."""
    return read_metrics(main_job.run)


@pytest.fixture(scope="module")
def rollouts(main_job) -> dict[int, list[dict]]:
    """Return the trajectories of every training step."""
    return {
        step: list(jsonl.read(main_job.run / "rollouts" / f"{step}.jsonl"))
        for step in range(1, STEPS + 1)
    }


def test_no_process_is_left(main_job):
    assert main_job.job.left_over(GONE_S) == []


def test_resolved_config_and_facts_are_written(main_job):
    config = yaml.safe_load((main_job.run / "config.yaml").read_text())
    assert config["trainer"]["total_training_steps"] == STEPS
    assert (
        config["algorithm"]["adv_estimator"] == "rlvcr"
        and config["actor_rollout_ref"]["rollout"]["name"] == "vllm"
    )
    assert config["algorithm"]["rlvcr"]["enable"] is True, "the derived value was not written"
    plan = yaml.safe_load((main_job.run / "run_plan.yaml").read_text())
    assert plan["trainer.device"] == "cpu"
    assert plan["actor_rollout_ref.rollout.num_workers"] == 1
    facts = json.loads((main_job.run / "env.json").read_text())
    assert len(facts["starts"]) == 1
    assert "vllm" in json.dumps(facts) and "torch" in json.dumps(facts)


def test_every_step_has_the_documented_metrics(metrics):
    assert [record["step"] for record in metrics] == list(range(STEPS + 1))
    for record in metrics[1:]:
        missing = [name for name in NAMES if name not in record]
        assert not missing
        assert all(math.isfinite(record[name]) for name in NAMES)
        assert record["training/global_step"] == record["step"]


def test_validation_runs_before_and_after_training(metrics):
    for record in (metrics[0], metrics[-1]):
        assert (
            0
            <= record["val/success_rate_low"]
            <= record["val/success_rate"]
            <= record["val/success_rate_high"]
            <= 1
        )
        assert record["val/tasks"] == 4
    assert all("val/success_rate" not in record for record in metrics[1:-1])


def test_engine_and_trainer_log_probs_agree(metrics):
    for record in metrics[1:]:
        assert record["training/rollout_log_probs_diff_max"] < 1e-3


def test_expanded_turns_have_their_scored_contexts(rollouts, metrics):
    for step, rows in rollouts.items():
        assert len({row["traj_uid"] for row in rows}) == len(rows) == 8
        records = [record for row in rows for record in row["steps"]]
        for record in records:
            assert len(record["token_credit"]) == record["num_tokens"] > 0
            assert bool(record["contexts"]) == (record["parse_failure"] is None)
            check_contexts(record)
        expanded = sum(len(record["contexts"]) > 1 for record in records)
        assert 0 < expanded <= metrics[step]["rlvcr/expanded_steps"]
        assert any(len(record["contexts"]) == 4 for record in records)
        assert any(record["think_advantage"] for record in records)


def check_contexts(record: dict) -> None:
    levels = [context["level"] for context in record["contexts"]]
    assert levels == sorted(set(levels)) and set(levels) <= {1, 2, 3, 4}
    original = [context["level"] for context in record["contexts"] if context["original"]]
    assert original == ([record["level"]] if levels else [])
    for context in record["contexts"]:
        assert context["score_logprob"] <= 0 <= context["score_entropy"]
        assert 0 < context["score_mean_prob"] <= 1 and 0 <= context["score_geometric_prob"] <= 1


def test_members_of_a_group_have_the_same_start_state(rollouts):
    for rows in rollouts.values():
        prompts: dict[str, set] = {}
        for row in rows:
            prompts.setdefault(row["uid"], set()).add((row["task_id"], row["prompt"]))
        assert len(prompts) == 2 and all(len(starts) == 1 for starts in prompts.values())


def test_validation_trajectories_are_written(main_job):
    for step in (0, STEPS):
        rows = list(jsonl.read(main_job.run / "rollouts" / f"val_{step}.jsonl"))
        assert len(rows) == 4
        assert "token_credit" not in rows[0]["steps"][0]


def test_report_is_self_contained(main_job):
    page = (main_job.run / "report.html").read_text()
    references = [reference for pattern in LOADS for reference in re.findall(pattern, page)]
    assert [reference for reference in references if not reference.startswith(("#", "data:"))] == []
    assert "<svg" in page and "success" in page


def test_checkpoints_hold_only_tensors_and_json(main_job):
    manager = CheckpointManager(main_job.run / "checkpoints")
    steps = manager.find_checkpoints()
    assert list(steps) == [STEPS - 1, STEPS], "other checkpoints than the two newest"
    for step, path in steps.items():
        manifest = verify_checkpoint(path)
        assert manifest["step"] == manager.load_state(path)["global_step"] == step
        assert {name.rsplit(".", 1)[-1] for name in manifest["files"]} == {"safetensors", "json"}


def test_cold_start_saves_a_policy_and_its_run(main_job):
    assert {path.suffix for path in (main_job.root / "policy").iterdir()} >= {
        ".json",
        ".safetensors",
    }
    assert read_metrics(main_job.root / "sft")[-1]["step"] > 0
