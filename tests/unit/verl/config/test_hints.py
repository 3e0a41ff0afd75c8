"""Suggestion of the nearest valid name for a wrong one."""

from verl.config.settings.hints import did_you_mean, nearest_name

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
