"""Steps without training signal log a warning with numbers and the key to raise, once per kind."""

import logging

import pytest
import torch

from tests.helpers.number_line_world import make_config
from tests.helpers.trainer_fakes import make_trainer_rows
from verl.trainer.ppo.metrics import StepWarnings, compute_no_advantage_metrics

NO_SIGNAL = {"critic/rows_without_advantage": 1.0, "critic/groups_of_equal_returns": 1.0}


def batch(advantages, rewards, uids=("g", "g", "h", "h"), trajectories="abcd"):
    data = make_trainer_rows()
    mask = data.batch["response_mask"]
    data.batch["advantages"] = torch.tensor(advantages)[:, None] * torch.ones(4, 3)
    data.batch["token_level_rewards"] = torch.tensor(rewards)[:, None] * torch.eye(3)[0]
    data.batch["response_mask"] = mask
    data.non_tensor_batch["uid"][:] = uids
    data.non_tensor_batch["traj_uid"][:] = list(trajectories)
    return data


@pytest.mark.parametrize(
    ("advantages", "rewards", "uids", "trajectories", "without", "equal"),
    [
        ([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], "gghh", "abcd", 1.0, 1.0),
        ([1.0, -1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], "gghh", "abcd", 0.5, 0.5),
        ([1.0, -1.0, 1.0, -1.0], [1.0, 0.0, 1.0, 0.0], "gghh", "abcd", 0.0, 0.0),
        # Several rows of one trajectory: each has the return of the whole trajectory.
        ([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0], "gggg", "aaab", 1.0, 1.0),
        ([0.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 2.0], "gggg", "aaab", 1.0, 0.0),
        # There is no group to compare, so no metric of groups.
        ([0.0, 0.0, 0.0, 2.0], [1.0, 0.0, 1.0, 0.0], "ghij", "abcd", 0.75, None),
    ],
)
def test_shares_of_rows_and_groups_without_signal(
    advantages, rewards, uids, trajectories, without, equal
):
    metrics = compute_no_advantage_metrics(batch(advantages, rewards, list(uids), trajectories))
    assert metrics["critic/rows_without_advantage"] == without
    assert metrics.get("critic/groups_of_equal_returns") == equal


def test_advantage_on_unsampled_tokens_does_not_count():
    data = batch([0.0] * 4, [0.0] * 4)
    data.batch["advantages"][~data.batch["response_mask"].bool()] = 3.0
    assert compute_no_advantage_metrics(data)["critic/rows_without_advantage"] == 1.0


@pytest.mark.parametrize(
    ("metrics", "settings", "expected_texts"),
    [
        ({"rollout/truncated_length": 1.0}, {"turn": 48}, ["100%", "env.max_turn_tokens=48"]),
        (
            {"rollout/truncated_length": 0.96},
            {"turn": 512},
            ["96%", "data.max_response_length=512"],
        ),
        ({"rollout/truncated_length": 0.5}, {}, []),
        (
            {"rollout/truncated_budget": 1.0},
            {"history": "append"},
            ["data.max_response_length=512"],
        ),
        ({"rollout/truncated_budget": 1.0}, {"history": "window"}, ["data.max_prompt_length=128"]),
        (NO_SIGNAL, {}, ["env.rollout.n=8", "data.train_batch_size="]),
        ({"critic/rows_without_advantage": 1.0}, {}, ["env.rollout.n=8"]),
        ({"critic/rows_without_advantage": 0.9}, {}, []),
        ({}, {}, []),
    ],
)
def test_each_kind_is_expected_texts_with_its_key(metrics, settings, expected_texts, caplog):
    config = make_config()
    config.data.max_response_length = 512
    config.data.max_prompt_length = 128
    config.env.max_turn_tokens = settings.get("turn", 48)
    config.env.history = settings.get("history", "append")
    config.env.rollout.n = 8
    StepWarnings(config).log_new_warnings(3, metrics)
    text = caplog.text
    assert all(part in text for part in expected_texts) and ("step 3" in text) == bool(
        expected_texts
    )
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_each_kind_is_warned_of_once_and_counted(caplog):
    warnings = StepWarnings(make_config())
    for step in range(1, 6):
        warnings.log_new_warnings(step, NO_SIGNAL if step != 3 else {})
    warnings.log_new_warnings(6, {"rollout/truncated_length": 1.0})
    assert len(caplog.records) == 2
    warnings.close()
    assert len(caplog.records) == 3 and "4 of 6 steps" in caplog.records[-1].getMessage()
