"""Tests that every listed name can be resolved, in any case."""

import pytest

from agent_system.environments import env_registry as registry
from agent_system.environments.cli.command import main
from agent_system.environments.cli.names import list_known_variants, list_names, resolve_name
from agent_system.environments.env_registry import UnknownEnvironmentError, read_env_settings
from agent_system.environments.settings import EnvSettings
from tests.helpers.refusals import list_logged, suggests
from verl.config.schema.env import EnvConfig


def test_list_prints_one_name_per_line_with_variants(capsys):
    assert main(["list"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    names = [name for name, *_ in lines]
    assert len(set(names)) == len(names) and set(registry.REGISTRY) <= set(names)
    assert {"textarena/Mastermind", "textworld/cooking", "textworld_express/coin"} <= set(names)
    remarks = {name: remark for name, remark in (line for line in lines if len(line) == 2)}
    assert "env.agent.path" in remarks["agent"] and "data.val_files" in remarks["dataset"]
    assert "constant move" in remarks["textarena/Poker-v0"]


def test_every_listed_name_has_settings():
    for name in list_names():
        if not name.startswith("reasoning_gym/"):
            assert isinstance(read_env_settings(EnvConfig(env_name=name)), EnvSettings), name


def test_library_variant_is_listed_and_sets_its_key():
    pytest.importorskip("reasoning_gym")
    assert "reasoning_gym/chain_sum" in list_names() and len(list_names()) > 100
    settings = read_env_settings(EnvConfig(env_name=resolve_name("Reasoning_Gym/COUNTDOWN")))
    assert settings.model_dump()["task"] == "countdown"


def test_name_resolves_in_any_case_and_typo_gets_a_suggestion():
    assert resolve_name("TextArena/mastermind") == "textarena/Mastermind"
    assert resolve_name("NUMBER_LINE") == "number_line"
    # Job scripts write a variant in the name. It has no effect here, and is kept.
    assert resolve_name("alfworld/AlfredTWEnv") == "alfworld/AlfredTWEnv"
    with pytest.raises(UnknownEnvironmentError, check=suggests("cooking")):
        resolve_name("textworld/cookin")


def test_variants_of_a_missing_library_are_omitted_with_a_warning(monkeypatch, caplog):
    class SettingsWithMissingLibrary(EnvSettings):
        @classmethod
        def variants(cls):
            raise ModuleNotFoundError("No module named 'needed'", name="needed")

    monkeypatch.setattr(
        "tests.helpers.unreliable_envs.SettingsWithMissingLibrary",
        SettingsWithMissingLibrary,
        raising=False,
    )
    entry = registry.RegistryEntry(
        "nowhere:P", settings_import_path="tests.helpers.unreliable_envs:SettingsWithMissingLibrary"
    )
    monkeypatch.setattr(registry, "REGISTRY", {"needy": entry})
    assert list_known_variants("needy") == ()
    assert list_logged(caplog, list_known_variants.__module__, "needy", "'nowhere'")
