"""Numbers that an environment puts into ``info`` become metrics."""

from fractions import Fraction

import numpy as np
import pytest

from agent_system.environments.env_package.number_line.package import NumberLineEnv
from agent_system.multi_turn_rollout.trajectory import MAX_INFO_NUMBERS, extract_info_numbers
from tests.helpers.solvability import play_episodes
from verl.trainer.ppo.metrics import compute_env_info_metrics, compute_validation_metrics


@pytest.mark.parametrize(
    ("info", "numbers"),
    [
        ({}, {}),
        ({"won": True, "is_action_valid": False, "needed_level": 3}, {}),
        ({"score": 3, "share": 0.5, "key_found": True}, {"score": 3, "share": 0.5, "key_found": 1}),
        (
            {"a": np.float32(1.5), "b": np.int64(2), "c": np.bool_(False)},
            {"a": 1.5, "b": 2, "c": 0},
        ),
        ({"half": Fraction(1, 2)}, {"half": 0.5}),
        ({"text": "3", "none": None, "list": [1], "map": {"a": 1}, "array": np.ones(2)}, {}),
        ({"nan": float("nan"), "inf": float("inf"), "huge": 10**400}, {}),
        ({"with space": 1, "a/b": 1, "": 1, "x" * 65: 1, "a-b.c_1": 1}, {"a-b.c_1": 1}),
    ],
)
def test_numbers_are_extracted_from_info(info, numbers):
    assert extract_info_numbers(info) == numbers


def test_number_of_info_numbers_is_bounded():
    assert len(extract_info_numbers({f"n{i}": i for i in range(1000)})) == MAX_INFO_NUMBERS


@pytest.mark.parametrize("history", ["append", "window"])
def test_the_last_value_of_each_trajectory_is_averaged(monkeypatch, history):
    original_step = NumberLineEnv.step
    turns = {}

    def step_with_count(self, action):
        observation, reward, done, info = original_step(self, action)
        turns[id(self)] = turns.get(id(self), 0) + 1
        return observation, reward, done, {**info, "turns": turns[id(self)], "note": "x"}

    def reset(self, task, seed):
        turns[id(self)] = 0
        return original_reset(self, task, seed)

    original_reset = NumberLineEnv.reset
    monkeypatch.setattr(NumberLineEnv, "step", step_with_count)
    monkeypatch.setattr(NumberLineEnv, "reset", reset)
    data = play_episodes(
        "number_line",
        lambda _task: lambda _prompt: "up",
        history=history,
        max_steps=3,
        placement="inline",
    )
    columns = data.non_tensor_batch
    lengths = dict(zip(columns["traj_uid"], columns["episode_lengths"], strict=True))
    mean = sum(lengths.values()) / len(lengths)
    assert compute_env_info_metrics(data) == {"env/turns/mean": pytest.approx(mean)}
    assert compute_validation_metrics(data)["val/env/turns/mean"] == pytest.approx(mean)
    columns["aborted"] = np.ones(len(data), dtype=bool)
    assert compute_env_info_metrics(data) == {}
