"""Suggestion of the nearest valid name for a wrong one."""

from verl.config.schema import PPOConfig
from verl.config.settings.hints import did_you_mean, nearest_name
from verl.config.settings.reading import read_section

KNOWN = ["grpo", "gigpo", "rloo"]


def test_nearest_name_is_suggested():
    assert nearest_name("gpro", KNOWN) == "grpo"
    assert nearest_name("gigp", iter(KNOWN)) == "gigpo"


def test_swapped_letters_and_the_first_letter_break_ties():
    assert (
        nearest_name("gpro", ["grpo", "hgpo"]) == nearest_name("gpro", ["hgpo", "grpo"]) == "grpo"
    )
    assert nearest_name("cat", ["car", "hat"]) == nearest_name("cat", ["hat", "car"]) == "car"


def test_distant_name_gives_no_suggestion():
    assert nearest_name("ppo_with_clip", KNOWN) is None
    assert did_you_mean("ppo_with_clip", KNOWN) == ""
    assert did_you_mean("gpro", []) == ""


def test_cutoff_limits_the_distance():
    assert nearest_name("gr", KNOWN, cutoff=0.6) == "grpo"
    assert nearest_name("gr", KNOWN, cutoff=0.9) is None


def test_hint_ends_a_message():
    assert did_you_mean("gpro", KNOWN) == "; did you mean 'grpo'?"


def test_upper_and_lower_case_count_as_equal():
    assert nearest_name("GRPO", KNOWN) == "grpo"
    assert nearest_name("grpo", ["GRPO"]) == "GRPO"


def test_all_keys_of_a_name_without_section_are_suggested():
    (problem,) = read_section(PPOConfig, {"lr": 0.1}).problems.values()
    assert "actor_rollout_ref.actor.optim.lr=0.1 or critic.optim.lr=0.1" in problem
    (problem,) = read_section(PPOConfig, {"total_training_steps": 3}).problems.values()
    assert "trainer.total_training_steps=3" in problem


def test_null_is_written_as_in_an_override():
    (problem,) = read_section(
        PPOConfig, {"trainer": {"total_training_steps": "five"}}
    ).problems.values()
    assert "allowed: int >= 1 or null; fix: trainer.total_training_steps=null" in problem
