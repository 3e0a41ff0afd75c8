"""Tests of the measures of the code."""

from scripts.dev.measure_code import MAX_LOADED_MODULES, PPO_RUN_MODULE, count_loaded_modules


def test_loaded_modules_are_those_of_this_repository():
    # This module imports only the standard library. Its package is loaded too.
    assert count_loaded_modules("rlvcr.token_bytes") == 2


def test_ppo_run_loads_few_modules():
    assert count_loaded_modules(PPO_RUN_MODULE) <= MAX_LOADED_MODULES
