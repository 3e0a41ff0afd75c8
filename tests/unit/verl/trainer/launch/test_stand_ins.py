"""The environment in use is the configured one, or plan, log and report name the stand-in."""

import html
import json

import pytest

from verl.config.plan import PlanFacts, make_plan
from verl.config.plugins import describe_stand_in
from verl.record.report.page import render_report
from verl.record.report.run_data import load_run
from verl.record.run_dir import RunDirectory
from verl.trainer.launch.extensions import load_config, read_config

PATH = "actor_rollout_ref.model.path=org/policy"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["env.env_name=Webshop"], "WebShop"),
        (["env.env_name=webshop", "env.webshop.products=100"], "100 generated products"),
        (["env.env_name=shop"], ""),
        (["env.env_name=alfworld/AlfredTWEnv"], "no games in ALFWORLD_DATA"),
        (["env.env_name=alfworld"], "no games in ALFWORLD_DATA"),
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
def test_stand_in_is_named(overrides, expected, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    cfg = load_config("ppo_trainer", [PATH, *overrides])
    text = make_plan(cfg, PlanFacts(cores=1)).format_text()
    assert expected in describe_stand_in(cfg) and bool(expected) == bool(
        describe_stand_in(cfg)
    ) == ("stand-in" in text)


def test_official_games_are_no_stand_in(monkeypatch, tmp_path):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    cfg = load_config("ppo_trainer", [PATH, "env.env_name=alfworld/AlfredTWEnv"])
    assert "ALFWORLD_DATA" in describe_stand_in(cfg)
    (tmp_path / "json_2.1.1" / "train").mkdir(parents=True)
    assert not describe_stand_in(cfg)


def test_run_stores_the_stand_in_in_facts_and_report(tmp_path):
    cfg = load_config("ppo_trainer", [PATH, "env.env_name=webshop"])
    with RunDirectory(tmp_path).open(cfg, {}, describe_stand_in(cfg)):
        facts = json.loads((tmp_path / "env.json").read_text())
    assert "WebShop" in facts["stand_in"]
    page = html.unescape(render_report(load_run(tmp_path)))
    assert facts["stand_in"] in page


@pytest.mark.parametrize(
    ("overrides", "refused"),
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
def test_section_of_another_environment_is_refused(overrides, refused):
    unused = read_config("ppo_trainer", [PATH, *overrides]).unused_keys
    assert [problem.partition("=")[0] for problem in unused] == refused
    if "my_alf" in overrides[0]:
        assert "env.kwargs.train_games=" in unused[0]


def test_unused_section_is_refused_in_user_files_only(tmp_path):
    assert not read_config("quickstart", ["env.env_name=number_line"]).unused_keys
    text = "defaults: [ppo_trainer, _self_]\nenv: {env_name: number_line, sokoban: {mode: text}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    (problem,) = read_config("mine", config_path=str(tmp_path)).unused_keys
    assert problem.startswith("env.sokoban.mode='text'")
    # A run directory stores the composed config, so unused sections are accepted there.
    (tmp_path / "config.yaml").write_text(text)
    (tmp_path / "env.json").write_text("{}")
    assert not read_config("config", config_path=str(tmp_path)).unused_keys
