"""FrozenLake: maps, moves, rewards, slipping."""

import pytest

from agent_system.environments.env_package.frozen_lake.package import (
    PACKAGE,
    FrozenLakeText,
    list_tasks,
)
from tests.helpers.gold import cross_the_lake

read = PACKAGE.read_settings

SMALL = {"train_maps": 30, "val_maps": 8}
LAKE = {"task_id": "x", "data_source": "frozen_lake", "map": ["SFH", "FFF", "HFG"]}


def test_text_anchor_and_moves():
    env = FrozenLakeText(read({}))
    seen = env.reset(LAKE, 0)
    assert seen.text == "P . O\n. . .\nO . G"
    assert seen.info["admissible_actions"] == ["down", "right"]
    seen, reward, done, info = env.step(" Down ")
    assert seen.text == ". . O\nP . .\nO . G" and (reward, done) == (0.0, False)
    assert info == {"won": False, "is_action_valid": True}
    env.step("up")
    env.step("right")
    seen, *_ = env.step("left")
    assert seen.anchor == env.reset(LAKE, 1).anchor, (
        "the same place is the same anchor, however it was reached"
    )


@pytest.mark.parametrize("action", ["up", "left", "jump", "", "down down"])
def test_what_cannot_be_done_changes_nothing(action):
    env = FrozenLakeText(read({}))
    start = env.reset(LAKE, 0)
    seen, reward, done, info = env.step(action)
    assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": False})
    assert seen.anchor == start.anchor and seen.text.startswith("That is not possible here.")


def test_the_goal_pays_and_a_hole_ends():
    env = FrozenLakeText(read({}))
    env.reset(LAKE, 0)
    outcomes = [env.step(move)[1:] for move in ("down", "right", "down", "right")]
    assert outcomes[-1] == (1.0, True, {"won": True, "is_action_valid": True})
    assert [outcome[0] for outcome in outcomes[:-1]] == [0.0] * 3
    env.reset(LAKE, 0)
    env.step("right")
    seen, reward, done, info = env.step("right")
    assert (reward, done, info["won"]) == (0.0, True, False) and "fell into a hole" in seen.text


def test_slippery_ice_is_decided_by_the_seed():
    env = FrozenLakeText(read({"slippery": True}))
    lake = {**LAKE, "map": ["SFFFF"] + ["FFFFF"] * 3 + ["FFFFG"]}

    def walk(seed):
        env.reset(lake, seed)
        return [env.step("right")[0].anchor for _ in range(6)]

    walks = [walk(seed) for seed in range(8)]
    assert walks == [walk(seed) for seed in range(8)]
    assert len({tuple(places) for places in walks}) > 4
    assert env.reset(lake, 0).info["admissible_actions"] == ["left", "down", "right", "up"], (
        "a bump may slip aside"
    )
    assert "slippery: only one" in str(PACKAGE.prompts(read({"slippery": True})).system(False))
    assert "not slippery" in str(PACKAGE.prompts(read({})).system(False))


def test_every_map_has_a_way_and_a_split_of_its_own():
    train, val = list_tasks(read(SMALL), "train"), list_tasks(read(SMALL), "val")
    assert (len(train), len(val)) == (30, 8)
    for task in train + val:
        cross_the_lake(task)  # raises KeyError where there is no way
    more = list_tasks(read({**SMALL, "train_maps": 60}), "train")
    assert more[:30] == train, "more maps are further maps"
    assert list_tasks(read({**SMALL, "map_seed": 1}), "train") != train
    assert all(len(task["map"]) == 6 for task in list_tasks(read({**SMALL, "size": 6}), "train"))


def test_a_lake_too_small_gives_what_there_is():
    train, val = list_tasks(read({"size": 3}), "train"), list_tasks(read({"size": 3}), "val")
    assert 0 < len(val) < len(train) < 100 and len(
        {task["task_id"] for task in train + val}
    ) == len(train + val)


def test_compact_prompts_draw_the_map_once_and_then_say_what_is_around():
    settings = PACKAGE.read_settings({"prompt": "compact"})
    env = PACKAGE.make(settings)
    prompts = PACKAGE.prompts(settings)
    first = env.reset(LAKE, 0)
    around = "0 0: left edge, down ice, right ice, up edge"
    assert prompts.system(True) is None
    assert prompts.first(first, True) == f"{first.text}\n{around}"
    bumped, *_ = env.step("up")
    assert prompts.turn(bumped) == f"That is not possible here.\n{around}"
    for move in ("right", "down", "down"):
        seen, *_ = env.step(move)
    assert prompts.turn(seen) == "2 1: left hole, down edge, right goal, up ice"
    window = prompts.window(first, [(bumped.text, "down")], seen, True)
    assert window.startswith(f"{first.text}\n{around}\nThat is not possible")
