"""Tests of TextWorldExpress: gold paths succeed, and tasks are the folds of the library."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.helpers.refusals import has_problem

pytest.importorskip("textworld_express")
if shutil.which("java") is None:
    pytest.skip("no Java", allow_module_level=True)

from agent_system.environments.env_package.textworld_express import package
from agent_system.environments.env_package.textworld_express.package import (
    GAME_NUMBERS_BY_FOLD,
    PACKAGE,
    TextWorldExpressEnv,
    list_tasks,
)
from agent_system.environments.env_package.textworld_express.settings import (
    TextWorldExpressSettings,
)
from agent_system.environments.env_registry import read_env_settings
from agent_system.environments.manager import make_envs
from agent_system.environments.tasks import check_disjoint_splits
from tests.helpers.library_expert_policies import gold
from tests.helpers.number_line_world import make_config
from tests.helpers.solvability import collect_successes
from verl.config.load import load_config

read = PACKAGE.read_settings

SMALL = {
    "cookingworld": {"params": "numLocations=3,numIngredients=2,numDistractorItems=1"},
    "coin": {"params": "numLocations=4"},
    "twc": {"params": "numLocations=2,numItemsToPutAway=2"},
    "sorting": {},
}


def make_task(game, number=0):
    """Return a task of the train fold without listing all tasks."""
    task_id = f"{game}/train/{number}"
    return {
        "task_id": task_id,
        "data_source": game,
        "game": game,
        "params": "",
        "fold": "train",
        "number": number,
    }


@pytest.fixture
def env():
    env = PACKAGE.make(read({}))
    yield env
    env.close()


@pytest.mark.parametrize(
    ("game", "history", "levels"),
    [
        ("cookingworld", "append", False),
        ("coin", "window", True),
        ("twc", "append", True),
        ("sorting", "window", False),
    ],
)
def test_gold_path_succeeds_through_the_collector(env, game, history, levels):
    data = collect_successes(
        "textworld_express", gold(env), history=history, levels=levels, game=game, **SMALL[game]
    )
    assert data.non_tensor_batch["episode_rewards"] == pytest.approx(1.0)


def test_gold_path_solves_validation_games(env):
    collect_successes(
        "textworld_express", gold(env), groups=3, n=1, split="val", game="coin", **SMALL["coin"]
    )


def test_groups_start_alike_and_same_seed_gives_the_same_tasks():
    config = make_config("textworld_express", kwargs={"game": "coin", **SMALL["coin"]}, n=3)
    train, val = make_envs(config)
    batch = train.gen_batch(1, 3)
    observations, infos = train.reset(batch)  # raises GroupMismatch unless they start alike
    assert len(set(observations["text"])) == 3 and all(info["admissible_actions"] for info in infos)
    outcome = train.step(["<action>open fridge</action>"] * len(batch))
    assert outcome[3][0].keys() >= {"won", "is_action_valid", "admissible_actions"}
    train.close()
    again = make_envs(config)[0].gen_batch(1, 3)
    assert again.non_tensor_batch["task_id"].tolist() == batch.non_tensor_batch["task_id"].tolist()
    check_disjoint_splits(train.task_list, val.task_list)


def test_tasks_equal_the_folds_of_the_library(env):
    env.reset(
        list_tasks(read({"game": "simonsays"}), "train")[0]
    )  # no game of simonsays is a duplicate
    for fold, split, settings in (
        ("Train", "train", {}),
        ("Dev", "val", {}),
        ("Test", "val", {"val_split": "test"}),
    ):
        numbers = [
            task["number"] for task in list_tasks(read({"game": "simonsays", **settings}), split)
        ]
        assert numbers == list(getattr(env._server, f"getSeeds{fold}")())


def read_world(env, task):
    """Return the start text of a game and the simulator's description of each room."""
    start = env.reset(task, 0)
    return start.text, *sorted(room.toJSON() for room in env._server.game().locations())


def test_default_config_has_no_duplicate_games(env):
    settings = read_env_settings(load_config("textworld_express").env)
    assert isinstance(settings, TextWorldExpressSettings)
    train, val = list_tasks(settings, "train"), list_tasks(settings, "val")
    check_disjoint_splits(train, val)
    assert len(train) > 500 and len(val) > 500
    contents = [read_world(env, task) for task in train[:150] + val[:150]]
    assert len(set(contents)) == len(contents)
    whole_fold = [
        read_world(env, {**train[0], "number": number})
        for number in GAME_NUMBERS_BY_FOLD["train"][:150]
    ]
    assert len(set(whole_fold)) < len(
        whole_fold
    )  # the fold must hold duplicates, or the test shows nothing


def test_tasks_are_the_same_in_another_process():
    section = {"game": "coin", **SMALL["coin"]}
    code = (
        f"import json; from {package.__name__} import PACKAGE; "
        f"print(json.dumps(PACKAGE.tasks(PACKAGE.read_settings({section!r}), 'train')))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(process.stdout) == list_tasks(read(section), "train")


@pytest.mark.parametrize("game", TextWorldExpressSettings.list_variants())
def test_second_instance_does_not_change_a_game(game):
    """Two instances of ``sorting`` in one JVM would disturb each other."""
    env = TextWorldExpressEnv(read({"game": game}))
    neighbour = TextWorldExpressEnv(read({"game": game}))
    task = make_task(game)
    path = env.gold_path(task)
    env.reset(task, 0)
    info = {}
    for action in path:
        *_, info = env.step(action)
        neighbour.reset(task, 0)
    assert info["won"]
    env.close()
    neighbour.close()


def test_episode_depends_only_on_its_task(env):
    task, other = make_task("twc"), make_task("twc", 1)
    neighbour = PACKAGE.make(read({}))
    actions = ["look around", "INVENTORY", "fly to the moon", "", "x" * 400, 'say "hi"\n{}', "ö☃"]
    start = env.reset(task, 1)
    expected = [env.step(action) for action in actions]
    neighbour.reset(other, 0)
    assert env.reset(task, 2) == start
    with_neighbour = []
    for action in actions:
        neighbour.step(neighbour.reset(other, 0).info["admissible_actions"][0])
        with_neighbour.append(env.step(action))
    assert expected == with_neighbour
    assert [info["is_action_valid"] for *_, info in expected] == [True, True] + [False] * 5
    assert all(observation.anchor == start.anchor for observation, *_ in expected)
    neighbour.close()


def test_reward_is_the_change_of_the_score(env):
    task = make_task("twc")
    path = env.gold_path(task)
    env.reset(task, 0)
    rewards, scores = [], []
    done = False
    for action in path:
        _, reward, done, info = env.step(action)
        rewards.append(reward)
        scores.append(info["score"])
    assert done and sum(rewards) == pytest.approx(1.0) and scores[-1] == 1.0
    assert 0 < scores[len(scores) // 2] < 1.0 and all(0 <= reward < 1 for reward in rewards)


@pytest.mark.parametrize(
    ("params", "code", "key"),
    [
        ("numLocations=no", "invalid_syntax", "env.textworld_express.params"),
        ("numLocations=99", "out_of_range", "env.textworld_express"),
        ("rooms=3", "out_of_range", "env.textworld_express"),
    ],
)
def test_impossible_params_are_refused_before_the_start(params, code, key):
    with pytest.raises(ValueError, check=has_problem(code, key, params)):
        list_tasks(read({"params": params}), "train")


def test_prompts_list_the_possible_actions_by_default(env):
    observation = env.reset(make_task("coin"))
    assert "Possible actions: " in PACKAGE.prompts(read({})).first(observation, levels=False)
    assert "Possible actions: " not in PACKAGE.prompts(read({"list_actions": False})).first(
        observation, levels=False
    )


def test_game_with_two_objects_of_one_name_is_excluded():
    """Game 10412 has two cucumbers: the command takes the first and the task needs the second."""
    settings = TextWorldExpressSettings(game="peckingorder")
    env = TextWorldExpressEnv(settings)
    ambiguous = {**make_task("peckingorder"), "fold": "dev", "number": 10412}
    assert env.has_ambiguous_actions(ambiguous)
    listed = env.reset(ambiguous, 0).info["admissible_actions"]
    assert listed.count("take cucumber") == 1
    env.close()
    numbers = {task["number"] for task in list_tasks(settings, "val")}
    assert 10412 not in numbers and len(numbers) > 800
