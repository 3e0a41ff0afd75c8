"""Keys that packages add to sections of the schema, and that the schema itself knows nothing of."""

import re
from pathlib import Path

import pytest

import verl
from verl.config.load import keys_without_effect
from verl.config.plugins import schema_keys
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError
from verl.trainer.launch.extensions import load_config

PACKAGE = Path(verl.__file__).parent
# The method's concepts, and the environment of the default config. The word rlvcr is missing: it is
# also the name of the project.
FOREIGN = re.compile(r"\.levels\b|\bthinking|\bthoughts\b|alfworld", re.IGNORECASE)


def test_a_plugged_key_has_its_default_and_can_be_set():
    assert load_config(overrides=["algorithm.adv_estimator=grpo"]).env.levels is False
    assert load_config(overrides=["algorithm.adv_estimator=rlvcr"]).env.levels is True
    asked = load_config(overrides=["algorithm.adv_estimator=grpo", "env.levels=true"])
    assert asked.env.levels is True


def test_demonstrations_with_levels_are_of_episodes_that_ask_for_them():
    assert load_config("sft_trainer", [], SFTConfig).env.levels is True
    assert load_config("sft_trainer", ["data.levels=[]"], SFTConfig).env.levels is False


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("env.levels=7", "env.levels=7: wrong type; allowed: bool | None"),
        ("env.lvels=true", "did you mean env.levels?"),
    ],
)
def test_a_wrong_plugged_key_is_refused(word, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(overrides=[word])


def test_a_plugged_key_stands_only_where_the_section_is_open():
    assert "data.levels" in schema_keys(SFTConfig)
    assert "data.levels" not in schema_keys(PPOConfig)
    with pytest.raises(ConfigError, match=re.escape("data.levels=[1]: unknown key")):
        load_config(overrides=["data.levels=[1]"])


def test_a_plugged_key_that_is_set_is_not_taken_for_one_without_effect():
    assert keys_without_effect(load_config(overrides=["env.levels=true"]), "cpu") == {}


def test_the_framework_names_neither_the_method_nor_an_environment():
    named = []
    for path in sorted(PACKAGE.rglob("*.py")):
        # The composition root joins them.
        if "launch" in path.parts or path.name == "message_rows.py":  # columns of other tools
            continue
        if FOREIGN.search(path.read_text()):
            named.append(str(path.relative_to(PACKAGE)))
    assert named == []
