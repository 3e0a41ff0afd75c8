"""Tests of the level matrix on policies with known behaviour."""

import json
import math
import re
from collections.abc import Sequence

import pytest

from agent_system.environments.env_package.relay.doors import DoorPuzzle, compute_needed_level
from experiments.level_matrix import (
    MatrixEnvironment,
    Policy,
    PolicyTurn,
    choose_oracle_levels,
    collect_expert_states,
    compute_half_width,
    compute_oracle_headroom,
    main,
    measure_levels,
    print_measurement,
)
from rlvcr.level_metrics import compute_mutual_information
from rlvcr.levels import LEVELS
from tests.helpers.refusals import mentions
from verl.config.schema import SFTConfig
from verl.config.settings.errors import ConfigError
from verl.trainer.launch.extensions import load_config
from verl.trainer.launch.sft import prepare_initial_policy

HOPS = (0, 2, 4, 7)


def make_environment(doors=8, name="relay"):
    return MatrixEnvironment.from_config(
        load_config(name, [f"env.relay.doors={doors}", "env.relay.val_tasks=60"])
    )


def list_tasks(environment):
    return environment.package.tasks(environment.settings, "val")


class OptimalPolicy(Policy):
    """Chooses the required level; its action is right exactly at levels that suffice."""

    def __init__(self) -> None:
        """Load no model."""

    def sample_policy_turns(
        self, prompts: Sequence[str], levels: Sequence[int | None]
    ) -> list[PolicyTurn]:
        turns = []
        for prompt, level in zip(prompts, levels, strict=True):
            door = DoorPuzzle.parse(prompt)
            required = compute_needed_level(door.hops, HOPS)
            chosen_level = level or required
            wrong = next(
                candidate for candidate in door.all_places if candidate != door.answer_place
            )
            action = door.answer_place if chosen_level >= required else wrong
            turns.append(PolicyTurn(chosen_level, action, 8 + HOPS[chosen_level - 1]))
        return turns


def test_optimal_policy_gets_the_optimal_matrix():
    environment = make_environment()
    matrix = measure_levels(environment, OptimalPolicy(), list_tasks(environment), noise=0.0)
    assert [line["situation"] for line in matrix["situations"]] == [f"+{k}" for k in range(8)]
    for arrows, line in enumerate(matrix["situations"]):
        required = compute_needed_level(arrows, HOPS)
        assert line["needed"] == required and line["states"] > 30
        assert line["accuracy"] == [float(level >= required) for level in LEVELS]
        assert line["chosen"] == [line["states"] * (level == required) for level in LEVELS]
    assert matrix["states"] == sum(line["states"] for line in matrix["situations"]) == 480
    assert matrix["tokens_by_level"] == [8, 10, 12, 15]
    assert matrix["level_information"] == pytest.approx(math.log(4), abs=0.02)
    free, required, deepest = (matrix["episodes"][how] for how in ("free", "needed", "4"))
    assert free == required and required["success"] == deepest["success"] == 1.0
    assert deepest["tokens"] == 8 * 15
    # Every number of hops is equally frequent: 11.25 tokens per turn.
    assert required["tokens"] == pytest.approx(8 * 11.25, rel=0.02)
    assert matrix["episodes"]["1"]["success"] < 0.1
    # The oracle by situation is the required level, because a situation is a number of arrows.
    assert matrix["episodes"]["oracle"] == required
    assert matrix["headroom"]["best_level"] == 4 and matrix["headroom"]["points"] == 0.0
    assert matrix["headroom"]["tokens_pct"] == pytest.approx(-25, abs=1.5)


def test_oracle_is_the_shortest_level_near_the_best_accuracy():
    rows = [
        {"situation": "a", "accuracy": [0.3, 0.95, 0.955, 0.955], "tokens": [8, 10, 12, 15]},
        {"situation": "b", "accuracy": [0.3, 0.9, 0.955, 0.955], "tokens": [8, 10, 12, 15]},
        {"situation": "c", "accuracy": [1.0, 1.0, 1.0, 0.9], "tokens": [20, 10, 12, 15]},
    ]
    assert choose_oracle_levels(rows) == {"a": 2, "b": 3, "c": 2}


def test_headroom_is_the_lead_over_the_best_fixed_level():
    episodes = {
        "1": {"success": 0.1, "steps": 2.0, "tokens": 16.0},
        "2": {"success": 0.6, "steps": 6.0, "tokens": 60.0},
        "3": {"success": 0.7, "steps": 8.0, "tokens": 160.0},
        "4": {"success": 0.7, "steps": 8.0, "tokens": 200.0},
        "oracle": {"success": 0.75, "steps": 8.0, "tokens": 120.0},
    }
    headroom = compute_oracle_headroom(episodes)
    assert headroom["best_level"] == 3
    assert headroom["points"] == pytest.approx(5.0)
    assert headroom["tokens_pct"] == pytest.approx(-25.0)


def test_useless_actions_change_the_walk_and_are_not_right():
    line = MatrixEnvironment.from_config(
        load_config("number_line", ["env.history=window", "env.max_steps=8"])
    )
    tasks = list_tasks(line)[:20]
    calm, noisy = collect_expert_states(line, tasks, 0.0), collect_expert_states(line, tasks, 0.5)
    assert len(noisy) > len(calm), "useless actions take no additional turns"
    right_actions = {state.situation: state.decision.action for state in calm}
    shared = [state for state in noisy if state.situation in right_actions]
    assert shared and all(
        state.decision.is_right(right_actions[state.situation]) for state in shared
    )
    assert not any(state.decision.is_useless for state in noisy)


def test_episodes_end_at_the_turn_limit_without_headroom(capsys):
    class IdlePolicy(OptimalPolicy):
        def sample_policy_turns(self, prompts, levels):
            return [PolicyTurn(level, "nowhere", 5) for level in levels]

    environment = make_environment(doors=2)
    matrix = measure_levels(environment, IdlePolicy(), list_tasks(environment)[:3], noise=0.0)
    assert matrix["episodes"]["3"] == {"success": 0.0, "steps": 2.0, "tokens": 10.0}
    assert matrix["situations"][0]["chosen"] == [0, 0, 0, 0], "an unreadable level is counted"
    print_measurement(matrix)
    last = capsys.readouterr().out.splitlines()[-1]
    assert "headroom" in last and not re.search(r"\d", last)


def test_mutual_information_by_hand():
    assert compute_mutual_information([[3, 0], [0, 3]]) == pytest.approx(math.log(2))
    assert compute_mutual_information([[1, 2], [2, 4]]) == pytest.approx(0.0, abs=1e-12)


def test_interval_half_width_by_hand():
    assert compute_half_width(0.5, 100) == pytest.approx(0.098)
    assert compute_half_width(1.0, 7) == 0.0


def test_policy_is_measured_at_every_forced_level(tmp_path, capsys):
    overrides = ["env.env_name=relay", "model.new.hidden_size=8", "model.new.head_dim=8"]
    cfg = load_config("sft_trainer", overrides, SFTConfig)
    policy = prepare_initial_policy(cfg, [], tmp_path / "policy")
    out = tmp_path / "matrix.json"
    options = ["--tasks", "12", "--episodes", "5", "--out", str(out)]
    assert main([str(policy), "env.max_steps=8", *options, "env.relay.doors=8"]) == 0
    matrix = json.loads(out.read_text())
    assert (matrix["tasks"], matrix["states"], matrix["whole_episodes"]) == (12, 96, 5)
    assert [len(line["accuracy"]) for line in matrix["situations"]] == [4] * 8
    assert matrix["episodes"]["free"]["success"] < 0.1, "this policy is not trained"
    printed = capsys.readouterr().out
    assert "episodes, needed: success" in printed and "headroom: " in printed
    with pytest.raises(ConfigError, check=mentions("--out", "--overwrite")):
        main([str(policy), "--out", str(out)])


def test_history_across_turns_is_refused():
    with pytest.raises(ValueError, check=mentions("env.history='append'", "env.history=window")):
        MatrixEnvironment.from_config(load_config("number_line"))
