"""A panel played under rules that force levels, and what a measurement makes of it."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from agent_system.environments.manager import EnvironmentManagerBase, make_envs
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from rlvcr.levels import LevelCodec
from rlvcr.research.level_rules import FREE_RULE, LevelRule
from tests.helpers.play import Group, make_config, walk
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.thinking_plays import steps_of
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.trainer.launch.level_comparison import compare_levels, print_level_tables
from verl.utils.waits import Stopwatch

WON = r"level 1 +100\.0% \(\d+\.\d% to 100\.0%\) +\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)"
LESS = r"level 1 +\+0\.0 \(\+0\.0 to \+0\.0\) +-\d+\.\d\d \(-\d+\.\d\d to -\d+\.\d\d\) +-\d"


def relay_script(_request: object, prompt: str) -> str:
    """Answers a place that stands in the door, on level 3 where nothing is forced."""
    place = re.findall(r"(\w)>\w", prompt)[-1]
    answer = f"I see it</think><action>{place}</action>"
    return answer if prompt.endswith("<think>") else f"<level>3</level><think>{answer}"


def line_script(_request: object, prompt: str) -> str:
    """Walks to the target, on level 2 where nothing is forced; thoughts are as long as their level
    is high.
    """
    level = int(re.findall(r"<level>(\d)</level>", f"<level>2</level>{prompt}")[-1])
    forced = prompt.endswith("<think>")
    answer = f"{'turn ' * (level - 1 if forced else 1)}</think><action>{walk(prompt)}</action>"
    return answer if forced else f"<level>2</level><think>{answer}"


@dataclass
class World:
    """A panel, who plays it, and with what."""

    config: Any
    collector: TrajectoryCollector
    group: Any
    envs: EnvironmentManagerBase

    def play(self, rule: LevelRule = FREE_RULE):
        """Rows of the panel under ``rule``."""
        return self.collector.panel_loop(self.envs.panel_batch(), self.group, rule)

    def compare(self) -> dict[str, float]:
        """The metrics of a measurement of the levels."""
        trainer = SimpleNamespace(workers=self.group, val_envs=self.envs, clock=Stopwatch())
        run: Any = SimpleNamespace(trainer=trainer, collector=self.collector)
        return compare_levels(run, self.config, self.play())


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def world(tokenizer, name: str, script, kwargs: dict) -> Iterator[World]:
    """A small environment whose policy is asked for levels; ends with the test."""
    config = make_config(name, "window", levels=True, kwargs=kwargs, val_tasks=6)
    collector = TrajectoryCollector(config, tokenizer)
    group = Group([ScriptedEngine(tokenizer, script)])
    yield World(config, collector, group, make_envs(config)[1])
    collector.close()


@pytest.fixture
def relay(tokenizer) -> Iterator[World]:
    """It names the level that a step needs."""
    yield from world(tokenizer, "relay", relay_script, {"doors": 3, "prompt": "compact"})


@pytest.fixture
def line(tokenizer) -> Iterator[World]:
    """It does not."""
    yield from world(tokenizer, "number_line", line_script, {"size": 12})


def test_a_forced_level_is_not_sampled_and_the_rest_of_the_turn_is(relay, tokenizer):
    free, forced = relay.play(), relay.play(LevelRule.force_level(2))
    assert {(record.level, record.level_forced) for _, record in steps_of(free)} == {(3, False)}
    assert {(record.level, record.level_forced) for _, record in steps_of(forced)} == {(2, True)}
    length = len(LevelCodec(tokenizer).prefix_ids[1])
    for row, record in steps_of(forced):
        assert record.num_tokens == record.span[1] - record.span[0] - length
        assert int(forced.batch["response_mask"][row].sum()) == record.num_tokens
    # The same turns, whoever wrote how they begin: by this number rules are compared.
    turns = [{record.span[1] - record.span[0] for _, record in steps_of(d)} for d in (free, forced)]
    assert turns[0] == turns[1]


def test_the_needed_level_is_that_of_the_observation(relay):
    records = [record for _, record in steps_of(relay.play(LevelRule(forces_required_level=True)))]
    assert all(record.level_forced and record.level == record.needed_level for record in records)
    assert len({record.level for record in records}) > 1


def test_a_forced_level_and_what_follows_fit_the_turn(relay, tokenizer):
    length = len(LevelCodec(tokenizer).prefix_ids[1])
    limit = relay.config.env.max_turn_tokens
    for rule, sampled in (
        (FREE_RULE, limit),
        (LevelRule(forces_required_level=True), limit - length),
    ):
        relay.play(rule)
        engine = relay.group.rollout_workers[0]
        assert {request.max_tokens for request in engine.requests} == {sampled}
        engine.requests.clear()


def test_what_is_drawn_depends_on_the_trajectory_and_the_step_alone(line):
    def levels(data):
        return [record.level for _, record in steps_of(data)]

    rule = LevelRule.force_like([1, 2, 4, 4])
    first = levels(line.play(rule))
    assert first == levels(line.play(rule)) and set(first) == {1, 2, 4}


def test_a_measurement_plays_every_rule_that_the_environment_allows(line, caplog, capsys):
    with caplog.at_level(logging.WARNING):
        metrics = line.compare()
    assert "oracle" in caplog.text
    names = ["free", "level_1", "level_2", "level_3", "level_4", "random"]
    assert list(dict.fromkeys(key.split("/")[2] for key in metrics)) == names
    assert {metrics[f"val/levels/{name}/success_rate"] for name in names} == {1.0}
    assert metrics["val/levels/level_4/success_difference"] == 0.0
    assert "val/levels/free/success_difference" not in metrics
    per_step = [metrics[f"val/levels/level_{level}/tokens_per_step"] for level in (1, 2, 3, 4)]
    assert per_step == sorted(per_step) and per_step[0] < per_step[3]
    print_level_tables(metrics)
    said = capsys.readouterr().out
    assert re.search(WON, said) and re.search(LESS, said.partition("Difference to free")[2])
    assert "Difference to oracle" not in said


def test_situations_are_told_where_they_are_named(relay):
    metrics = relay.compare()
    assert metrics["val/levels/oracle/tokens_per_step"] > 0
    compared = {key.split("/")[2] for key in metrics if key.startswith("val/levels_less_oracle/")}
    assert compared == {"free", "level_1", "level_2", "level_3", "level_4", "random"}
    of_free = metrics["val/levels_less_oracle/free/tokens_per_step_difference"]
    assert of_free == -metrics["val/levels/oracle/tokens_per_step_difference"]
    told = {key.split("/")[2] for key in metrics if key.startswith("val/levels_in/")}
    assert told and told <= {f"+{hops}" for hops in range(8)}
    assert {metrics[f"val/levels_in/{situation}/share_3"] for situation in told} == {1.0}


@pytest.mark.parametrize("rules", [[], ["free"]], ids=["none", "free"])
def test_without_other_rules_nothing_is_compared(line, rules, capsys):
    line.config.algorithm.rlvcr.eval_levels = rules
    assert line.compare() == {}
    print_level_tables({"val/success_rate": 1.0})
    assert capsys.readouterr().out == ""
