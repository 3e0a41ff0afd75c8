"""Tests of FrozenLake: maps, moves, rewards and slipping."""

import pytest

from agent_system.environments.env_package.frozen_lake.package import (
    PACKAGE,
    FrozenLakeTextEnv,
    list_tasks,
)
from tests.helpers.expert_policies import cross_the_lake

read = PACKAGE.read_settings

SMALL = {"train_maps": 30, "val_maps": 8}
LAKE = {"task_id": "x", "data_source": "frozen_lake", "map": ["SFH", "FFF", "HFG"]}


def test_moves_change_text_and_anchor():
    env = FrozenLakeTextEnv(read({}))
    observation = env.reset(LAKE, 0)
    assert observation.text == "P . O\n. . .\nO . G"
    assert observation.info["admissible_actions"] == ["down", "right"]
    observation, reward, done, info = env.step(" Down ")
    assert observation.text == ". . O\nP . .\nO . G" and (reward, done) == (0.0, False)
    assert info == {"won": False, "is_action_valid": True}
    env.step("up")
    env.step("right")
    observation, *_ = env.step("left")
    assert observation.anchor == env.reset(LAKE, 1).anchor, (
        "the anchor of a position does not depend on the path"
    )


@pytest.mark.parametrize("action", ["up", "left", "jump", "", "down down"])
def test_impossible_action_changes_nothing(action):
    env = FrozenLakeTextEnv(read({}))
    start = env.reset(LAKE, 0)
    observation, reward, done, info = env.step(action)
    assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": False})
    assert observation.anchor == start.anchor and observation.text.startswith(
        "That is not possible here."
    )


def test_goal_gives_reward_1_and_hole_ends_the_episode():
    env = FrozenLakeTextEnv(read({}))
    env.reset(LAKE, 0)
    outcomes = [env.step(move)[1:] for move in ("down", "right", "down", "right")]
    assert outcomes[-1] == (1.0, True, {"won": True, "is_action_valid": True})
    assert [outcome[0] for outcome in outcomes[:-1]] == [0.0] * 3
    env.reset(LAKE, 0)
    env.step("right")
    observation, reward, done, info = env.step("right")
    assert (reward, done, info["won"]) == (
        0.0,
        True,
        False,
    ) and "fell into a hole" in observation.text


def test_slips_depend_on_the_seed():
    env = FrozenLakeTextEnv(read({"slippery": True}))
    lake = {**LAKE, "map": ["SFFFF"] + ["FFFFF"] * 3 + ["FFFFG"]}

    def walk(seed):
        env.reset(lake, seed)
        return [env.step("right")[0].anchor for _ in range(6)]

    walks = [walk(seed) for seed in range(8)]
    assert walks == [walk(seed) for seed in range(8)]
    assert len({tuple(places) for places in walks}) > 4
    assert env.reset(lake, 0).info["admissible_actions"] == ["left", "down", "right", "up"], (
        "a move into the edge may slip sideways"
    )
    assert "slippery: only one" in str(PACKAGE.prompts(read({"slippery": True})).system(False))
    assert "not slippery" in str(PACKAGE.prompts(read({})).system(False))


def test_every_map_is_solvable_and_splits_are_prefix_stable():
    train, val = list_tasks(read(SMALL), "train"), list_tasks(read(SMALL), "val")
    assert (len(train), len(val)) == (30, 8)
    for task in train + val:
        cross_the_lake(task)  # raises KeyError if there is no path
    more = list_tasks(read({**SMALL, "train_maps": 60}), "train")
    assert more[:30] == train, "a larger count appends maps"
    assert list_tasks(read({**SMALL, "map_seed": 1}), "train") != train
    assert all(len(task["map"]) == 6 for task in list_tasks(read({**SMALL, "size": 6}), "train"))


def test_small_lake_gives_the_maps_that_exist():
    train, val = list_tasks(read({"size": 3}), "train"), list_tasks(read({"size": 3}), "val")
    assert 0 < len(val) < len(train) < 100 and len(
        {task["task_id"] for task in train + val}
    ) == len(train + val)


def test_compact_prompts_draw_the_map_only_once():
    settings = PACKAGE.read_settings({"prompt": "compact"})
    env = PACKAGE.make(settings)
    prompts = PACKAGE.prompts(settings)
    first = env.reset(LAKE, 0)
    surroundings = "0 0: left edge, down ice, right ice, up edge"
    assert prompts.system(True) is None
    assert prompts.first(first, True) == f"{first.text}\n{surroundings}"
    after_bump, *_ = env.step("up")
    assert prompts.turn(after_bump) == f"That is not possible here.\n{surroundings}"
    for move in ("right", "down", "down"):
        observation, *_ = env.step(move)
    assert prompts.turn(observation) == "2 1: left hole, down edge, right goal, up ice"
    window = prompts.window(first, [(after_bump.text, "down")], observation, True)
    assert window.startswith(f"{first.text}\n{surroundings}\nThat is not possible")
