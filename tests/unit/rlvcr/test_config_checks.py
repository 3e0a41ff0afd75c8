"""Executed alternatives compare returns of environments: whatever changes or selects these later is
refused, for every key that may.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agent_system.reward_manager.managers import REWARD_MANAGERS
from rlvcr.config_checks import RETURN_PRESERVING_MANAGERS
from verl.config.load import load_config
from verl.config.schema import PPOConfig
from verl.config.settings import keys_of
from verl.config.validate import find_problems
from verl.protocol import DataProto, object_array

KEY = "algorithm.rlvcr.credit"
EXECUTED = ["algorithm.adv_estimator=rlvcr", "env.levels=true"]
ACTOR = "actor_rollout_ref.actor"
# Everything that stands between the return of an environment and an advantage.
SECTIONS = ("algorithm.", "reward_model.", "custom_reward_function.", f"{ACTOR}.use_invalid")
REFUSED = {
    "algorithm.filter_groups.enable": ["algorithm.filter_groups.enable=true"],
    "algorithm.use_kl_in_reward": ["algorithm.use_kl_in_reward=true"],
    "algorithm.success_tolerance": ["algorithm.success_tolerance=2"],
    f"{ACTOR}.use_invalid_action_penalty": [f"{ACTOR}.use_invalid_action_penalty=true"],
    "reward_model.enable": ["reward_model.enable=true", "reward_model.model.path=."],
    "custom_reward_function.path": ["custom_reward_function.path=rewards.py"],
    "reward_model.reward_manager": ["reward_model.reward_manager=mine.py:Mine"],
    "reward_model.reward_kwargs": [
        "+reward_model.reward_kwargs.token_price=0.5",
        "+reward_model.reward_kwargs.token_price_max=100",
    ],
}
# What changes no return of a run that is not refused, with the reason.
KEPT = {
    "algorithm.adv_estimator": "says how returns become advantages",
    "algorithm.gamma": "read by estimators without thinking credit",
    "algorithm.lam": "read by gae",
    "algorithm.norm_adv_by_std_in_grpo": "normalises advantages",
    "algorithm.gigpo": "an estimator without thinking credit",
    "algorithm.graphgpo": "an estimator without thinking credit",
    "algorithm.hgpo": "an estimator without thinking credit",
    "algorithm.gdpo": "an estimator without thinking credit",
    "algorithm.row_weight": "weighs rows in the loss",
    "algorithm.rollout_correction": "weighs tokens by probabilities",
    "algorithm.rlvcr": "its own rules",
    "algorithm.kl_penalty": "read with algorithm.use_kl_in_reward",
    "algorithm.kl_ctrl": "read with algorithm.use_kl_in_reward",
    "algorithm.filter_groups": "read with algorithm.filter_groups.enable",
    "reward_model": "read with reward_model.enable, or refused without it",
    "custom_reward_function": "read with custom_reward_function.path",
}


def problems(*words: str, credit: str = "executed") -> list[str]:
    cfg = load_config("quickstart", [*EXECUTED, f"{KEY}={credit}", *words])
    return [text for text in find_problems(cfg, check_files=False) if text.startswith(f"{KEY}=")]


@pytest.mark.parametrize("key", REFUSED)
def test_what_changes_or_selects_returns_is_refused_and_named(key):
    (found,) = problems(*REFUSED[key])
    assert key in found


@pytest.mark.parametrize(("credit", "refused"), [("corrected", len(REFUSED)), ("scored", 0)])
def test_each_of_them_is_named_where_returns_are_compared(credit, refused):
    words = [word for words in REFUSED.values() for word in words]
    found = problems(*words, "algorithm.rlvcr.combine=success", credit=credit)
    # A reward model and a function are both what scores plays later: the first is named.
    assert len(found) == max(0, refused - 1)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["+reward_model.reward_kwargs.token_price=0.0"],
        ["+reward_model.reward_kwargs.overlong_penalty=2.0"],
        ["reward_model.reward_manager=prime"],
        ["reward_model.reward_manager=step"],
    ],
)
def test_what_changes_no_return_is_accepted(words):
    assert problems(*words) == []


def test_every_key_between_return_and_advantage_is_decided():
    paths = [key.path for key in keys_of(PPOConfig).values() if not key.is_section]
    undecided = [
        path
        for path in paths
        if path.startswith(SECTIONS)
        and path not in REFUSED
        and not any(path == kept or path.startswith((f"{kept}.", f"{kept}_")) for kept in KEPT)
    ]
    assert undecided == []


def test_the_managers_that_pay_the_return_are_those_that_ship():
    shipped = {n for n, m in REWARD_MANAGERS.items() if m.__module__.startswith("agent_system.")}
    assert set(RETURN_PRESERVING_MANAGERS) == shipped


@pytest.mark.parametrize("name", RETURN_PRESERVING_MANAGERS)
def test_a_manager_without_arguments_pays_what_the_environment_does(name):
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    tensors = {
        "responses": mask,
        "response_mask": mask,
        "step_ids": torch.tensor([[0, 0, -1], [-1, 0, 1]]),
    }
    columns = {
        "uid": ["a", "a"],
        "traj_uid": ["a/0", "a/1"],
        "episode_rewards": np.array([0.5, 1.25]),
        "episode_lengths": np.array([1, 2]),
        "step_rewards": object_array([[0.5], [0.25, 1.0]]),
        "step_index": object_array([[0], [0, 1]]),
        "is_action_valid": object_array([[False], [True, False]]),
        "steps": object_array([[SimpleNamespace(step=0)], [SimpleNamespace(step=0)]]),
    }
    data = DataProto.from_dict(tensors, columns)
    assert REWARD_MANAGERS[name](0.0, None)(data).sum(-1).tolist() == [0.5, 1.25]
