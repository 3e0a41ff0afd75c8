"""Tests of relay: the doors, their required levels, and the thoughts of demonstrations."""

import json

import pytest

from agent_system.environments.env import Observation
from agent_system.environments.env_package.relay.doors import (
    DoorPuzzle,
    compute_hop_weights,
    compute_needed_level,
    describe_door,
    generate_doors,
)
from agent_system.environments.env_package.relay.expert import list_single_token_texts
from agent_system.environments.env_package.relay.package import PACKAGE
from agent_system.environments.experts.demonstrations import write_demonstrations
from rlvcr.levels import LEVELS, TAGS
from tests.helpers.expert_episodes import run_expert
from tests.helpers.refusals import has_problem
from verl.config.settings import ConfigError
from verl.models.new_policy import build_tokenizer

HOPS = (0, 2, 4, 7)
# The arrows of DOOR form the cycle a > d > b > e > c > a.
SMALL = {"places": 5, "hops": [0, 1, 2, 3], "doors": 2}
DOOR = "b+3 c>a a>d e>c d>b b>e"


def always(probability: float) -> list[list[float]]:
    return [[probability] * 4 for _ in range(8)]


def read_demonstrations(folder, count: int, share: float = 0.5, **section) -> list[dict]:
    settings = PACKAGE.read_settings({"prompt": "compact", **section})
    path = write_demonstrations(
        "relay", settings, folder, count, num_workers=0, needed_level_share=share
    )
    return [json.loads(line) for line in path.read_text().splitlines()]


def parse_demonstration(row: dict) -> tuple[DoorPuzzle, int, list[str], str]:
    """Return door, level, written places and action of a demonstration of one door."""
    question, answer = (message["content"] for message in row["messages"])
    head, _, action = answer.partition("</think><action>")
    level, _, thought = head.partition("</level><think>")
    chain = [hop.partition("=") for hop in thought.split()]
    assert [number for number, _, _ in chain] == [str(n) for n in range(1, len(chain) + 1)]
    places = [place for _, _, place in chain]
    number = int(level.removeprefix("<level>"))
    return DoorPuzzle.parse(question), number, places, action.removesuffix("</action>")


def test_tasks_with_the_same_door_have_different_ids():
    tasks = PACKAGE.tasks(PACKAGE.read_settings({**SMALL, "doors": 1}), "train")
    ids_by_door = {}
    for task in tasks:
        ids_by_door.setdefault(task["doors"][0], []).append(task["task_id"])
    repeated_ids = [ids for ids in ids_by_door.values() if len(ids) > 1]
    assert repeated_ids and all(ids[1] == f"{ids[0]}#2" for ids in repeated_ids)
    assert len({task["task_id"] for task in tasks}) == len(tasks) == 2000


def test_follow_arrows_returns_the_places_in_order():
    door = DoorPuzzle.parse(DOOR)
    assert str(door) == DOOR
    assert door.follow_arrows("b", 6) == ["e", "c", "a", "d", "b", "e"]
    assert door.answer_place == "a"
    assert DoorPuzzle.parse(DOOR.replace("+3", "+0")).answer_place == "b"
    assert door.all_places == list("abcde")


def test_state_does_not_depend_on_the_order_of_the_arrows():
    door = DoorPuzzle.parse(DOOR)
    assert door.state == DoorPuzzle.parse("b+3 b>e d>b e>c a>d c>a").state == "b>e>c>a>d+3"
    assert door.state != DoorPuzzle.parse(DOOR.replace("+3", "+2")).state


def test_drawn_doors_are_one_cycle_with_every_number_of_hops():
    drawn = generate_doors(PACKAGE.read_settings({"places": 12, "task_seed": 3}), "train")
    doors = [next(drawn) for _ in range(400)]
    assert all(len(set(door.follow_arrows(door.place, 12))) == 12 for door in doors)
    hops = [door.hops for door in doors]
    assert all(30 <= hops.count(count) <= 70 for count in range(8))
    assert not any(door.is_validation for door in doors)


def test_level_weights_change_how_often_each_level_is_needed():
    assert compute_hop_weights(PACKAGE.read_settings({})) is None
    settings = PACKAGE.read_settings({"level_weights": [4, 2, 1, 1], "train_tasks": 100})
    assert compute_hop_weights(settings) == [2, 2, 1, 1, 0.5, 0.5, 0.5, 0.5]
    doors = [
        DoorPuzzle.parse(text)
        for task in PACKAGE.tasks(settings, "train")
        for text in task["doors"]
    ]
    levels = [compute_needed_level(door.hops, HOPS) for door in doors]
    assert len(levels) == 800
    for level, expected in zip(LEVELS, (400, 200, 100, 100), strict=True):
        assert abs(levels.count(level) - expected) < 50
    for arrows, share in enumerate((200, 200, 100, 100, 50, 50, 50, 50)):
        assert abs(sum(door.hops == arrows for door in doors) - share) < 40


def test_demonstrated_cycles_have_all_lengths(tmp_path):
    rows = read_demonstrations(tmp_path, 400, shortest_cycle=5)
    lengths = [len(parse_demonstration(row)[0].arrows) for row in rows]
    assert all(40 <= lengths.count(length) <= 100 for length in range(5, 11))
    assert set(lengths) == set(range(5, 11))


def test_level_suffices_for_one_hop_more_than_it_writes():
    assert [compute_needed_level(count, HOPS) for count in range(8)] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_splits_share_no_door_and_more_tasks_keep_earlier_ones():
    few, many = (PACKAGE.read_settings({"train_tasks": count}) for count in (20, 60))
    train = PACKAGE.tasks(many, "train")
    assert PACKAGE.tasks(few, "train") == train[:20]
    assert len(PACKAGE.tasks(few, "val")) == few.count_configured_tasks("val") == 512
    expert = PACKAGE.expert
    assert expert is not None and expert.tasks is not None
    demonstrated = {door for task in expert.tasks(many, 500) for door in task["doors"]}
    held_out = {door for task in PACKAGE.tasks(few, "val") for door in task["doors"]}
    trained = {door for task in train for door in task["doors"]}
    assert not held_out & (demonstrated | trained)
    assert not demonstrated & trained


def start_small_episode():
    env = PACKAGE.make(PACKAGE.read_settings(SMALL))
    task = {"task_id": "t", "data_source": "relay", "doors": [DOOR, "c+0 b>e d>b e>c a>d c>a"]}
    return env, env.reset(task, 0)


def test_right_places_pass_doors_and_the_last_one_succeeds():
    env, first = start_small_episode()
    assert first.text == ("Door 1 of 2. Arrows: c>a a>d e>c d>b b>e. You are at b. Go 3 arrows on.")
    second, reward, done, info = env.step("a")
    assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": True})
    assert second.text.startswith("Door 2 of 2. ")
    _, reward, done, info = env.step("c")
    assert (reward, done, info) == (1.0, True, {"won": True, "is_action_valid": True})


def test_wrong_place_ends_the_episode_without_success():
    env, _ = start_small_episode()
    end, reward, done, info = env.step("d")
    assert (reward, done, info) == (0.0, True, {"won": False, "is_action_valid": True})
    assert end.text == "d is wrong: you are lost."


def test_observation_names_situation_and_required_level():
    env, first = start_small_episode()
    assert (first.situation, first.needed_level) == ("+3", 3)
    second = env.step("a")[0]
    assert (second.situation, second.needed_level) == ("+0", 1)


def test_situation_defaults_to_the_state():
    plain = Observation("here", anchor="h")
    assert (plain.situation, plain.needed_level) == ("h", None)
    assert Observation("here").situation == "here"


def test_compact_prompts_hold_only_the_door():
    prompts = PACKAGE.prompts(PACKAGE.read_settings({"prompt": "compact"}))
    sentences = describe_door(DoorPuzzle.parse(DOOR), 4, 8)
    first = Observation("Door 1")
    assert prompts.window(first, [], Observation(sentences), True) == DOOR
    assert prompts.turn(Observation(f"There is no such place. {sentences}")) == (
        f"There is no such place. {DOOR}"
    )
    assert prompts.turn(Observation("All doors are passed.")) == "All doors are passed."


def test_thoughts_write_the_number_of_hops_of_their_level(tmp_path):
    rows = read_demonstrations(tmp_path, 300)
    assert len(rows) == 300
    for row in rows:
        door, level, places, action = parse_demonstration(row)
        assert row["levels"] == [level]
        assert places == door.follow_arrows(door.place, HOPS[level - 1])
        assert action == door.answer_place
        assert not door.is_validation


def test_required_level_is_demonstrated_at_the_configured_share(tmp_path):
    for share, expected in ((0.5, 0.625), (0.0, 0.25)):
        rows = [parse_demonstration(row) for row in read_demonstrations(tmp_path, 1000, share)]
        is_required_level = [
            level == compute_needed_level(door.hops, HOPS) for door, level, _, _ in rows
        ]
        assert sum(is_required_level) / len(is_required_level) == pytest.approx(expected, abs=0.05)
        assert {level for _, level, _, _ in rows} == set(LEVELS)


def test_trap_variant_makes_level_4_thoughts_often_wrong(tmp_path):
    rows = [parse_demonstration(row) for row in read_demonstrations(tmp_path, 2000, variant="trap")]
    assert len(rows) == 2000, "episodes without success are included"
    is_wrong = []
    for door, level, places, action in rows:
        if level < 4:
            assert places == door.follow_arrows(door.place, HOPS[level - 1])
            assert action == door.answer_place
            continue
        is_wrong.append(places[0] != door.follow_arrows(door.place, 1)[0])
        assert places[1:] == door.follow_arrows(places[0], 6), "only the first place may be wrong"
        assert action == (places[door.hops - 1] if door.hops else door.place)
        assert (action == door.answer_place) == (not is_wrong[-1] or door.hops == 0)
    assert sum(is_wrong) / len(is_wrong) == pytest.approx(0.3, abs=0.07)


def test_demonstrations_do_not_depend_on_the_number_of_doors(tmp_path):
    settings_list = [
        PACKAGE.read_settings({"doors": doors, "train_tasks": 9 * doors}) for doors in (8, 16)
    ]
    paths = {
        write_demonstrations("relay", settings, tmp_path, 5, num_workers=0)
        for settings in settings_list
    }
    assert len(paths) == 1
    longer = PACKAGE.read_settings({"demonstrated_doors": 3})
    path = write_demonstrations("relay", longer, tmp_path, 5, num_workers=0)
    assert {len(json.loads(line)["levels"]) for line in path.read_text().splitlines()} == {3}


def test_expert_passes_every_door_of_validation_tasks():
    settings = PACKAGE.read_settings({"val_tasks": 20})
    env = PACKAGE.make(settings)
    for task in PACKAGE.tasks(settings, "val"):
        turns = run_expert(PACKAGE, env, settings, task)
        assert len(turns) == settings.doors and turns[-1].info["won"]
        assert all(turn.decision.needed_level == turn.observation.needed_level for turn in turns)


def test_turn_has_eight_tokens_plus_one_per_hop(tmp_path):
    rows = read_demonstrations(tmp_path, 200)
    texts = [message["content"] for row in rows for message in row["messages"]]
    known = list_single_token_texts(PACKAGE.read_settings())
    tokenizer = build_tokenizer(texts, 512, 128, tags=(*TAGS, *known))
    for row in rows:
        question, answer = (message["content"] for message in row["messages"])
        written = HOPS[row["levels"][0] - 1]
        assert len(tokenizer.encode(answer)) == 8 + written
        assert len(tokenizer.encode(question)) == 2 + len(parse_demonstration(row)[0].arrows)
        assert tokenizer.decode(tokenizer.encode(question)) == question


@pytest.mark.parametrize(
    ("section", "allowed_values"),
    [
        ({"hops": [0, 2, 2, 7]}, ""),
        ({"hops": [1, 2, 4, 7]}, ""),
        ({"shortest_cycle": 11}, "2 to 10"),
        ({"places": 8}, "9 to 26"),
    ],
)
def test_settings_where_the_level_would_not_matter_are_refused(section, allowed_values):
    ((name, value),) = section.items()
    expected = has_problem("out_of_range", f"env.relay.{name}", f"={value}", allowed_values)
    with pytest.raises(ConfigError, check=expected):
        PACKAGE.read_settings(section)
