"""Every key of actor, critic, optimizer, rollout correction and ``algorithm.rlvcr`` is tested.
Either a test shows that its value changes a trained number to one computed independently, or a
reason is listed."""

import re
from pathlib import Path

import pytest

from rlvcr.settings import RLVCRSettings
from tests.unit.rlvcr import test_credit_by_hand as credit
from tests.unit.verl.trainer.ppo import test_correction_by_hand as correction
from tests.unit.verl.workers import test_update_by_hand as update
from verl.config.load import load_config
from verl.config.schema import PPOConfig
from verl.config.settings import collect_section_keys

ROOT = Path(__file__).parent
ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
CORRECTION, RLVCR = "algorithm.rollout_correction", "algorithm.rlvcr"
SECTIONS = (f"{ACTOR}.", f"{CRITIC}.", f"{CORRECTION}.", f"{RLVCR}.")


def changed_keys(*tables) -> set[str]:
    return {key for table in tables for change in table for key in change}


# Keys that a table of changes compares with a second implementation.
TABLES = {
    ACTOR: changed_keys(update.ACTOR_CHANGES.values()),
    CRITIC: changed_keys(update.CRITIC_CHANGES.values()),
    f"{ACTOR}.optim": changed_keys(update.OPTIM_CHANGES.values()),
    f"{CRITIC}.optim": changed_keys(update.OPTIM_CHANGES.values()),
    CORRECTION: changed_keys(correction.CHANGES),
    RLVCR: changed_keys(change for _, change in credit.CHANGES) | {"thinking_diversity_w"},
}
COMPARED_KEYS = {f"{section}.{key}" for section, keys in TABLES.items() for key in keys}
# Files below this directory, each with its tests of keys that no table compares.
TESTS_BY_FILE: dict[str, dict[str, list[str]]] = {
    "verl/algos/test_weighted_losses.py": {
        "test_weights_multiply_the_loss_of_every_token": [
            f"{ACTOR}.policy_loss.loss_mode",
            f"{ACTOR}.policy_loss.ppo_kl_coef",
            f"{ACTOR}.tau_pos",
            f"{ACTOR}.tau_neg",
        ],
        "test_covariance_keys_decide_which_tokens_are_selected": [
            f"{ACTOR}.policy_loss.clip_cov_ratio",
            f"{ACTOR}.policy_loss.clip_cov_lb",
            f"{ACTOR}.policy_loss.clip_cov_ub",
            f"{ACTOR}.policy_loss.kl_cov_ratio",
        ],
    },
    "verl/workers/test_update_by_hand.py": {
        "test_step_is_skipped_only_without_advantage_on_any_rank": [
            f"{ACTOR}.skip_without_advantage"
        ],
    },
    "verl/workers/test_adapter_sync.py": {
        "test_critic_trains_an_adapter_of_its_own": [
            f"{CRITIC}.model.lora_rank",
            f"{CRITIC}.model.lora_alpha",
            f"{CRITIC}.model.target_modules",
        ],
    },
    "agent_system/reward_manager/test_reward_manager.py": {
        "test_invalid_actions_reduce_the_outcome_of_all_rows": [
            f"{ACTOR}.use_invalid_action_penalty",
            f"{ACTOR}.invalid_action_penalty_coef",
        ],
    },
    "test_trained_keys.py": {
        "test_derived_values_follow_from_other_keys": [
            f"{ACTOR}.clip_ratio",
            f"{CRITIC}.enable",
            f"{RLVCR}.enable",
        ],
    },
    "verl/trainer/ppo/test_ray_trainer.py": {
        "test_bypass_mode_uses_the_engine_log_probs_as_old_ones": [f"{CORRECTION}.bypass_mode"],
    },
    "rlvcr/test_credit_by_hand.py": {
        "test_permuted_credit_comes_from_other_rows": [f"{RLVCR}.permute"],
    },
    "rlvcr/test_scoring.py": {
        "test_posterior_columns_equal_plain_forward_passes": [f"{RLVCR}.credit"],
        "test_shared_thoughts_are_sampled_once_for_equal_prompts": [f"{RLVCR}.share_thoughts"],
    },
    "rlvcr/test_alternatives.py": {
        "test_prompt_holds_the_action_only_if_action_blind_is_false": [f"{RLVCR}.action_blind"],
        "test_mixed_groups_get_alternatives": [f"{RLVCR}.expand"],
        "test_step_fraction_draws_turns": [f"{RLVCR}.step_fraction"],
        "test_thought_is_limited_by_its_setting_and_by_the_turn": [
            f"{RLVCR}.max_alternative_tokens"
        ],
    },
    "rlvcr/test_forced_levels.py": {
        "test_levels_are_drawn_uniformly_and_repeatably": [f"{RLVCR}.epsilon_levels"],
    },
    "rlvcr/test_level_prompts.py": {
        "test_level_text_from_the_command_line_is_in_the_prompt": [f"{RLVCR}.prompts"],
    },
}
TESTED_KEYS = [key for tests in TESTS_BY_FILE.values() for keys in tests.values() for key in keys]
CUTS = "cuts a mini-batch, whose gradient is exact under any cut (test_actor.py, test_two_ranks.py)"
PLACES = (
    "decides where parameters are and when they are sent (test_two_ranks.py, test_resharding.py)"
)
LOADS = "decides which weights the critic starts from"
KEEPS = "decides what is kept on disk"
WATCHES = "read by evaluation, audit or a warning"
UNTESTED_REASONS = {
    rf"{re.escape(ACTOR)}\.ppo_micro_batch_size_per_gpu": CUTS,
    rf"{re.escape(CRITIC)}\.(ppo|forward)_micro_batch_size_per_gpu": CUTS,
    r".*\.use_dynamic_bsz": CUTS,
    r".*\.(ppo|forward)_max_token_len_per_gpu": CUTS,
    r".*\.ulysses_sequence_parallel_size": "exact: test_sequence_parallel.py",
    r".*\.(strategy|fsdp_config\..*)": PLACES,
    r".*\.dtype": "rounds: test_engine.py::test_bfloat16_compute_keeps_float32_masters",
    r".*\.prefix_tree": "exact: test_prefix_tree.py",
    r".*\.use_torch_compile": "exact up to rounding: test_compiling.py",
    r".*\.checkpoint\.contents": KEEPS,
    r"critic\.model\.(path|trust_remote_code|override_config|external_lib|tokenizer_path)": LOADS,
    r"critic\.model\.(enable_gradient_checkpointing|attn_implementation|use_remove_padding)": (
        "computes the same with less memory or time (test_engine.py)"
    ),
    rf"{re.escape(RLVCR)}\.(eval_levels|audit_\w+|collapse_patience)": WATCHES,
}


def trained_keys() -> list[str]:
    of_schema = [key.path for key in collect_section_keys(PPOConfig).values() if not key.is_section]
    of_method = [f"{RLVCR}.{key.path}" for key in collect_section_keys(RLVCRSettings).values()]
    return [path for path in (*of_schema, *of_method) if path.startswith(SECTIONS)]


def test_every_key_is_tested_once_or_has_a_reason():
    missing, twice = [], []
    for key in trained_keys():
        reasons = [pattern for pattern in UNTESTED_REASONS if re.fullmatch(pattern, key)]
        covered = (key in COMPARED_KEYS) + (key in TESTED_KEYS) + len(reasons)
        if not covered:
            missing.append(key)
        elif covered > 1:
            twice.append(key)
    assert missing == [] and twice == []


def test_tables_name_only_existing_keys():
    # ``row_weight`` decides what counts as a sequence, and is declared in another section.
    keys = {*trained_keys(), f"{CORRECTION}.row_weight"}
    assert {*COMPARED_KEYS, *TESTED_KEYS} <= keys
    for pattern in UNTESTED_REASONS:
        assert any(re.fullmatch(pattern, key) for key in keys), pattern


@pytest.mark.parametrize("path", TESTS_BY_FILE)
def test_listed_tests_exist(path):
    text = (ROOT / path).read_text()
    for name in TESTS_BY_FILE[path]:
        assert f"def {name}(" in text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [f"{ACTOR}.clip_ratio=0.35"],
            {f"{ACTOR}.clip_ratio_low": 0.35, f"{ACTOR}.clip_ratio_high": 0.35},
        ),
        (
            [f"{ACTOR}.clip_ratio=0.35", f"{ACTOR}.clip_ratio_high=0.5"],
            {f"{ACTOR}.clip_ratio_low": 0.35, f"{ACTOR}.clip_ratio_high": 0.5},
        ),
        (
            ["data.max_response_length=77", "data.train_batch_size=12"],
            {f"{ACTOR}.loss_scale_factor": 77, "critic.loss_scale_factor": 77},
        ),
        (
            ["data.train_batch_size=12", f"{ACTOR}.ppo_mini_batch_size=3", f"{ACTOR}.ppo_epochs=4"],
            {
                f"{ACTOR}.ppo_mini_batches": 4,
                "critic.ppo_mini_batches": 4,
                "critic.ppo_epochs": 4,
            },
        ),
        (["algorithm.adv_estimator=gae"], {"critic.enable": True, f"{RLVCR}.enable": False}),
        (["algorithm.adv_estimator=rlvcr"], {"critic.enable": False, f"{RLVCR}.enable": True}),
        (
            [f"{CORRECTION}.rollout_is_threshold=1.6"],
            {
                f"{CORRECTION}.rollout_rs_threshold": 1.6,
                f"{CORRECTION}.rollout_rs_threshold_lower": 1 / 1.6,
            },
        ),
    ],
)
def test_derived_values_follow_from_other_keys(overrides, expected):
    config = load_config("ppo_trainer", overrides)
    for path, value in expected.items():
        actual = config
        for name in path.split("."):
            actual = getattr(actual, name)
        assert actual == value, path
