"""Tests of rollout correction on a tiny policy, from the log-probs to the update."""

import pytest
import torch

from tests.helpers.policy_rows import actor_of, random_rows
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.load import default_config
from verl.records import CORRECTION_WEIGHTS
from verl.trainer.ppo.credit import apply_rollout_correction
from verl.workers.engine_state import gather_full_weights


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1, std=0.5)


def make_rows(policy, engine_dtype):
    """Return rows with float32 log-probs of the trainer and log-probs of an engine of
    ``engine_dtype``.
    """
    data = random_rows()
    data.batch["old_log_probs"] = actor_of(policy).compute_log_prob(data).batch["old_log_probs"]
    engine = actor_of(policy, dtype=engine_dtype)
    data.batch["rollout_log_probs"] = engine.compute_log_prob(data).batch["old_log_probs"]
    return data


def update(policy, data):
    """Return the weights after an update, and its metrics."""
    worker = actor_of(policy, ppo_epochs=2)
    metrics = worker.update_actor(data).meta_info["metrics"]
    return gather_full_weights(worker.train_engine), {
        k: v for k, v in metrics.items() if k.startswith("actor/")
    }


def make_config(**correction):
    config = default_config()
    for name, value in correction.items():
        setattr(config.algorithm.rollout_correction, name, value)
    return config


def test_equal_engine_changes_no_number(policy):
    data = make_rows(policy, "float32")
    plain, plain_metrics = update(policy, data)
    measured = apply_rollout_correction(data, make_config(rollout_rs="geometric"))
    sampled = data.batch["response_mask"].bool()
    assert (data.batch[CORRECTION_WEIGHTS][sampled] == 1.0).all()
    assert measured["rollout_corr/rollout_is_eff_sample_size"] == 1.0
    assert measured["rollout_corr/kl"] == 0.0
    corrected, metrics = update(policy, data)
    assert metrics == plain_metrics
    assert all(torch.equal(corrected[name], plain[name]) for name in plain)


def test_bfloat16_engine_gets_bounded_weights(policy):
    data = make_rows(policy, "bfloat16")
    plain, _ = update(policy, data)
    largest = 1.002
    measured = apply_rollout_correction(data, make_config(rollout_is_threshold=largest))
    sampled = data.batch["response_mask"].bool()
    weights = data.batch[CORRECTION_WEIGHTS][sampled]
    assert (weights != 1.0).any()
    assert 0.5 < weights.min() < 1.0 < weights.max() <= largest + 1e-6
    assert 0 < measured["rollout_corr/rollout_is_ratio_fraction_high"] < 1
    assert measured["rollout_corr/k3_kl"] > 0
    assert 0.5 < measured["rollout_corr/rollout_is_eff_sample_size"] < 1
    corrected, _ = update(policy, data)
    assert any(not torch.equal(corrected[name], plain[name]) for name in plain)


def test_correction_weights_scale_the_loss_of_each_token(policy):
    """Weights of 0 and 2 equal advantages times 0 and 2."""
    data = make_rows(policy, "float32")
    weights = 2.0 * (torch.arange(data.batch["advantages"].shape[1]) % 2)
    data.batch[CORRECTION_WEIGHTS] = weights.expand(data.batch["advantages"].shape).clone()
    actual, metrics = update(policy, data)
    weights = data.batch.pop(CORRECTION_WEIGHTS)
    data.batch["advantages"] = data.batch["advantages"] * weights
    expected, expected_metrics = update(policy, data)
    assert metrics == expected_metrics
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


def test_row_weight_defines_the_corrected_sequence(policy):
    data = make_rows(policy, "float32")
    data.batch["rollout_log_probs"] = data.batch["old_log_probs"].clone()
    data.batch["rollout_log_probs"][0, 0] -= 0.5  # rows 0 and 1 are one trajectory
    data.batch["rollout_log_probs"][1, 0] += 0.25
    log_weights = {}
    for unit in ("row", "trajectory"):
        config = make_config(rollout_is="sequence", rollout_is_threshold=9.0)
        config.algorithm.row_weight = unit
        apply_rollout_correction(data, config)
        log_weights[unit] = data.batch[CORRECTION_WEIGHTS][:3, 0].log().tolist()
    assert log_weights["row"] == pytest.approx([0.5, -0.25, 0.0], abs=1e-5)
    assert log_weights["trajectory"] == pytest.approx([0.25, 0.25, 0.0], abs=1e-5)


def test_mismatch_is_measured_without_weights(policy):
    data = make_rows(policy, "bfloat16")
    measured = apply_rollout_correction(data, make_config(rollout_is=None))
    assert set(measured) == {f"rollout_corr/{name}" for name in ("kl", "k3_kl", "ppl_ratio")}
    assert CORRECTION_WEIGHTS not in data.tensor_keys()
