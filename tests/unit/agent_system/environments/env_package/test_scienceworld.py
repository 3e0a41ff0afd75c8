"""Tests of ScienceWorld.

Gold paths reach 100 points, tasks have the splits of the simulator, and failure costs points.
"""

import shutil
from typing import get_args

import pytest

from tests.helpers.refusals import has_problem
from verl.config.settings import ConfigError

pytest.importorskip("scienceworld")
if shutil.which("java") is None:
    pytest.skip("no Java", allow_module_level=True)

from agent_system.environments.env_package.scienceworld.package import (
    PACKAGE,
    list_tasks,
)
from agent_system.environments.env_package.scienceworld.settings import (
    VARIATION_COUNTS,
    Simplification,
    get_variations,
)
from agent_system.environments.manager import make_envs
from tests.helpers.library_expert_policies import gold
from tests.helpers.number_line_world import make_config
from tests.helpers.solvability import collect_successes

read = PACKAGE.read_settings

QUICK = {"task_names": ["lifespan-shortest-lived"]}


@pytest.fixture(scope="module")
def env():
    env = PACKAGE.make(read({}))
    yield env
    env.close()


def test_gold_path_succeeds_through_the_collector(env):
    names = ["find-living-thing", "lifespan-shortest-lived"]
    data = collect_successes(
        "scienceworld", gold(env), groups=2, n=2, levels=True, task_names=names
    )
    assert data.non_tensor_batch["episode_rewards"] == pytest.approx(1.0)


def test_gold_path_solves_a_validation_task_with_window_prompts(env):
    data = collect_successes(
        "scienceworld", gold(env), groups=1, n=1, history="window", split="val", **QUICK
    )
    assert {source for source in data.non_tensor_batch["data_source"]} == {
        "scienceworld/lifespan-shortest-lived"
    }


def test_variations_and_splits_equal_those_of_the_simulator(env):
    assert sorted(env._simulator.getTaskNames()) == sorted(VARIATION_COUNTS)
    assert {
        name: env._simulator.getTaskMaxVariations(name) for name in VARIATION_COUNTS
    } == VARIATION_COUNTS
    assert sum(VARIATION_COUNTS.values()) == 7207
    for name in ("boil", "identify-life-stages-2", "lifespan-shortest-lived"):  # 30, 10 and 125
        env.reset({"name": name, "variation": 0})
        for part, java_name in (("train", "Train"), ("dev", "Dev"), ("test", "Test")):
            assert list(getattr(env._simulator, f"getVariations{java_name}")()) == list(
                get_variations(name, part)
            )
    assert set(env._simulator.getPossibleSimplifications().split(", ")) | {"", "easy"} == set(
        get_args(Simplification)
    )


def test_splits_are_complete_and_stable():
    train, val, test = (
        list_tasks(read({}), "train"),
        list_tasks(read({}), "val"),
        list_tasks(read({"val_split": "test"}), "val"),
    )
    assert len(train) + len(val) + len(test) == 7207
    assert list_tasks(read({}), "train") == train
    first, again = (
        make_envs(make_config("scienceworld", kwargs=QUICK))[0].gen_batch(3, 4) for _ in range(2)
    )
    assert first.non_tensor_batch["task_id"].tolist() == again.non_tensor_batch["task_id"].tolist()


def test_train_and_dev_variations_are_different_worlds(env):
    """Each pair starts alike, and the other rooms differ."""
    for train, dev in ((21, 201), (30, 150)):
        assert train in get_variations("find-living-thing", "train")
        assert dev in get_variations("find-living-thing", "dev")
        (start, *rooms), (other_start, *other_rooms) = (
            observe_rooms(env, variation) for variation in (train, dev)
        )
        assert (
            start == other_start and rooms != other_rooms and rooms == observe_rooms(env, train)[1:]
        )


def observe_rooms(env, variation):
    """Return the texts of the start, the hallway and the bedroom."""
    texts = [env.reset({"name": "find-living-thing", "variation": variation}).text]
    for room in ("hallway", "bedroom"):
        env.step(f"teleport to {room}")
        texts.append(env.step("look around")[0].text)
    return texts


def test_groups_start_alike():
    train, _ = make_envs(make_config("scienceworld", kwargs=QUICK, n=3, num_workers=1))
    observations, _ = train.reset(
        train.gen_batch(1, 2)
    )  # raises GroupMismatch unless they start alike
    train.close()
    assert len(set(observations["text"])) == 2


def test_episode_depends_only_on_its_task(env):
    task, other = list_tasks(read({"task_names": ["boil"]}), "train")[:2]
    neighbour = PACKAGE.make(read({}))
    actions = [
        "open cupboard",
        "fly",
        "",
        "x" * 400,
        'say "hi"\n{}',
        "ö☃",
        "reset task",
        "Reset  the task",
        "go to kitchen",
        "wait1",
    ]
    start = env.reset(task, 1)
    expected = [env.step(action) for action in actions]
    neighbour.reset(other, 0)
    assert env.reset(task, 2) == start
    with_neighbour = []
    for action in actions:
        neighbour.step("wait1")
        with_neighbour.append(env.step(action))
    assert expected == with_neighbour
    assert [info["is_action_valid"] for *_, info in expected] == [False] * 8 + [True] * 2
    assert expected[7][0].anchor == start.anchor != expected[8][0].anchor
    neighbour.close()


def test_container_contents_have_the_same_order_in_every_jvm(env):
    """The order of the cups of paint differs between JVMs without the constant object hash."""
    task = {"name": "find-animal", "variation": 220}
    other = PACKAGE.make(read({"java_options": "-Dother=jvm"}))
    looks = {instance.reset(task, 0).text for instance in (env, other, env, other, env)}
    other.close()
    assert len(looks) == 1 and "(containing blue paint)" in looks.pop()


def test_failure_subtracts_the_earlier_rewards(env):
    task = list_tasks(read({"task_names": ["find-living-thing"]}), "train")[0]
    path = env.gold_path(task)
    env.reset(task, 0)
    gained = sum(env.step(action)[1] for action in path[:2])
    assert gained > 0
    _observation, reward, done, info = env.step("focus on air")
    assert done and not info["won"] and info["score"] == 0
    assert reward == pytest.approx(-gained)


def test_valid_actions_are_listed_on_request(env):
    task = list_tasks(read(QUICK), "train")[0]
    assert "admissible_actions" not in env.reset(task).info
    listing = PACKAGE.make(read({"list_actions": True}))
    possible = listing.reset(task, 0).info["admissible_actions"]
    assert possible == sorted(set(possible)) and "reset task" not in possible
    assert listing.step(possible[0])[3]["is_action_valid"]
    listing.close()


def test_unknown_experiment_error_lists_the_known_ones():
    key = "env.scienceworld.task_names"
    with pytest.raises(ConfigError, check=has_problem("unknown_name", key, "['cook']", "boil")):
        list_tasks(read({"task_names": ["cook"]}), "train")
    with pytest.raises(ConfigError, check=has_problem("wrong_type", key, "'boil'")):
        list_tasks(read({"task_names": "boil"}), "train")
