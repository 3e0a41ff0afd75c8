"""Tests of generated and official ALFWorld games.

Games are reproducible, validation games use other floor plans, and files are stored completely or
not at all.
"""

import json
import re
import subprocess
import sys

import pytest

from tests.helpers.refusals import mentions, suggests

pytest.importorskip("alfworld")

from agent_system.environments.env_package.alfworld import games, layout, store
from agent_system.environments.env_package.alfworld.package import PACKAGE
from agent_system.environments.env_package.alfworld.settings import TASK_TYPES, AlfworldSettings

read = PACKAGE.read_settings

ALL_KINDS = tuple(TASK_TYPES)


def make_section(tmp_path, **changes):
    base = {
        "data_dir": str(tmp_path),
        "source": "generated",
        "train_games": 12,
        "val_games": 12,
        "task_types": ALL_KINDS,
    }
    return {**base, **changes}


def draw_games(count, split="train", **changes):
    settings = read({"task_types": ALL_KINDS, **changes})
    return [games.generate_game(settings, split, index) for index in range(count)]


def write_official_game(game, root):
    """Write a generated game in the official folder layout."""
    goal = game["traj"]["pddl_params"]
    names = [goal["object_target"], goal["toggle_target"], goal["parent_target"]]
    kind = "-".join([game["traj"]["task_type"], *(name or "None" for name in names)])
    folder = root / f"{kind}-{game['scene']}" / f"trial_{game['hash']}"
    folder.mkdir(parents=True)
    (folder / "traj_data.json").write_text(json.dumps(game["traj"]))
    (folder / "game.tw-pddl").write_text(json.dumps(games.build_game_file_content(game)))


def drop_coordinates(game):
    """Return goal, places and object positions of a game without the coordinates in their names."""
    facts = re.findall(r"\(inReceptacle (\w+?)_bar_\S+ (\w+?)_bar_\S+\)", game["problem"])
    places = re.findall(r"(\w+?)_bar_\S+ - receptacle", game["problem"])
    return json.dumps([game["traj"]["pddl_params"], sorted(places), sorted(facts)])


def test_same_seed_gives_the_same_games_in_any_order():
    assert draw_games(12) == draw_games(12)
    assert draw_games(12)[7] == games.generate_game(
        AlfworldSettings.model_validate({"task_types": ALL_KINDS}), "train", 7
    )
    assert {game["hash"] for game in draw_games(12)}.isdisjoint(
        game["hash"] for game in draw_games(12, seed=1)
    )


def test_content_hash_is_the_same_on_every_machine():
    # A change here means that the same settings give other games: increase GENERATOR_VERSION.
    assert games.GENERATOR_VERSION == 1
    assert [game["hash"] for game in draw_games(3)] == FROZEN


def test_validation_games_use_other_floor_plans():
    train, held_out = draw_games(120), draw_games(120, split="val")
    assert {game["scene"] for game in train}.isdisjoint(game["scene"] for game in held_out)
    assert {game["scene"] for game in held_out} <= set(
        layout.load_alfworld_constants().TEST_SCENE_NUMBERS
    )
    assert len({drop_coordinates(game) for game in train}) > 100
    assert {drop_coordinates(game) for game in train}.isdisjoint(map(drop_coordinates, held_out))


def test_task_types_alternate_and_room_sizes_are_respected():
    drawn_games = draw_games(60, receptacles=(4, 6), objects=(2, 3))
    assert [game["kind"] for game in drawn_games[:6]] == list(ALL_KINDS)
    for game in drawn_games:
        declared = game["problem"].split("(:init")[0]
        assert (
            3 <= declared.count(" - receptacle") <= 6
        )  # a small floor plan may have fewer places than configured
        assert 3 <= declared.count(" - object") <= 3 + 3 + 1  # targets, others, a lamp


def test_target_never_starts_at_its_goal_and_places_are_distinct():
    import random

    settings = AlfworldSettings(receptacles=(3, 9))
    for number in range(60):
        kind = ALL_KINDS[number % 6]
        rng = random.Random(number)
        scene = rng.choice(layout.list_scenes(TASK_TYPES[kind], is_validation=False))
        room_and_goal = games.sample_room(layout.load_floor_plan(scene), kind, settings, rng)
        if room_and_goal is None:
            continue
        room, goal = room_and_goal
        target_places = [
            thing.receptacle.class_name
            for thing in room.objects
            if thing.class_name == goal.object_class
        ]
        assert goal.receptacle_class not in target_places
        assert len(target_places) >= (2 if kind == "two" else 1)
        assert all(layout.can_contain(place, goal.object_class) for place in target_places)
        places = [receptacle.location for receptacle in room.receptacles]
        assert len(places) == len(set(places))


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, check=mentions("receptacles", "[5, 3]")):
        read({"receptacles": [5, 3]})
    with pytest.raises(ValueError, check=suggests("clean")):
        read({"task_types": ["claen"]})


def test_official_task_names_are_accepted():
    by_official = read({"task_types": ["pick_two_obj_and_place"], "prompt": "full"})
    assert by_official.task_types == ("two",)


def test_generated_tasks_are_unique_json_with_their_source(tmp_path):
    train, val = (
        store.list_tasks(read(make_section(tmp_path)), "train"),
        store.list_tasks(read(make_section(tmp_path)), "val"),
    )
    assert json.loads(json.dumps(train)) == train
    assert len({task["task_id"] for task in train + val}) == 24
    assert {task["data_source"] for task in val} == {
        f"alfworld_generated/{kind}" for kind in ALL_KINDS
    }


def test_stored_games_are_reused(tmp_path):
    first = store.list_tasks(read(make_section(tmp_path)), "train")
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    assert store.list_tasks(read(make_section(tmp_path)), "train") == first
    assert {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()
    } == written
    assert store.list_tasks(read(make_section(tmp_path, objects=[1, 2])), "train") != first


def test_worker_without_the_files_draws_the_same_game(tmp_path):
    task = store.list_tasks(read(make_section(tmp_path / "a")), "val")[4]
    settings = read(make_section(tmp_path / "b"))
    game = store.load_game(settings, task)
    assert game == store.load_game(read(make_section(tmp_path / "a")), task)
    other = read(make_section(tmp_path / "b", seed=5))
    with pytest.raises(store.DamagedGameError):
        store.load_game(other, task)


def test_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    generate_game = games.generate_game

    def interrupt_at_5(settings, split, index):
        if index == 5:
            raise KeyboardInterrupt
        return generate_game(settings, split, index)

    monkeypatch.setattr(games, "generate_game", interrupt_at_5)
    with pytest.raises(KeyboardInterrupt):
        store.list_tasks(read(make_section(tmp_path)), "train")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    monkeypatch.undo()
    assert len(store.list_tasks(read(make_section(tmp_path)), "train")) == 12


def test_damaged_game_is_refused(tmp_path):
    task = store.list_tasks(read(make_section(tmp_path)), "train")[0]
    settings = read(make_section(tmp_path))
    path = store.GeneratedGames(settings, "train").split_folder / "games.jsonl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"(inReceptacle", b"(onReceptacle", 1))
    with pytest.raises(store.DamagedGameError):
        store.load_game(settings, task)


def test_official_games_are_preferred(tmp_path, monkeypatch):
    root = tmp_path / "official"
    for split, name in (("train", "train"), ("val", "valid_unseen"), ("val", "valid_seen")):
        for game in draw_games(6, split=split):
            write_official_game(game, root / store.OFFICIAL_FOLDER / name)
    monkeypatch.setenv("ALFWORLD_DATA", str(root))
    official = make_section(tmp_path, source="auto", task_types=["pick", "heat"])
    train = store.list_tasks(read(official), "train")
    assert sorted(task["data_source"] for task in train) == ["alfworld/heat", "alfworld/pick"]
    game = store.load_game(read(official), train[0])
    assert set(game) >= {"pddl_domain", "grammar", "pddl_problem"}
    unseen_split = {**official, "eval_dataset": "eval_out_of_distribution"}
    assert "valid_seen" in store.list_tasks(read(official), "val")[0]["task_id"]
    assert "valid_unseen" in store.list_tasks(read(unseen_split), "val")[0]["task_id"]
    seen_split = {**unseen_split, "val_split": "valid_seen"}
    assert "valid_seen" in store.list_tasks(read(seen_split), "val")[0]["task_id"]
    assert store.list_tasks(read(make_section(tmp_path)), "val")[0]["task_id"].startswith(
        "alfworld_generated/"
    )


def test_missing_official_games_error_names_the_download_command(tmp_path, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(FileNotFoundError, check=mentions("alfworld-download")):
        store.list_tasks(read(make_section(tmp_path, source="official")), "train")


def test_package_imports_neither_torch_nor_the_engine():
    code = (
        "import sys; from agent_system.environments.env_package.alfworld.package import PACKAGE;"
        "import agent_system.environments.experts.demonstrations;"
        "heavy = ('torch', 'ray', 'transformers', 'textworld');"
        "print([name for name in heavy if name in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert process.stdout.strip() == "[]"


FROZEN = ["76ac6631cfd6ad52f36f", "193a3f943e18ed26c444", "294246b7b1085e86aaee"]
