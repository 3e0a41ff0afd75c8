"""Relay: what doors ask for, what is thought about them, and what whoever knows the needed level
reaches.
"""

import json
import random

import pytest

from agent_system.environments.env import Observation
from agent_system.environments.env_package.relay.doors import (
    Door,
    describe_door,
    draw_doors,
    needed_level,
)
from agent_system.environments.env_package.relay.expert import list_token_symbols
from agent_system.environments.env_package.relay.package import PACKAGE
from agent_system.environments.expert_protocol import EpisodeStart
from agent_system.environments.experts.demonstrations import write_demonstrations
from rlvcr.levels import LEVELS, TAGS
from verl.models.new_policy import build_tokenizer

HOPS = (0, 2, 4, 7)
# a > d > b > e > c > a
SMALL = {"places": 5, "hops": [0, 1, 2, 3], "doors": 2}
DOOR = "b+3 c>a a>d e>c d>b b>e"


def always(probability: float) -> list[list[float]]:
    return [[probability] * 4 for _ in range(8)]


def demonstrations(folder, count: int, share: float = 0.5, **section) -> list[dict]:
    settings = PACKAGE.read_settings({"prompt": "compact", **section})
    path = write_demonstrations(
        "relay", settings, folder, count, num_workers=0, needed_level_share=share
    )
    return [json.loads(line) for line in path.read_text().splitlines()]


def parts(row: dict) -> tuple[Door, int, list[str], str]:
    """Door, level, places written, action of a demonstration of one door."""
    question, answer = (message["content"] for message in row["messages"])
    head, _, action = answer.partition("</think><action>")
    level, _, thought = head.partition("</level><think>")
    chain = [hop.partition("=") for hop in thought.split()]
    assert [number for number, _, _ in chain] == [str(n) for n in range(1, len(chain) + 1)]
    places = [place for _, _, place in chain]
    number = int(level.removeprefix("<level>"))
    return Door.parse(question), number, places, action.removesuffix("</action>")


def test_a_door_is_followed_arrow_by_arrow():
    door = Door.parse(DOOR)
    assert str(door) == DOOR
    assert door.follow_arrows("b", 6) == ["e", "c", "a", "d", "b", "e"]
    assert door.goal_place == "a"
    assert Door.parse(DOOR.replace("+3", "+0")).goal_place == "b"
    assert door.all_places == list("abcde")


def test_the_state_leaves_out_how_the_arrows_are_mixed():
    door = Door.parse(DOOR)
    assert door.state == Door.parse("b+3 b>e d>b e>c a>d c>a").state == "b>e>c>a>d+3"
    assert door.state != Door.parse(DOOR.replace("+3", "+2")).state


def test_drawn_doors_are_one_cycle_and_ask_for_every_number_of_arrows():
    drawn = draw_doors((12, 12), 7, seed=3, is_validation=False)
    doors = [next(drawn) for _ in range(400)]
    assert all(len(set(door.follow_arrows(door.place, 12))) == 12 for door in doors)
    asked = [door.hops for door in doors]
    assert all(30 <= asked.count(count) <= 70 for count in range(8))
    assert not any(door.is_validation for door in doors)


def test_demonstrated_cycles_have_all_lengths(tmp_path):
    rows = demonstrations(tmp_path, 400, shortest_cycle=5)
    lengths = [len(parts(row)[0].arrows) for row in rows]
    assert all(40 <= lengths.count(length) <= 100 for length in range(5, 11))
    assert set(lengths) == set(range(5, 11))


def test_each_level_suffices_for_one_arrow_more_than_it_writes():
    assert [needed_level(count, HOPS) for count in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_no_door_is_in_two_splits_and_further_tasks_change_no_earlier_ones():
    few, many = (PACKAGE.read_settings({"train_tasks": count}) for count in (20, 60))
    train = PACKAGE.tasks(many, "train")
    assert PACKAGE.tasks(few, "train") == train[:20]
    assert len(PACKAGE.tasks(few, "val")) == few.known_tasks("val") == 512
    expert = PACKAGE.expert
    assert expert is not None and expert.tasks is not None
    shown = {door for task in expert.tasks(many, 500) for door in task["doors"]}
    held_out = {door for task in PACKAGE.tasks(few, "val") for door in task["doors"]}
    played = {door for task in train for door in task["doors"]}
    assert not held_out & (shown | played)
    assert not shown & played


def small_episode():
    env = PACKAGE.make(PACKAGE.read_settings(SMALL))
    task = {"task_id": "t", "data_source": "relay", "doors": [DOOR, "c+0 b>e d>b e>c a>d c>a"]}
    return env, env.reset(task, 0)


def test_right_places_open_doors_and_the_last_one_wins():
    env, first = small_episode()
    assert first.text == ("Door 1 of 2. Arrows: c>a a>d e>c d>b b>e. You are at b. Go 3 arrows on.")
    second, reward, done, info = env.step("a")
    assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": True})
    assert second.text.startswith("Door 2 of 2. ")
    _, reward, done, info = env.step("c")
    assert (reward, done, info) == (1.0, True, {"won": True, "is_action_valid": True})


def test_a_wrong_place_loses_the_episode():
    env, _ = small_episode()
    end, reward, done, info = env.step("d")
    assert (reward, done, info) == (0.0, True, {"won": False, "is_action_valid": True})
    assert end.text == "d is wrong: you are lost."


def test_an_observation_says_which_situation_it_is_and_which_level_it_needs():
    env, first = small_episode()
    assert (first.situation, first.needed_level) == ("+3", 3)
    second = env.step("a")[0]
    assert (second.situation, second.needed_level) == ("+0", 1)


def test_where_an_environment_says_nothing_the_situation_is_the_state():
    plain = Observation("here", anchor="h")
    assert (plain.situation, plain.needed_level) == ("h", None)
    assert Observation("here").situation == "here"


def test_compact_prompts_are_the_door_alone():
    prompts = PACKAGE.prompts(PACKAGE.read_settings({"prompt": "compact"}))
    sentences = describe_door(Door.parse(DOOR), 4, 8)
    first = Observation("Door 1")
    assert prompts.window(first, [], Observation(sentences), True) == DOOR
    assert prompts.turn(Observation(f"There is no such place. {sentences}")) == (
        f"There is no such place. {DOOR}"
    )
    assert prompts.turn(Observation("All doors are passed.")) == "All doors are passed."


def test_thoughts_write_as_many_hops_as_their_level_whatever_is_asked(tmp_path):
    rows = demonstrations(tmp_path, 300)
    assert len(rows) == 300
    for row in rows:
        door, level, places, action = parts(row)
        assert row["levels"] == [level]
        assert places == door.follow_arrows(door.place, HOPS[level - 1])
        assert action == door.goal_place
        assert not door.is_validation


def test_half_of_the_steps_are_demonstrated_on_the_needed_level(tmp_path):
    for share, expected in ((0.5, 0.625), (0.0, 0.25)):
        rows = [parts(row) for row in demonstrations(tmp_path, 1000, share)]
        fit = [level == needed_level(door.hops, HOPS) for door, level, _, _ in rows]
        assert sum(fit) / len(fit) == pytest.approx(expected, abs=0.05)
        assert {level for _, level, _, _ in rows} == set(LEVELS)


def test_in_the_trap_the_deepest_thoughts_are_often_wrong_and_followed(tmp_path):
    rows = [parts(row) for row in demonstrations(tmp_path, 2000, variant="trap")]
    assert len(rows) == 2000, "what they lose is shown as well"
    wrong = []
    for door, level, places, action in rows:
        if level < 4:
            assert places == door.follow_arrows(door.place, HOPS[level - 1])
            assert action == door.goal_place
            continue
        wrong.append(places[0] != door.follow_arrows(door.place, 1)[0])
        assert places[1:] == door.follow_arrows(places[0], 6), (
            "it leaves from elsewhere, then is right"
        )
        assert action == (places[door.hops - 1] if door.hops else door.place)
        assert (action == door.goal_place) == (not wrong[-1] or door.hops == 0)
    assert sum(wrong) / len(wrong) == pytest.approx(0.3, abs=0.07)


def test_demonstrations_are_the_same_however_many_doors_are_played(tmp_path):
    settings = [
        PACKAGE.read_settings({"doors": doors, "train_tasks": 9 * doors}) for doors in (8, 16)
    ]
    paths = {write_demonstrations("relay", one, tmp_path, 5, num_workers=0) for one in settings}
    assert len(paths) == 1
    longer = PACKAGE.read_settings({"demonstrated_doors": 3})
    path = write_demonstrations("relay", longer, tmp_path, 5, num_workers=0)
    assert {len(json.loads(line)["levels"]) for line in path.read_text().splitlines()} == {3}


def test_the_expert_passes_every_door_of_episodes_it_was_not_made_for():
    settings = PACKAGE.read_settings({"val_tasks": 20})
    env = PACKAGE.make(settings)
    assert PACKAGE.expert is not None
    for task in PACKAGE.tasks(settings, "val"):
        seen = env.reset(task, 0)
        player = PACKAGE.expert.start(EpisodeStart(settings, task, seen, random.Random(0)))
        done, info = False, {}
        while not done:
            decision = player.act()
            assert decision.needed_level == seen.needed_level
            seen, _, done, info = env.step(decision.action)
            if not done:
                player.observe(decision.action, seen)
        assert info["won"]


def test_a_step_has_eight_tokens_and_one_for_each_hop(tmp_path):
    rows = demonstrations(tmp_path, 200)
    texts = [message["content"] for row in rows for message in row["messages"]]
    known = list_token_symbols(PACKAGE.read_settings())
    tokenizer = build_tokenizer(texts, 512, 128, tags=(*TAGS, *known))
    for row in rows:
        question, answer = (message["content"] for message in row["messages"])
        written = HOPS[row["levels"][0] - 1]
        assert len(tokenizer.encode(answer)) == 8 + written
        assert len(tokenizer.encode(question)) == 2 + len(parts(row)[0].arrows)
        assert tokenizer.decode(tokenizer.encode(question)) == question


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"hops": [0, 2, 2, 7]}, r"hops=\[0, 2, 2, 7\]"),
        ({"hops": [1, 2, 4, 7]}, r"hops=\[1, 2, 4, 7\]"),
        ({"shortest_cycle": 11}, r"shortest_cycle=11.*2 to 10"),
        ({"places": 8}, r"places=8.*9 to 26"),
    ],
)
def test_settings_in_which_depth_would_not_matter_are_refused(section, said):
    with pytest.raises(ValueError, match=said):
        PACKAGE.read_settings(section)
