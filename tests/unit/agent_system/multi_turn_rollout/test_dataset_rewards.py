"""Trajectories of dataset rows have one turn. A missing grade does not count as a grade of 0."""

import json

import pytest

from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from tests.helpers.number_line_world import Group, make_config
from tests.helpers.refusals import mentions
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.algos.advantages import compute_gdpo_outcome_advantage
from verl.trainer.ppo.metrics import compute_reward_part_metrics

GRADERS = """
def parts(data_source, solution_str, ground_truth, extra_info):
    right = float(ground_truth in solution_str)
    return {"score": right, "accuracy": right, "length": len(solution_str), "note": "fine"}

def some(data_source, solution_str, ground_truth, extra_info):
    if "crash" in solution_str: raise RuntimeError("grader down")
    return {"nan": float("nan"), "empty": None}.get(solution_str, 0.5)
"""


@pytest.fixture
def generate(tmp_path):
    """Generate ``n`` replies for each of ``rows`` rows; ``answers`` gives the replies in order."""
    tokenizer = make_tiny_tokenizer()
    collectors = []
    (tmp_path / "graders.py").write_text(GRADERS)

    def run(answers, grader, rows=1, n=2, weights=None, mixed=False, **env):
        lines = [
            {"prompt": f"{k}?", "ground_truth": "yes", "data_source": "d"} for k in range(rows)
        ]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (tmp_path / "val.jsonl").write_text(json.dumps(lines[0] | {"prompt": "held out?"}))
        config = make_config("dataset", n=n, max_steps=1, **env)
        kwargs = {
            "train_files": [str(tmp_path / "rows.jsonl")],
            "val_files": [str(tmp_path / "val.jsonl")],
            "reward": {
                "path": str(tmp_path / "graders.py"),
                "name": grader,
                "weights": weights or {},
            },
            "placement": "inline",
        }
        config.env.kwargs = kwargs
        if mixed:
            config.env.env_name = "mixture"
            parts = {"parts": ["dataset"], "kwargs": {"dataset": kwargs}}
            config.env.kwargs = {**parts, "placement": "inline"}
        replies = iter(answers)
        engine = ScriptedEngine(tokenizer, lambda _request, _prompt: next(replies), 0.0)
        envs = make_envs(config)[0]
        collectors.append(TrajectoryCollector(config, tokenizer))
        return collectors[-1].multi_turn_loop(envs.gen_batch(1, rows), Group([engine]), envs)

    yield run
    for collector in collectors:
        collector.close()


@pytest.mark.parametrize("mixed", [False, True])
def test_answer_cut_by_length_is_graded(generate, mixed):
    data = generate(["yes " * 40] * 2, "parts", mixed=mixed, max_turn_tokens=6)
    columns = data.non_tensor_batch
    assert list(columns["truncated"]) == ["length", "length"]
    assert columns["episode_rewards"].tolist() == [1.0, 1.0] and all(columns["won"])
    assert data.batch["response_mask"].sum(-1).tolist() == [6, 6]


def test_several_rewards_are_weighted_and_kept_in_the_row(generate):
    data = generate(["yes", "no"], "parts")
    columns = data.non_tensor_batch
    assert columns["episode_rewards"].tolist() == [1.0, 0.0]
    assert [(p["accuracy"], p["length"]) for p in columns["reward_parts"]] == [(1.0, 3), (0.0, 2)]
    # Values that are no numbers are dropped.
    assert set(columns["reward_parts"][0]) == {"score", "accuracy", "length"}
    weights = {"accuracy": 1.0, "length": 0.5}
    data = generate(["yes", "no"], "parts", weights=weights)
    assert data.non_tensor_batch["episode_rewards"].tolist() == [2.5, 1.0]
    assert compute_reward_part_metrics(data)["reward/score/mean"] == 1.75
    assert compute_reward_part_metrics(data)["reward/accuracy/max"] == 1.0
    advantages = compute_gdpo_outcome_advantage(
        data.batch["response_mask"],
        data.non_tensor_batch["uid"],
        data.non_tensor_batch["reward_parts"],
        list(weights),
        list(weights.values()),
    )[0]
    assert advantages[0, 0] > 0 > advantages[1, 0]


def test_weight_of_a_missing_reward_leaves_nothing_to_train_on(generate):
    with pytest.raises(RuntimeError, check=mentions("left_out_aborted")):
        generate(["yes"] * 20, "parts", weights={"acuracy": 1.0})


@pytest.mark.parametrize("answer", ["crash", "nan", "empty"])
def test_answer_without_a_grade_is_dropped(generate, answer):
    answers = [answer, *["no"] * 5]
    data = generate(answers, "some", rows=3)
    assert data.non_tensor_batch["episode_rewards"].tolist() == [0.5] * 4
    metrics = data.meta_info["metrics"]
    assert metrics["rollout/aborted"] == 1.0
    assert metrics["rollout/left_out_group_of_aborted"] == 1.0
    keep_rest = generate(answers, "some", rows=3, on_abort="keep_rest")
    assert keep_rest.non_tensor_batch["episode_rewards"].tolist() == [0.5] * 5
