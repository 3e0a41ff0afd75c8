"""The nearest right name for a wrong one."""

from verl.config.settings.hints import did_you_mean, nearest_name

KNOWN = ["grpo", "gigpo", "rloo"]


def test_the_nearest_name():
    assert nearest_name("gpro", KNOWN) == "grpo"
    assert nearest_name("gigp", iter(KNOWN)) == "gigpo"


def test_of_two_as_near_letters_in_another_order_and_the_first_letter_decide():
    assert (
        nearest_name("gpro", ["grpo", "hgpo"]) == nearest_name("gpro", ["hgpo", "grpo"]) == "grpo"
    )
    assert nearest_name("cat", ["car", "hat"]) == nearest_name("cat", ["hat", "car"]) == "car"


def test_nothing_near_is_nothing_said():
    assert nearest_name("ppo_with_clip", KNOWN) is None
    assert did_you_mean("ppo_with_clip", KNOWN) == ""
    assert did_you_mean("gpro", []) == ""


def test_the_cutoff_says_how_near():
    assert nearest_name("gr", KNOWN, cutoff=0.6) == "grpo"
    assert nearest_name("gr", KNOWN, cutoff=0.9) is None
    assert did_you_mean("gr", KNOWN, cutoff=0.9) == ""


def test_the_hint_is_the_end_of_a_message():
    assert did_you_mean("gpro", KNOWN) == "; did you mean 'grpo'?"
