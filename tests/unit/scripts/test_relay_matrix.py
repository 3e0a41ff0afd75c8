"""The matrix of the relay: what is counted for policies whose play is known."""

import json
import math
from collections.abc import Sequence

import pytest

from agent_system.environments.env_package.relay.doors import Door, needed_level
from agent_system.environments.env_package.relay.package import PACKAGE
from agent_system.environments.env_package.relay.settings import RelaySettings
from rlvcr.level_metrics import mutual_information
from rlvcr.levels import LEVELS
from scripts import relay_matrix
from scripts.relay_matrix import Step, main, measure
from verl.trainer.config.schema import SFTConfig
from verl.trainer.launch.extensions import load_config
from verl.trainer.launch.sft import starting_policy


class KnowingPlayer:
    """Is right exactly where the level suffices, and chooses the needed one."""

    def __init__(self, doors: int) -> None:
        settings = PACKAGE.read({"doors": doors, "val_tasks": 60})
        assert isinstance(settings, RelaySettings)
        self.settings = settings

    def play(self, doors: Sequence[str], level: int | None) -> list[Step]:
        hops = self.settings.hops
        asked = [Door.read(door).hops for door in doors]
        levels = [level or needed_level(arrows, hops) for arrows in asked]
        return [
            Step(arrows, chosen, chosen >= needed_level(arrows, hops), 8 + hops[chosen - 1])
            for arrows, chosen in zip(asked, levels, strict=True)
        ]


def test_a_policy_that_knows_what_it_needs_is_the_oracle():
    player = KnowingPlayer(doors=8)
    tasks = PACKAGE.tasks(player.settings, "val")
    found = measure(player, tasks)
    assert found["accuracy"] == [
        [float(level >= needed_level(arrows, player.settings.hops)) for level in LEVELS]
        for arrows in range(8)
    ]
    assert found["tokens_by_level"] == [8, 10, 12, 15]
    free, oracle = found["free"], found["oracle"]
    assert free["success"] == oracle["success"] == 1.0
    assert free["tokens_per_step"] == pytest.approx(oracle["tokens"] / oracle["steps"])
    assert free["level_information"] == pytest.approx(math.log(4), abs=0.02)


def test_an_episode_counts_as_won_where_all_of_its_doors_were_right(monkeypatch):
    player = KnowingPlayer(doors=2)
    # The first door of every other episode is wrong.
    play = player.play

    def clumsy(doors, level):
        steps = play(doors, level)
        if level is None:
            for start in range(0, len(steps), 4):
                steps[start] = Step(steps[start].arrows, 1, False, 8)
        return steps

    monkeypatch.setattr(player, "play", clumsy)
    found = measure(player, PACKAGE.tasks(player.settings, "val"))
    assert (found["free"]["success"], found["free"]["accuracy"]) == (0.5, 0.75)


def test_information_is_what_columns_say_about_lines():
    assert mutual_information([[3, 0], [0, 3]]) == pytest.approx(math.log(2))
    assert mutual_information([[1, 2], [2, 4]]) == pytest.approx(0.0, abs=1e-12)


def test_a_policy_is_measured_on_the_level_it_is_made_to_think_on(tmp_path, capsys):
    words = ["env.env_name=relay", "model.new.hidden_size=8", "model.new.head_dim=8"]
    cfg = load_config("sft_trainer", words, SFTConfig)
    policy = starting_policy(cfg, [], tmp_path / "policy")
    out = tmp_path / "matrix.json"
    assert main([str(policy), "--tasks", "24", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["tasks"] == 24
    assert [len(line) for line in found["accuracy"]] == [4] * 8
    assert 0 <= found["oracle"]["success"] < 0.01, "this policy has learnt nothing"
    assert "oracle: success" in capsys.readouterr().out


def test_another_environment_is_refused():
    with pytest.raises(ValueError, match="env_name='number_line': this script measures relay"):
        relay_matrix.settings_of(load_config("number_line"))
