"""The registries of estimators and policy losses: entries, refusals and error messages."""

from enum import Enum, IntEnum, StrEnum

import pytest
import torch

from tests.helpers.refusals import mentions, suggestion, suggests
from verl.algos import algorithm_registry as registry
from verl.algos import (
    find_missing_inputs,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)


@pytest.fixture(autouse=True)
def empty_registries(monkeypatch):
    """Replace the registries with empty ones for each test."""
    monkeypatch.setattr(registry, "ADV_ESTIMATORS", {})
    monkeypatch.setattr(registry, "POLICY_LOSSES", {})
    monkeypatch.setattr(registry, "ADVANTAGES_ONLY", set())


def estimator(token_level_rewards, response_mask, scale=2.0):
    """Estimator for these tests."""
    return token_level_rewards * scale, response_mask


def loss(old_log_prob, log_prob, advantages, response_mask):
    """Policy loss for these tests."""
    return old_log_prob, log_prob, advantages, response_mask


def other_loss(old_log_prob, log_prob, advantages, response_mask):
    """Another policy loss for these tests."""
    return log_prob, old_log_prob, advantages, response_mask


def any_arguments(**columns):
    """Estimator that accepts any keyword arguments."""
    return columns["weights"], columns["weights"]


def test_declared_inputs_replace_the_conventional_ones():
    inputs = {"token_level_rewards": "won", "response_mask": "response_mask"}
    register_adv_est("mine", inputs=inputs)(estimator)
    registered = get_adv_estimator_fn("mine")
    assert registered.inputs == inputs
    assert registered.inputs is not inputs
    assert find_missing_inputs(registered, {"response_mask"}) == ["won"]


def test_estimator_keeps_what_it_declares():
    def metrics(advantages, returns):
        return {"sum": (advantages + returns).sum().item()}

    returned = register_adv_est("mine", params={"scale": "algorithm.gamma"}, metrics=metrics)(
        estimator
    )
    registered = get_adv_estimator_fn("mine")
    assert returned is estimator
    assert registered.function is estimator
    assert registered.params == {"scale": "algorithm.gamma"}
    assert registered.metrics is metrics
    assert (registered.__name__, registered.__doc__) == ("estimator", "Estimator for these tests.")
    assert registered(torch.ones(1, 1), torch.ones(1, 1), scale=3.0)[0].item() == 3.0
    register_adv_est("bare")(estimator)
    assert get_adv_estimator_fn("bare").params == {}
    assert get_adv_estimator_fn("bare").metrics is None


def test_one_function_may_be_registered_under_two_names():
    register_adv_est("one", params={"scale": "a.b"})(estimator)
    register_adv_est("two", params={"scale": "c.d"})(estimator)
    assert get_adv_estimator_fn("one").params == {"scale": "a.b"}
    assert get_adv_estimator_fn("two").params == {"scale": "c.d"}


def test_same_function_may_be_registered_again():
    for _ in range(2):
        register_adv_est("mine")(estimator)
        register_policy_loss("mine")(loss)
    with pytest.raises(ValueError, check=mentions("'mine'", "estimator")):
        register_adv_est("mine", inputs={"old_log_prob": "a"})(
            lambda old_log_prob: (old_log_prob, old_log_prob)
        )
    with pytest.raises(ValueError, check=mentions("'mine'", "loss")):
        register_policy_loss("mine")(other_loss)


def test_unfilled_arguments_are_named_with_the_estimator():
    with pytest.raises(ValueError, check=mentions("'mine'", "beta", "gamma")):
        register_adv_est("mine")(lambda index, beta, gamma: (index, beta * gamma))
    with pytest.raises(ValueError, check=mentions("'mine'", "beta", "gamma")):
        register_adv_est("mine", params={"gamma": "x", "beta": "y"})(estimator)
    assert registry.ADV_ESTIMATORS == {}


def test_estimator_with_any_arguments_gets_the_declared_inputs():
    register_adv_est("any", inputs={"weights": "won"}, params={"beta": "x"})(any_arguments)
    assert get_adv_estimator_fn("any").inputs == {"weights": "won"}
    register_adv_est("some")(lambda response_mask, *others: (response_mask, others[0]))
    assert get_adv_estimator_fn("some").inputs == {"response_mask": "response_mask"}


def test_policy_loss_is_registered_unchanged():
    assert register_policy_loss("plain")(loss) is loss
    assert get_policy_loss_fn("plain") is loss
    assert not registry.ADVANTAGES_ONLY
    register_policy_loss("sparse", advantages_only=True)(loss)
    assert sorted(registry.ADVANTAGES_ONLY) == ["sparse"]
    assert set(registry.POLICY_LOSSES) == {"plain", "sparse"}


class Plain(Enum):
    MINE = "mine"


class Text(str, Enum):  # noqa: UP042  enum type in older job code
    MINE = "mine"


class NewText(StrEnum):
    MINE = "mine"


class Number(IntEnum):
    MINE = 7


@pytest.mark.parametrize("member", [Plain.MINE, Text.MINE, NewText.MINE, Number.MINE])
def test_enum_member_is_registered_by_its_value(member):
    register_adv_est(member)(estimator)
    register_policy_loss(member, advantages_only=True)(loss)
    name = str(member.value)
    assert set(registry.ADV_ESTIMATORS) == set(registry.POLICY_LOSSES) == {name}
    assert {name} == registry.ADVANTAGES_ONLY
    assert get_adv_estimator_fn(member).function is get_adv_estimator_fn(name).function is estimator
    assert get_policy_loss_fn(member) is get_policy_loss_fn(name) is loss
    with pytest.raises(ValueError, check=mentions(f"'{name}'")):
        register_adv_est(member)(lambda values: (values, values))


def test_unknown_name_is_refused_with_its_key():
    register_adv_est("mine")(estimator)
    register_policy_loss("plain")(loss)
    with pytest.raises(ValueError, check=suggests("mine", "algorithm.adv_estimator", "'min'")):
        get_adv_estimator_fn("min")
    loss_key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    with pytest.raises(ValueError, check=mentions(loss_key, "'zzz'", "plain")) as caught:
        get_policy_loss_fn("zzz")
    assert suggestion(str(caught.value)) is None


def test_choose_lists_allowed_values_in_order():
    assert registry.choose("b", ("b", "a"), "letter") == "b"
    with pytest.raises(ValueError, check=mentions("letter", "'q'", "a, b")):
        registry.choose("q", ("b", "a"), "letter")
    with pytest.raises(ValueError, check=suggests("token-mean")):
        registry.choose("token-meen", ("token-mean", "token-sum"), "mode")


def test_conventional_arguments_map_to_columns():
    @register_adv_est("all")
    def estimator_of_all_columns(
        token_level_rewards,
        response_mask,
        values,
        reward_baselines,
        index,
        traj_index,
        step_ids,
        step_rewards,
        step_index,
        anchor_obs=None,
    ):
        del response_mask, reward_baselines, index, traj_index
        del step_ids, step_rewards, step_index, anchor_obs
        return token_level_rewards, values

    assert get_adv_estimator_fn("all").inputs == {
        "token_level_rewards": "token_level_rewards",
        "response_mask": "response_mask",
        "values": "values",
        "reward_baselines": "reward_baselines",
        "index": "uid",
        "traj_index": "traj_uid",
        "step_ids": "step_ids",
        "step_rewards": "step_rewards",
        "step_index": "step_index",
        "anchor_obs": "anchor_obs?",
    }
