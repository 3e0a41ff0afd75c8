"""Tests of Sokoban: levels are solvable, moves push boxes, and images agree with texts."""

from typing import Any

import numpy as np
import pytest

from agent_system.environments.env_package.sokoban import render
from agent_system.environments.env_package.sokoban.levels import MOVES, canonicalize_level
from agent_system.environments.env_package.sokoban.package import PACKAGE, SokobanEnv, list_tasks
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from tests.helpers.expert_policies import push_the_boxes
from tests.helpers.number_line_world import make_config
from tests.helpers.refusals import has_problem, mentions
from tests.helpers.solvability import play_episodes
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.config.settings.errors import UserError

read = PACKAGE.read_settings

FEW: Any = {"train_levels": 24, "val_levels": 6}
LEVEL = "######\n#@$._#\n#__$.#\n######"
TASK = {"task_id": "x", "data_source": "sokoban", "level": LEVEL, "solution": ["right"]}


def run_actions(env, actions, task=TASK):
    return [env.reset(task, 0), *(env.step(action) for action in actions)]


def test_box_is_pushed_onto_a_free_cell():
    start, (observation, reward, done, info) = run_actions(SokobanEnv(read({})), ["right"])
    assert start.anchor == LEVEL and start.text.split("\n")[1] == "# @ $ . _ #"
    assert start.info["admissible_actions"] == ["down", "right"]
    assert observation.anchor == "######\n#_@*_#\n#__$.#\n######"
    assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": True})


@pytest.mark.parametrize(
    "before, action", [([], "up"), ([], "fly"), (["right"] * 2, "right"), (["right"], "up")]
)
def test_walls_stop_player_and_boxes(before, action):
    env = SokobanEnv(read({}))
    *_, last = run_actions(env, before)
    anchor = last.anchor if not before else last[0].anchor
    observation, reward, done, info = env.step(action)
    assert observation.anchor == anchor and observation.text.startswith("Nothing moves.")
    assert (reward, done, info["is_action_valid"]) == (0.0, False, False)


def test_box_does_not_push_a_box():
    task = {**TASK, "level": "#######\n#@$$_.#\n#____.#\n#######"}
    env = SokobanEnv(read({}))
    start = env.reset(task, 0)
    assert (
        "right" not in start.info["admissible_actions"]
        and not env.step("right")[3]["is_action_valid"]
    )


def test_sparse_and_gym_rewards_have_the_documented_values():
    to_win = [
        "right",
        "down",
        "left",
        "right",
        "right",
    ]  # the second box needs the player on its left
    sparse = [outcome[1] for outcome in run_actions(SokobanEnv(read({})), to_win)[1:]]
    last = run_actions(SokobanEnv(read({})), to_win)[-1]
    assert sparse == [0.0, 0.0, 0.0, 0.0, 1.0] and last[2] and last[3]["won"]
    assert run_actions(SokobanEnv(read({"reward": "gym"})), to_win)[1][1] == pytest.approx(
        0.9
    )  # a box moves onto a target
    assert run_actions(SokobanEnv(read({"reward": "gym"})), ["right", "right"])[2][
        1
    ] == pytest.approx(-1.1)  # and off it again
    assert run_actions(SokobanEnv(read({"reward": "gym"})), to_win)[-1][1] == pytest.approx(10.9)


@pytest.mark.parametrize(
    "section", [{}, {"num_boxes": 2, "search_depth": 16}, {"dim_room": [7, 9], "min_moves": 8}]
)
def test_every_level_is_solved_by_its_whole_solution(section):
    env = SokobanEnv(read(section))
    for task in list_tasks(read({**FEW, **section}), "train") + list_tasks(
        read({**FEW, **section}), "val"
    ):
        _seen, *outcomes = run_actions(env, task["solution"], task)
        assert [done for _, _, done, _ in outcomes] == [False] * (len(outcomes) - 1) + [True]
        assert section.get("min_moves", 2) <= len(outcomes) <= section.get("search_depth", 12)
        assert task["level"].count("$") == section.get("num_boxes", 1) and "*" not in task["level"]
        rows = task["level"].split("\n")
        assert [len(rows), len(rows[0])] == section.get("dim_room", [6, 6])


def test_no_shorter_solution_exists():
    env = SokobanEnv(read({}))
    for task in list_tasks(read(FEW), "train")[:8]:
        env.reset(task, 0)
        visited, frontier = {task["level"]}, [env.state]
        for depth in range(len(task["solution"])):
            next_frontier = []
            for state in frontier:
                for move in MOVES:
                    env.state = state
                    observation, _, done, _ = env.step(move)
                    assert not done or depth + 1 == len(task["solution"])
                    if observation.anchor not in visited:
                        visited.add(observation.anchor)
                        next_frontier.append(env.state)
            frontier = next_frontier


def test_levels_differ_also_under_mirroring():
    train, val = list_tasks(read(FEW), "train"), list_tasks(read(FEW), "val")
    names = [canonicalize_level(task["level"]) for task in train + val]
    assert len(set(names)) == len(names) == 30
    mirrored = "\n".join(row[::-1] for row in LEVEL.split("\n"))
    turned = "\n".join("".join(column) for column in zip(*LEVEL.split("\n"), strict=True))
    assert canonicalize_level(LEVEL) == canonicalize_level(mirrored) == canonicalize_level(turned)
    assert list_tasks(read({**FEW, "level_seed": 1}), "train") != train


def test_settings_without_levels_are_refused():
    refused = has_problem("conflicting_keys", "env.sokoban", 50, 60, "[5, 5]", 1)
    with pytest.raises(UserError, check=refused):
        list_tasks(read({**FEW, "dim_room": [5, 5], "min_moves": 50, "search_depth": 60}), "train")


def test_image_shows_the_level():
    picture = render.render_image(LEVEL, 8)
    assert picture.shape == (32, 48, 3) and picture.dtype == np.uint8
    tiles = {
        sign: picture[8 * r : 8 * r + 8, 8 * c : 8 * c + 8]
        for r, c, sign in ((0, 0, "#"), (1, 1, "@"), (1, 2, "$"), (1, 3, "."), (1, 4, "_"))
    }
    all_tiles = [*tiles.values(), *(render.render_image(sign, 8) for sign in "*+")]
    assert len({tile.tobytes() for tile in all_tiles}) == 7, "every sign has another tile"
    assert (picture[:8, 8:16] == tiles["#"]).all(), "a sign has the same tile at every position"
    observation = SokobanEnv(read({"mode": "rgb_array", "tile": 8})).reset(TASK, 0)
    assert (
        (observation.image == picture).all()
        and observation.text == "<image>"
        and observation.anchor == LEVEL
    )


@pytest.mark.parametrize("history", ["append", "window"])
def test_rows_hold_the_images_of_their_turns(history):
    data = play_episodes(
        "sokoban", push_the_boxes, history=history, processor=object(), mode="image", tile=4, **FEW
    )
    tokenizer = make_tiny_tokenizer()
    for row, (images, anchors) in enumerate(
        zip(
            data.non_tensor_batch["multi_modal_data"],
            data.non_tensor_batch["anchor_obs"],
            strict=True,
        )
    ):
        assert len(images["image"]) == len(anchors)
        for image, anchor in zip(images["image"], anchors, strict=True):
            assert (image == render.render_image(anchor, 4)).all()
        text = tokenizer.decode(
            data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()]
        )
        assert text.count("<image>") == len(anchors), "one placeholder per image"


def test_text_rows_hold_no_images():
    assert (
        "multi_modal_data" not in play_episodes("sokoban", push_the_boxes, **FEW).non_tensor_batch
    )


def test_image_mode_is_refused_for_a_text_model_at_start_up():
    config = make_config("sokoban", kwargs={"mode": "image"})
    config.actor_rollout_ref.model.path = "some/model"
    with pytest.raises(
        ValueError,
        check=mentions("env.sokoban.mode='image'", "some/model", "env.sokoban.mode=text"),
    ):
        TrajectoryCollector(config, make_tiny_tokenizer())
    assert PACKAGE.images(read({})) is None


def test_compact_prompts_draw_the_room_once_and_list_boxes():
    settings = PACKAGE.read_settings({"prompt": "compact"})
    env = PACKAGE.make(settings)
    prompts = PACKAGE.prompts(settings)
    start = env.reset(TASK, 0)
    compact = prompts.turn(start)
    assert compact == (
        "up wall, left wall, right box; box 1 right, target 1 right, closer right from here; "
        "box 1 down 2 right, target 1 up, closer right from 1 down 1 right"
    )
    assert prompts.first(start, True) == f"{start.text}\n{compact}"
    pushed, *_ = env.step("right")
    assert prompts.turn(pushed) == (
        "up wall, right box; box 1 down 1 right, target 1 right, closer right from 1 down"
    )
    refused, *_ = env.step("up")
    assert prompts.turn(refused).startswith("Nothing moves.\nup wall")
    env.step("right")
    stuck, *_ = env.step("right")
    assert "right stuck" in prompts.turn(stuck)


def test_compact_prompts_name_pushes_away_where_no_other_exists():
    settings = PACKAGE.read_settings({"prompt": "compact"})
    level = "#######\n#_____#\n#@_#$.#\n#_____#\n#######"
    observation = PACKAGE.make(settings).reset({**TASK, "level": level}, 0)
    assert PACKAGE.prompts(settings).turn(observation) == (
        "left wall; box 3 right, target 1 right, away up from 1 down 3 right, "
        "away down from 1 up 3 right"
    )
    free = level.replace("@", "_").replace("_____", "__@__", 1)
    observation = PACKAGE.make(settings).reset({**TASK, "level": free.replace("#$", "_$")}, 0)
    assert PACKAGE.prompts(settings).turn(observation).startswith("up wall; box 1 down 1 right")
