"""A discount that the estimator does not read is named in the warning about such keys."""

import pytest

import rlvcr.core_rlvcr  # noqa: F401  registers rlvcr, copo and level_groups
from verl.algos import ADV_ESTIMATORS
from verl.config.load import find_keys_without_effect, load_config
from verl.names import AdvantageEstimator


def is_named(key: str, estimator: str, value: float) -> bool:
    overrides = [f"algorithm.adv_estimator={estimator}", f"{key}={value}"]
    return key in find_keys_without_effect(load_config("ppo_trainer", overrides), "cuda")


@pytest.mark.parametrize("key", ["algorithm.gamma", "algorithm.lam"])
def test_discount_that_the_estimator_does_not_read_is_named(key):
    for name in AdvantageEstimator:
        is_read = key in ADV_ESTIMATORS[name].params.values()
        assert is_named(key, name, 0.9) != is_read, name
    assert not is_named(key, "grpo", 1.0)
    assert not is_named(key, "mine", 0.9), "an estimator of the user may read it"
