"""Executed alternatives compare environment returns. Each key that changes or selects these is
refused.
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
# Keys that are read between the environment's return and the advantage.
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
# Keys that leave the returns of an accepted run unchanged, with the reason.
UNCHANGED = {
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


def list_problems(*overrides: str, credit: str = "executed") -> list[str]:
    cfg = load_config("quickstart", [*EXECUTED, f"{KEY}={credit}", *overrides])
    return [text for text in find_problems(cfg, check_files=False) if text.startswith(f"{KEY}=")]


@pytest.mark.parametrize("key", REFUSED)
def test_key_that_changes_or_selects_returns_is_refused(key):
    (problem,) = list_problems(*REFUSED[key])
    assert key in problem


@pytest.mark.parametrize(("credit", "refused"), [("corrected", len(REFUSED)), ("scored", 0)])
def test_every_refused_key_is_named_where_returns_are_compared(credit, refused):
    overrides = [override for overrides in REFUSED.values() for override in overrides]
    refusals = list_problems(*overrides, "algorithm.rlvcr.combine=success", credit=credit)
    # A reward model and a custom function share one problem, which names the first.
    assert len(refusals) == max(0, refused - 1)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["+reward_model.reward_kwargs.token_price=0.0"],
        ["+reward_model.reward_kwargs.overlong_penalty=2.0"],
        ["reward_model.reward_manager=prime"],
        ["reward_model.reward_manager=step"],
    ],
)
def test_key_that_changes_no_return_is_accepted(overrides):
    assert list_problems(*overrides) == []


def test_every_key_between_return_and_advantage_is_listed():
    paths = [key.path for key in keys_of(PPOConfig).values() if not key.is_section]
    unlisted = [
        path
        for path in paths
        if path.startswith(SECTIONS)
        and path not in REFUSED
        and not any(
            path == unchanged or path.startswith((f"{unchanged}.", f"{unchanged}_"))
            for unchanged in UNCHANGED
        )
    ]
    assert unlisted == []


def test_return_preserving_managers_are_those_of_the_package():
    shipped = {n for n, m in REWARD_MANAGERS.items() if m.__module__.startswith("agent_system.")}
    assert set(RETURN_PRESERVING_MANAGERS) == shipped


@pytest.mark.parametrize("name", RETURN_PRESERVING_MANAGERS)
def test_manager_without_arguments_gives_the_environment_return(name):
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
