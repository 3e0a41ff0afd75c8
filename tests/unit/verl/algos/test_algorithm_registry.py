"""The two registries: what is kept, what is refused, what an error says."""

from enum import Enum, IntEnum, StrEnum

import pytest
import torch

from tests.helpers.refusals import mentions, suggests
from verl.algos import algorithm_registry as registry
from verl.algos import (
    find_missing_inputs,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    """Registries of this test alone."""
    monkeypatch.setattr(registry, "ADV_ESTIMATORS", {})
    monkeypatch.setattr(registry, "POLICY_LOSSES", {})
    monkeypatch.setattr(registry, "ADVANTAGES_ONLY", set())


def estimator(token_level_rewards, response_mask, scale=2.0):
    """An estimator of tests."""
    return token_level_rewards * scale, response_mask


def loss(old_log_prob, log_prob, advantages, response_mask):
    """A policy loss of tests."""
    return old_log_prob, log_prob, advantages, response_mask


def other_loss(old_log_prob, log_prob, advantages, response_mask):
    """Another policy loss of tests."""
    return log_prob, old_log_prob, advantages, response_mask


def any_arguments(**given):
    """An estimator that takes whatever it is given."""
    return given["weights"], given["weights"]


def test_declared_inputs_replace_the_conventional_ones():
    inputs = {"token_level_rewards": "won", "response_mask": "response_mask"}
    register_adv_est("mine", inputs=inputs)(estimator)
    found = get_adv_estimator_fn("mine")
    assert found.inputs == inputs
    assert found.inputs is not inputs
    assert find_missing_inputs(found, {"response_mask"}) == ["won"]


def test_an_estimator_keeps_what_it_declares():
    def metrics(advantages, returns):
        return {"found": (advantages + returns).sum().item()}

    returned = register_adv_est("mine", params={"scale": "algorithm.gamma"}, metrics=metrics)(
        estimator
    )
    found = get_adv_estimator_fn("mine")
    assert returned is estimator
    assert found.function is estimator
    assert found.params == {"scale": "algorithm.gamma"}
    assert found.metrics is metrics
    assert (found.__name__, found.__doc__) == ("estimator", "An estimator of tests.")
    assert found(torch.ones(1, 1), torch.ones(1, 1), scale=3.0)[0].item() == 3.0
    register_adv_est("bare")(estimator)
    assert get_adv_estimator_fn("bare").params == {}
    assert get_adv_estimator_fn("bare").metrics is None


def test_one_function_may_have_two_names():
    register_adv_est("one", params={"scale": "a.b"})(estimator)
    register_adv_est("two", params={"scale": "c.d"})(estimator)
    assert get_adv_estimator_fn("one").params == {"scale": "a.b"}
    assert get_adv_estimator_fn("two").params == {"scale": "c.d"}


def test_the_same_function_may_be_registered_again():
    for _ in range(2):
        register_adv_est("mine")(estimator)
        register_policy_loss("mine")(loss)
    with pytest.raises(ValueError, check=mentions("'mine'", "estimator")):
        register_adv_est("mine", inputs={"old_log_prob": "a"})(
            lambda old_log_prob: (old_log_prob, old_log_prob)
        )
    with pytest.raises(ValueError, check=mentions("'mine'", "loss")):
        register_policy_loss("mine")(other_loss)


def test_what_nothing_fills_is_named_with_the_estimator():
    with pytest.raises(ValueError, check=mentions("'mine'", "beta", "gamma")):
        register_adv_est("mine")(lambda index, beta, gamma: (index, beta * gamma))
    with pytest.raises(ValueError, check=mentions("'mine'", "beta", "gamma")):
        register_adv_est("mine", params={"gamma": "x", "beta": "y"})(estimator)
    assert registry.ADV_ESTIMATORS == {}


def test_an_estimator_of_any_arguments_takes_what_is_declared():
    register_adv_est("any", inputs={"weights": "won"}, params={"beta": "x"})(any_arguments)
    assert get_adv_estimator_fn("any").inputs == {"weights": "won"}
    register_adv_est("some")(lambda response_mask, *others: (response_mask, others[0]))
    assert get_adv_estimator_fn("some").inputs == {"response_mask": "response_mask"}


def test_a_policy_loss_is_kept_as_it_is():
    assert register_policy_loss("plain")(loss) is loss
    assert get_policy_loss_fn("plain") is loss
    assert not registry.ADVANTAGES_ONLY
    register_policy_loss("sparse", advantages_only=True)(loss)
    assert sorted(registry.ADVANTAGES_ONLY) == ["sparse"]
    assert set(registry.POLICY_LOSSES) == {"plain", "sparse"}


class Plain(Enum):
    MINE = "mine"


class Text(str, Enum):  # noqa: UP042  what older job code writes
    MINE = "mine"


class NewText(StrEnum):
    MINE = "mine"


class Number(IntEnum):
    MINE = 7


@pytest.mark.parametrize("member", [Plain.MINE, Text.MINE, NewText.MINE, Number.MINE])
def test_a_member_of_any_enum_stands_for_its_value(member):
    register_adv_est(member)(estimator)
    register_policy_loss(member, advantages_only=True)(loss)
    name = str(member.value)
    assert set(registry.ADV_ESTIMATORS) == set(registry.POLICY_LOSSES) == {name}
    assert {name} == registry.ADVANTAGES_ONLY
    assert get_adv_estimator_fn(member).function is get_adv_estimator_fn(name).function is estimator
    assert get_policy_loss_fn(member) is get_policy_loss_fn(name) is loss
    with pytest.raises(ValueError, match=f"advantage estimator '{name}' is already registered"):
        register_adv_est(member)(lambda values: (values, values))


def test_an_unknown_name_is_told_with_its_key():
    register_adv_est("mine")(estimator)
    register_policy_loss("plain")(loss)
    with pytest.raises(ValueError) as caught:
        get_adv_estimator_fn("min")
    assert str(caught.value) == (
        "unknown advantage estimator (algorithm.adv_estimator) 'min': allowed are mine"
        "; did you mean 'mine'?"
    )
    with pytest.raises(ValueError) as caught:
        get_policy_loss_fn("zzz")
    assert str(caught.value) == (
        "unknown policy loss (actor_rollout_ref.actor.policy_loss.loss_mode) 'zzz': "
        "allowed are plain"
    )


def test_choose_lists_what_is_allowed_in_order():
    assert registry.choose("b", ("b", "a"), "letter") == "b"
    with pytest.raises(ValueError, check=mentions("letter", "'q'", "a, b")):
        registry.choose("q", ("b", "a"), "letter")
    with pytest.raises(ValueError, check=suggests("token-mean")):
        registry.choose("token-meen", ("token-mean", "token-sum"), "mode")


def test_conventional_names_and_where_they_are_found():
    @register_adv_est("all")
    def everything(
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
