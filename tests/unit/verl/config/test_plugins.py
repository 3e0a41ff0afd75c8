"""Keys that packages add to sections of the schema, without the schema naming them."""

import re
from pathlib import Path

import pytest

import verl
from tests.helpers.refusals import has_problem
from verl.config.load import find_keys_without_effect
from verl.config.plugins import collect_all_keys
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError
from verl.trainer.launch.extensions import load_config

PACKAGE = Path(verl.__file__).parent
# Concepts of the method, and the environment of the default config. The name rlvcr is not listed:
# it is also the name of the project.
FOREIGN = re.compile(r"\.levels\b|\bthinking|\bthoughts\b|alfworld", re.IGNORECASE)


def test_plugin_key_has_a_default_and_can_be_set():
    assert load_config(overrides=["algorithm.adv_estimator=grpo"]).env.levels is False
    assert load_config(overrides=["algorithm.adv_estimator=rlvcr"]).env.levels is True
    explicit = load_config(overrides=["algorithm.adv_estimator=grpo", "env.levels=true"])
    assert explicit.env.levels is True


def test_demonstrations_with_levels_set_env_levels():
    assert load_config("sft_trainer", [], SFTConfig).env.levels is True
    assert load_config("sft_trainer", ["data.levels=[]"], SFTConfig).env.levels is False


@pytest.mark.parametrize(
    ("override", "check"),
    [
        ("env.levels=7", has_problem("wrong_type", "env.levels", "bool or null")),
        ("env.lvels=true", has_problem("unknown_key", "env.lvels", "env.levels=True")),
    ],
)
def test_wrong_plugin_key_is_refused(override, check):
    with pytest.raises(ConfigError, check=check):
        load_config(overrides=[override])


def test_plugin_key_exists_only_in_its_section():
    assert "data.levels" in collect_all_keys(SFTConfig)
    assert "data.levels" not in collect_all_keys(PPOConfig)
    with pytest.raises(ConfigError, check=has_problem("unknown_key", "data.levels")):
        load_config(overrides=["data.levels=[1]"])


def test_help_text_of_a_section_has_no_full_stop():
    # Pages and messages add the full stop.
    sections = [key for key in collect_all_keys(PPOConfig).values() if key.is_section]
    assert any(key.path == "env.sokoban" for key in sections)
    assert [key.path for key in sections if key.help_text.endswith(".")] == []


def test_plugin_key_that_is_set_counts_as_having_effect():
    assert find_keys_without_effect(load_config(overrides=["env.levels=true"]), "cpu") == {}


def test_framework_names_neither_the_method_nor_an_environment():
    named = []
    for path in sorted(PACKAGE.rglob("*.py")):
        # The composition root may name both. Columns and message keys of other tools are no names
        # of the method.
        if "launch" in path.parts or path.name in ("message_rows.py", "chat_template.py"):
            continue
        if FOREIGN.search(path.read_text()):
            named.append(str(path.relative_to(PACKAGE)))
    assert named == []
