"""The matrix of levels: what is counted for players whose play is known."""

import json
import math
from collections.abc import Sequence

import pytest

from agent_system.environments.env_package.relay.doors import Door, needed_level
from experiments.level_matrix import (
    MatrixEnvironment,
    SampledStep,
    collect_expert_states,
    half_width,
    main,
    measure_levels,
)
from rlvcr.level_metrics import compute_mutual_information
from rlvcr.levels import LEVELS
from tests.helpers.refusals import mentions
from verl.config.schema import SFTConfig
from verl.trainer.launch.extensions import load_config
from verl.trainer.launch.sft import prepare_start_policy

HOPS = (0, 2, 4, 7)


def world(doors=8, name="relay"):
    return MatrixEnvironment.from_config(
        load_config(name, [f"env.relay.doors={doors}", "env.relay.val_tasks=60"])
    )


def tasks_of(place):
    return place.package.tasks(place.settings, "val")


class KnowingPlayer:
    """Is right exactly where the level suffices, and chooses the needed one."""

    def sample_steps(
        self, prompts: Sequence[str], levels: Sequence[int | None]
    ) -> list[SampledStep]:
        answers = []
        for prompt, level in zip(prompts, levels, strict=True):
            door = Door.parse(prompt)
            needed = needed_level(door.hops, HOPS)
            chosen = level or needed
            wrong = next(place for place in door.all_places if place != door.goal_place)
            action = door.goal_place if chosen >= needed else wrong
            answers.append(SampledStep(chosen, action, 8 + HOPS[chosen - 1]))
        return answers


def test_a_player_that_knows_what_it_needs_is_measured_as_one():
    place = world()
    found = measure_levels(place, KnowingPlayer(), tasks_of(place), noise=0.0)
    assert [line["situation"] for line in found["situations"]] == [f"+{k}" for k in range(8)]
    for arrows, line in enumerate(found["situations"]):
        needed = needed_level(arrows, HOPS)
        assert line["needed"] == needed and line["states"] > 30
        assert line["accuracy"] == [float(level >= needed) for level in LEVELS]
        assert line["chosen"] == [line["states"] * (level == needed) for level in LEVELS]
    assert found["states"] == sum(line["states"] for line in found["situations"]) == 480
    assert found["tokens_by_level"] == [8, 10, 12, 15]
    assert found["level_information"] == pytest.approx(math.log(4), abs=0.02)
    free, needed, deepest = (found["episodes"][how] for how in ("free", "needed", "4"))
    assert free == needed and needed["success"] == deepest["success"] == 1.0
    assert deepest["tokens"] == 8 * 15
    # Every k is asked for as often as any other: 11.25 tokens a step.
    assert needed["tokens"] == pytest.approx(8 * 11.25, rel=0.02)
    assert found["episodes"]["1"]["success"] < 0.1


def test_useless_actions_lead_the_walk_elsewhere_and_are_not_right():
    line = MatrixEnvironment.from_config(
        load_config("number_line", ["env.history=window", "env.max_steps=8"])
    )
    tasks = tasks_of(line)[:20]
    calm, noisy = collect_expert_states(line, tasks, 0.0), collect_expert_states(line, tasks, 0.5)
    assert len(noisy) > len(calm), "what is useless takes time"
    right = {state.situation: state.decision.action for state in calm}
    shared = [state for state in noisy if state.situation in right]
    assert shared and all(state.decision.is_right(right[state.situation]) for state in shared)
    assert not any(state.decision.is_useless for state in noisy)


def test_episodes_end_at_the_limit_of_steps():
    class Idle:
        def sample_steps(self, prompts, levels):
            return [SampledStep(level, "nowhere", 5) for level in levels]

    place = world(doors=2)
    found = measure_levels(place, Idle(), tasks_of(place)[:3], noise=0.0)
    assert found["episodes"]["3"] == {"success": 0.0, "steps": 2.0, "tokens": 10.0}
    assert found["situations"][0]["chosen"] == [0, 0, 0, 0], "a level that is not readable"


def test_information_is_what_columns_say_about_lines():
    assert compute_mutual_information([[3, 0], [0, 3]]) == pytest.approx(math.log(2))
    assert compute_mutual_information([[1, 2], [2, 4]]) == pytest.approx(0.0, abs=1e-12)


def test_intervals_are_those_of_independent_draws():
    assert half_width(0.5, 100) == pytest.approx(0.098)
    assert half_width(1.0, 7) == 0.0


def test_a_policy_is_measured_on_the_level_it_is_made_to_think_on(tmp_path, capsys):
    words = ["env.env_name=relay", "model.new.hidden_size=8", "model.new.head_dim=8"]
    cfg = load_config("sft_trainer", words, SFTConfig)
    policy = prepare_start_policy(cfg, [], tmp_path / "policy")
    out = tmp_path / "matrix.json"
    assert main([str(policy), "--tasks", "12", "--episodes", "5", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["tasks"], found["states"], found["whole_episodes"]) == (12, 96, 5)
    assert [len(line["accuracy"]) for line in found["situations"]] == [4] * 8
    assert found["episodes"]["free"]["success"] < 0.1, "this policy has learnt nothing"
    assert "episodes, needed: success" in capsys.readouterr().out


def test_states_that_do_not_stand_alone_are_refused():
    with pytest.raises(ValueError, check=mentions("env.history='append'", "env.history=window")):
        MatrixEnvironment.from_config(load_config("number_line"))
