"""What is played is what the configuration names, or the plan, the log and the report say so."""

import json

import pytest

from verl.config.plan import make_plan
from verl.config.plugins import describe_stand_in
from verl.record.report.page import render_report
from verl.record.report.run_data import load_run
from verl.record.run_dir import RunDirectory
from verl.trainer.launch.extensions import load_config, read_config

PATH = "actor_rollout_ref.model.path=org/policy"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["env.env_name=Webshop"], "WebShop"),
        (["env.env_name=webshop", "env.webshop.products=100"], "100 generated products"),
        (["env.env_name=shop"], ""),
        (["env.env_name=alfworld/AlfredTWEnv"], "no ALFWORLD_DATA"),
        (["env.env_name=alfworld"], "no ALFWORLD_DATA"),
        (["env.env_name=alfworld", "env.alfworld.source=generated"], ""),
        (
            ["env.env_name=alfworld/AlfredTWEnv", "env.alfworld.source=generated"],
            "ALFWorld's games",
        ),
        (["env.env_name=alfworld/AlfredTWEnv", "env.alfworld.source=official"], ""),
        (["env.env_name=mixture", "env.mixture.parts=[webshop,relay]"], "WebShop"),
        (["env.env_name=number_line"], ""),
        (["env.env_name='no.such.place:PACKAGE'"], ""),
    ],
)
def test_a_stand_in_is_named(words, said, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    cfg = load_config("ppo_trainer", [PATH, *words])
    text = make_plan(cfg, {"cores": 1}).format_text()
    assert said in describe_stand_in(cfg) and bool(said) == bool(describe_stand_in(cfg)) == (
        "stand-in" in text
    )


def test_official_games_are_no_stand_in(monkeypatch, tmp_path):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    assert not describe_stand_in(
        load_config("ppo_trainer", [PATH, "env.env_name=alfworld/AlfredTWEnv"])
    )


def test_a_run_keeps_what_was_played_in_its_facts_and_report(tmp_path):
    cfg = load_config("ppo_trainer", [PATH, "env.env_name=webshop"])
    with RunDirectory(tmp_path).open(cfg, {}, describe_stand_in(cfg)):
        facts = json.loads((tmp_path / "env.json").read_text())
    assert "WebShop" in facts["stand_in"]
    assert "400 generated products" in render_report(load_run(tmp_path))


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["env.env_name=frozen_lake", "env.sokoban.mode=text"], ["env.sokoban.mode"]),
        (["env.env_name=frozen_lake", "env.sokoban={mode: text}"], ["env.sokoban"]),
        (["env.env_name=webshop", "env.shop.products=100"], ["env.shop.products"]),
        (
            ["env.env_name='my_alf:PACKAGE'", "env.alfworld.train_games=64"],
            ["env.alfworld.train_games"],
        ),
        (
            ["data.train_files=[a.jsonl]", "env.alfworld.train_games=64"],
            ["env.alfworld.train_games"],
        ),
        (["env.alfworld.train_games=64"], []),
        (["env.env_name=AlfWorld/AlfredTWEnv", "env.alfworld.train_games=64"], []),
        (["env.env_name=mixture", "env.frozen_lake.size=5"], []),
        (["env.env_name=mixture", "env.mixture.parts=[relay]", "env.relay.doors=3"], []),
        (["env.env_name=mixture", "env.sokoban.mode=text"], ["env.sokoban.mode"]),
    ],
)
def test_a_section_of_another_environment_is_refused(words, refused):
    found = read_config("ppo_trainer", [PATH, *words]).unused_keys
    assert [problem.partition("=")[0] for problem in found] == refused
    if "my_alf" in words[0]:
        assert "env.kwargs.train_games=" in found[0]


def test_so_is_one_in_a_file_of_the_callers_but_not_in_one_that_ships(tmp_path):
    assert not read_config("quickstart", ["env.env_name=number_line"]).unused_keys
    text = "defaults: [ppo_trainer, _self_]\nenv: {env_name: number_line, sokoban: {mode: text}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    (found,) = read_config("mine", config_path=str(tmp_path)).unused_keys
    assert found.startswith("env.sokoban.mode='text'")
    # A run has stored what its start was composed of.
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "env.json").write_text("{}")
    assert not read_config("config", config_path=str(tmp_path)).unused_keys
