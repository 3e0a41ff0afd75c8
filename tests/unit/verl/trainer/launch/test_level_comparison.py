"""Validation under rules that force levels, and the metrics that compare the rules."""

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
from tests.helpers.number_line_world import Group, make_config, walk
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.thinking_trajectories import steps_of
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.trainer.launch.level_comparison import compare_levels, print_level_tables
from verl.utils.waits import Stopwatch

LEVEL_1_ROW = r"level 1 +100\.0% \(\d+\.\d% to 100\.0%\) +\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)"
DIFFERENCE_ROW = (
    r"level 1 +\+0\.0 \(\+0\.0 to \+0\.0\) +-\d+\.\d\d \(-\d+\.\d\d to -\d+\.\d\d\) +-\d"
)


def relay_script(_request: object, prompt: str) -> str:
    """Answer with the open door, on level 3 if no level is forced."""
    door = re.findall(r"(\w)>\w", prompt)[-1]
    answer = f"I see it</think><action>{door}</action>"
    return answer if prompt.endswith("<think>") else f"<level>3</level><think>{answer}"


def line_script(_request: object, prompt: str) -> str:
    """Walk to the target, on level 2 if no level is forced. Thoughts get longer with the level."""
    level = int(re.findall(r"<level>(\d)</level>", f"<level>2</level>{prompt}")[-1])
    forced = prompt.endswith("<think>")
    answer = f"{'turn ' * (level - 1 if forced else 1)}</think><action>{walk(prompt)}</action>"
    return answer if forced else f"<level>2</level><think>{answer}"


@dataclass
class World:
    """A validation set with the collector, the workers and the environments that generate it."""

    config: Any
    collector: TrajectoryCollector
    group: Any
    envs: EnvironmentManagerBase

    def generate(self, rule: LevelRule = FREE_RULE):
        """Return the rows of the validation set under ``rule``."""
        return self.collector.panel_loop(self.envs.panel_batch(), self.group, rule)

    def compare(self) -> dict[str, float]:
        """Return the metrics of a comparison of the levels."""
        trainer = SimpleNamespace(workers=self.group, val_envs=self.envs, clock=Stopwatch())
        run: Any = SimpleNamespace(trainer=trainer, collector=self.collector)
        return compare_levels(run, self.config, self.generate())


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def make_validation_world(tokenizer, name: str, script, kwargs: dict) -> Iterator[World]:
    """Yield a small environment that requests levels. Close it after the test."""
    config = make_config(name, "window", levels=True, kwargs=kwargs, val_tasks=6)
    collector = TrajectoryCollector(config, tokenizer)
    group = Group([ScriptedEngine(tokenizer, script)])
    yield World(config, collector, group, make_envs(config)[1])
    collector.close()


@pytest.fixture
def relay(tokenizer) -> Iterator[World]:
    """Environment that names the required level of a turn."""
    yield from make_validation_world(
        tokenizer, "relay", relay_script, {"doors": 3, "prompt": "compact"}
    )


@pytest.fixture
def line(tokenizer) -> Iterator[World]:
    """Environment that does not name the required level."""
    yield from make_validation_world(tokenizer, "number_line", line_script, {"size": 12})


def test_forced_level_prefix_is_not_sampled(relay, tokenizer):
    free, forced = relay.generate(), relay.generate(LevelRule.from_level_frequencies([2]))
    assert {(record.level, record.level_forced) for _, record in steps_of(free)} == {(3, False)}
    assert {(record.level, record.level_forced) for _, record in steps_of(forced)} == {(2, True)}
    length = len(LevelCodec(tokenizer).prefix_ids[1])
    for row, record in steps_of(forced):
        assert record.num_tokens == record.span[1] - record.span[0] - length
        assert int(forced.batch["response_mask"][row].sum()) == record.num_tokens
    # The turns have the same length with and without forcing, so rules can be compared by it.
    turns = [{record.span[1] - record.span[0] for _, record in steps_of(d)} for d in (free, forced)]
    assert turns[0] == turns[1]


def test_required_level_rule_forces_the_level_of_the_observation(relay):
    records = [
        record for _, record in steps_of(relay.generate(LevelRule(forces_required_level=True)))
    ]
    assert all(record.level_forced and record.level == record.needed_level for record in records)
    assert len({record.level for record in records}) > 1


def test_forced_level_prefix_counts_towards_the_turn_limit(relay, tokenizer):
    length = len(LevelCodec(tokenizer).prefix_ids[1])
    limit = relay.config.env.max_turn_tokens
    for rule, sampled in (
        (FREE_RULE, limit),
        (LevelRule(forces_required_level=True), limit - length),
    ):
        relay.generate(rule)
        engine = relay.group.rollout_workers[0]
        assert {request.max_tokens for request in engine.requests} == {sampled}
        engine.requests.clear()


def test_drawn_levels_depend_only_on_trajectory_and_turn(line):
    def levels(data):
        return [record.level for _, record in steps_of(data)]

    rule = LevelRule.from_level_frequencies([1, 2, 4, 4])
    first = levels(line.generate(rule))
    assert first == levels(line.generate(rule)) and set(first) == {1, 2, 4}


def test_comparison_covers_every_rule_the_environment_supports(line, caplog, capsys):
    with caplog.at_level(logging.WARNING):
        metrics = line.compare()
    assert "oracle" in caplog.text
    names = ["free", "level_1", "level_2", "level_3", "level_4", "random"]
    assert list(dict.fromkeys(key.split("/")[2] for key in metrics)) == names
    assert {metrics[f"val/levels/{name}/success_rate"] for name in names} == {1.0}
    assert metrics["val/levels/level_4/success_difference"] == 0.0
    assert "val/levels/free/success_difference" not in metrics
    tokens_by_level = [
        metrics[f"val/levels/level_{level}/tokens_per_step"] for level in (1, 2, 3, 4)
    ]
    assert tokens_by_level == sorted(tokens_by_level) and tokens_by_level[0] < tokens_by_level[3]
    print_level_tables(metrics)
    text = capsys.readouterr().out
    assert re.search(LEVEL_1_ROW, text) and re.search(
        DIFFERENCE_ROW, text.partition("Difference to free")[2]
    )
    assert "Difference to oracle" not in text


def test_level_shares_are_given_per_situation(relay):
    metrics = relay.compare()
    assert metrics["val/levels/oracle/tokens_per_step"] > 0
    compared = {key.split("/")[2] for key in metrics if key.startswith("val/levels_less_oracle/")}
    assert compared == {"free", "level_1", "level_2", "level_3", "level_4", "random"}
    difference = metrics["val/levels_less_oracle/free/tokens_per_step_difference"]
    assert difference == -metrics["val/levels/oracle/tokens_per_step_difference"]
    situations = {key.split("/")[2] for key in metrics if key.startswith("val/levels_in/")}
    assert situations and situations <= {f"+{hops}" for hops in range(8)}
    assert {metrics[f"val/levels_in/{situation}/share_3"] for situation in situations} == {1.0}


@pytest.mark.parametrize("rules", [[], ["free"]], ids=["none", "free"])
def test_without_other_rules_nothing_is_compared(line, rules, capsys):
    line.config.algorithm.rlvcr.eval_levels = rules
    assert line.compare() == {}
    print_level_tables({"val/success_rate": 1.0})
    assert capsys.readouterr().out == ""
