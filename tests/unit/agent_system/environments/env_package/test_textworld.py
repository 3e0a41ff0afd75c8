"""Tests of TextWorld.

Generated games can be solved through the collector, are stored by content hash, and are
reproducible.
"""

import json
import subprocess

import pytest

from tests.helpers.refusals import mentions

pytest.importorskip("textworld")


from agent_system.environments.env_package.textworld import store as store_module
from agent_system.environments.env_package.textworld.package import (
    PACKAGE,
    TextWorldEnv,
    is_game_command,
    list_tasks,
    open_game_store,
)
from agent_system.environments.env_package.textworld.store import DamagedStoreError
from agent_system.environments.manager import make_envs
from tests.helpers.library_expert_policies import gold
from tests.helpers.number_line_world import make_config
from tests.helpers.solvability import collect_successes

read = PACKAGE.read_settings

GAMES = {
    "treasure_hunter": {"level": 2},
    "cooking": {"recipe": 1, "take": 1, "cook": True},
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("textworld"))


@pytest.fixture
def section(data_dir):
    def make_section(game="treasure_hunter", **settings):
        return {
            "game": game,
            "train_games": 2,
            "val_games": 1,
            "data_dir": data_dir,
            **GAMES[game],
            **settings,
        }

    return make_section


@pytest.mark.parametrize(
    ("game", "history", "levels"),
    [("treasure_hunter", "window", True), ("cooking", "append", False)],
)
def test_walkthrough_succeeds_through_the_collector(section, game, history, levels):
    env = TextWorldEnv(read(section(game)))
    data = collect_successes(
        "textworld", gold(env), groups=2, n=2, history=history, levels=levels, **section(game)
    )
    env.close()
    assert data.non_tensor_batch["episode_rewards"] == pytest.approx(1.0)


def test_walkthrough_solves_the_validation_game(section):
    env = TextWorldEnv(read(section()))
    collect_successes("textworld", gold(env), groups=1, n=2, split="val", **section())
    env.close()


def test_groups_start_alike_and_splits_differ_in_content(section):
    train, val = make_envs(make_config("textworld", kwargs=section(), n=2, num_workers=1))
    observations, infos = train.reset(
        train.gen_batch(1, 2)
    )  # raises GroupMismatch unless they start alike
    train.close()
    assert len(set(observations["text"])) == 2 and all(info["admissible_actions"] for info in infos)
    hashes = [task["game"] for task in train.task_list + val.task_list]
    assert len(set(hashes)) == len(hashes) == 3


def test_games_are_generated_and_compiled_once(section, monkeypatch):
    expected = list_tasks(read(section()), "train")
    store = open_game_store(read(section()))
    path = store.get_compiled_path(expected[0]["game"])
    before = path.stat()

    def refuse(*args, **kwargs):
        raise AssertionError("no game must be generated again")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(store_module.GameStore, "_compile_game", refuse)
    assert list_tasks(read(section()), "train") == expected
    assert store.get_compiled_path(expected[0]["game"]) == path and path.stat() == before


def test_games_do_not_depend_on_the_folder(section, tmp_path):
    first = {
        split: [task["game"] for task in list_tasks(read(section()), split)]
        for split in ("train", "val")
    }
    again = {
        split: [t["game"] for t in list_tasks(read(section(data_dir=str(tmp_path))), split)]
        for split in ("train", "val")
    }
    assert again == first


def test_damaged_game_is_refused(section, tmp_path):
    settings = read(section())
    name = open_game_store(settings).list_game_hashes("train")[0]
    source = open_game_store(settings).games_folder / f"{name}.json"
    store = open_game_store(read(section(data_dir=str(tmp_path))))
    store.games_folder.mkdir()
    game = json.loads(source.read_text())
    game["objective"] += " Or not."
    for content in (source.read_text()[:1000], json.dumps(game)):
        (store.games_folder / f"{name}.json").write_text(content)
        with pytest.raises(DamagedStoreError, check=mentions(f"{name}.json", tmp_path)):
            store.get_compiled_path(name)
    assert not (store.games_folder / f"{name}.z8").exists()


def test_episode_depends_only_on_its_task(section):
    task, other = list_tasks(read(section()), "train")[:2]
    env, neighbour = PACKAGE.make(read(section())), PACKAGE.make(read(section()))
    actions = ["look", "fly to the moon", "", "x" * 400, "ö☃ {}", "inventory"]
    start = env.reset(task, 1)
    expected = [env.step(action) for action in actions]
    neighbour.reset(other, 0)
    env.reset(other, 0)
    assert env.reset(task, 2) == start
    with_neighbour = []
    for action in actions:
        neighbour.step("look")
        with_neighbour.append(env.step(action))
    assert expected == with_neighbour
    assert [info["is_action_valid"] for *_, info in expected] == [True] + [False] * 4 + [True]
    assert all(observation.anchor == start.anchor for observation, *_ in expected)
    move = next(
        action
        for action in start.info["admissible_actions"]
        if action.startswith(("go", "open", "take"))
    )
    assert env.step(move)[0].anchor != start.anchor
    assert "TEXTWORLD" not in start.text and "$$" not in start.text and not start.text.endswith(">")
    env.close()
    neighbour.close()


def test_impossible_settings_are_refused():
    with pytest.raises(
        ValueError, check=mentions("env.textworld.level=31", "treasure_hunter", "1 to 30")
    ):
        list_tasks(read({"level": 31}), "train")
    with pytest.raises(
        ValueError, check=mentions("env.textworld.take=2", "env.textworld.recipe=1")
    ):
        list_tasks(read({"game": "cooking", "take": 2}), "train")


@pytest.mark.parametrize(
    "action",
    [
        "save",
        "script on",
        "look. transcript",
        "QUIT",
        "restart",
        "tw-extra-infos all",
        "\\help",
        "a\0b",
    ],
)
def test_interpreter_command_is_not_in_game(action):
    """Such a command would write files, prompt for input or wait without end."""
    assert not is_game_command(action)


def test_interpreter_command_changes_nothing_and_writes_no_file(section, tmp_path, monkeypatch):
    settings = read(section())
    env, task = TextWorldEnv(settings), list_tasks(settings, "val")[0]
    start = env.reset(task)
    monkeypatch.chdir(tmp_path)
    for action in ("save", "script on", "played.txt", "\\boxed{}"):
        observation, reward, done, info = env.step(action)
        assert (reward, done, info["is_action_valid"]) == (0.0, False, False)
        assert (
            observation.text == "That's not a verb I recognise."
            and observation.anchor == start.anchor
        )
    env.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "action", ["", "look", "take the milk", 'say "hi, there!"', "go north; wait"]
)
def test_game_command_is_in_game(action):
    assert is_game_command(action)
