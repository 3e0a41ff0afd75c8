"""Steps that teach nothing are warned of with numbers and the key to raise, once per kind."""

import logging

import pytest
import torch

from tests.helpers.play import make_config
from tests.helpers.trainer_fakes import played_rows
from verl.trainer.ppo.metrics import StepWarnings, compute_signal_metrics

NOTHING = {"critic/rows_without_advantage": 1.0, "critic/groups_of_equal_returns": 1.0}


def batch(advantages, rewards, uids=("g", "g", "h", "h"), trajectories="abcd"):
    data = played_rows()
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
        # Two rows of one trajectory: its return is their sum.
        ([0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.5, 0.5], "gggg", "aabb", 1.0, 1.0),
        # No group to compare: nothing is said of groups.
        ([0.0, 0.0, 0.0, 2.0], [1.0, 0.0, 1.0, 0.0], "ghij", "abcd", 0.75, None),
    ],
)
def test_shares_of_what_teaches_nothing(advantages, rewards, uids, trajectories, without, equal):
    found = compute_signal_metrics(batch(advantages, rewards, list(uids), trajectories))
    assert found["critic/rows_without_advantage"] == without
    assert found.get("critic/groups_of_equal_returns") == equal


def test_an_advantage_of_tokens_that_were_not_sampled_is_none():
    data = batch([0.0] * 4, [0.0] * 4)
    data.batch["advantages"][~data.batch["response_mask"].bool()] = 3.0
    assert compute_signal_metrics(data)["critic/rows_without_advantage"] == 1.0


@pytest.mark.parametrize(
    ("metrics", "settings", "named"),
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
        (NOTHING, {}, ["all returns of each group were equal", "env.rollout.n=8"]),
        ({"critic/rows_without_advantage": 1.0}, {}, ["no row had an advantage"]),
        ({"critic/rows_without_advantage": 0.9}, {}, []),
        ({}, {}, []),
    ],
)
def test_each_kind_is_named_with_its_key(metrics, settings, named, caplog):
    config = make_config()
    config.data.max_response_length = 512
    config.data.max_prompt_length = 128
    config.env.max_turn_tokens = settings.get("turn", 48)
    config.env.history = settings.get("history", "append")
    config.env.rollout.n = 8
    StepWarnings(config).count_step(3, metrics)
    text = caplog.text
    assert all(words in text for words in named) and ("step 3" in text) == bool(named)
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_a_kind_is_warned_of_once_and_counted(caplog):
    warnings = StepWarnings(make_config())
    for step in range(1, 6):
        warnings.count_step(step, NOTHING if step != 3 else {})
    warnings.count_step(6, {"rollout/truncated_length": 1.0})
    assert len(caplog.records) == 2
    warnings.close()
    assert len(caplog.records) == 3 and "4 of 6 steps" in caplog.records[-1].getMessage()
