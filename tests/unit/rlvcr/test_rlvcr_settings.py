"""The defaults of the method's keys and of the functions that read them agree."""

import inspect

import pytest

from rlvcr.core_rlvcr import compute_rlvcr_outcome_advantage
from rlvcr.levels import LEVELS
from rlvcr.settings import RLVCRDataConfig, RLVCRSettings
from rlvcr.thinking import compute_reweight_factors, compute_thinking_advantage


@pytest.mark.parametrize(
    ("function", "keys"),
    [
        (
            compute_thinking_advantage,
            {"mode", "cost_coef", "cost_max", "std_floor", "alternatives"},
        ),
        (compute_reweight_factors, {"cost_coef", "cost_max", "spread_floor"}),
        (compute_rlvcr_outcome_advantage, {"step_advantage_w", "mode", "combine", "price_in"}),
    ],
)
def test_function_defaults_equal_the_key_defaults(function, keys):
    parameters = inspect.signature(function).parameters
    settings = RLVCRSettings()
    assert {key: parameters[key].default for key in keys} == {
        key: getattr(settings, key) for key in keys
    }


def test_defaults_score_every_turn_and_force_no_level():
    settings = RLVCRSettings()
    assert (settings.expand, settings.step_fraction, settings.epsilon_levels) == ("all", 1.0, 0.0)
    assert (settings.action_blind, settings.permute, settings.level_bonus_w) == (True, False, 0.0)
    assert not settings.credit_end
    assert settings.credit == "scored"
    assert (settings.audit_tasks, settings.audit_points, settings.audit_plays) == (64, 100, 8)
    assert settings.collapse_patience == 10
    assert (settings.score, settings.prompts) == ("entropy", {})


def test_demonstrations_show_every_level():
    keys = RLVCRDataConfig()
    assert (keys.levels, keys.needed_level_share) == (list(LEVELS), 0.0)
