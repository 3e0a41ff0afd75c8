"""ScienceWorld: gold paths win with 100 points, tasks are split as the simulator splits them,
failure costs.
"""

import shutil
from typing import get_args

import pytest

from tests.helpers.refusals import mentions

pytest.importorskip("scienceworld")
if shutil.which("java") is None:
    pytest.skip("no Java", allow_module_level=True)

from agent_system.environments.env_package.scienceworld.package import (
    PACKAGE,
    list_tasks,
)
from agent_system.environments.env_package.scienceworld.settings import (
    VARIATIONS,
    Simplification,
    split_variations,
)
from agent_system.environments.manager import make_envs
from tests.helpers.library_gold import gold
from tests.helpers.play import make_config
from tests.helpers.winning import wins

read = PACKAGE.read_settings

QUICK = {"task_names": ["lifespan-shortest-lived"]}


@pytest.fixture(scope="module")
def env():
    env = PACKAGE.make(read({}))
    yield env
    env.close()


def test_the_gold_path_wins_through_the_collector(env):
    names = ["find-living-thing", "lifespan-shortest-lived"]
    data = wins("scienceworld", gold(env), groups=2, n=2, levels=True, task_names=names)
    assert data.non_tensor_batch["episode_rewards"] == pytest.approx(1.0)


def test_the_gold_path_wins_a_held_out_task_with_a_window_prompt(env):
    data = wins("scienceworld", gold(env), groups=1, n=1, history="window", split="val", **QUICK)
    assert {source for source in data.non_tensor_batch["data_source"]} == {
        "scienceworld/lifespan-shortest-lived"
    }


def test_variations_and_their_split_are_those_of_the_simulator(env):
    assert sorted(env._server.getTaskNames()) == sorted(VARIATIONS)
    assert {name: env._server.getTaskMaxVariations(name) for name in VARIATIONS} == VARIATIONS
    assert sum(VARIATIONS.values()) == 7207
    for name in ("boil", "identify-life-stages-2", "lifespan-shortest-lived"):  # 30, 10 and 125
        env.reset({"name": name, "variation": 0})
        for part, listed in (("train", "Train"), ("dev", "Dev"), ("test", "Test")):
            assert list(getattr(env._server, f"getVariations{listed}")()) == list(
                split_variations(name, part)
            )
    assert set(env._server.getPossibleSimplifications().split(", ")) | {"", "easy"} == set(
        get_args(Simplification)
    )


def test_tasks_of_all_experiments_are_disjoint_and_stable():
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


def test_variations_of_different_folds_are_different_worlds(env):
    """The pairs are those of train and dev that start alike: what is in the other rooms tells them
    apart.
    """
    for train, dev in ((21, 201), (30, 150)):
        assert train in split_variations("find-living-thing", "train")
        assert dev in split_variations("find-living-thing", "dev")
        (start, *rooms), (other_start, *other_rooms) = (
            tour(env, variation) for variation in (train, dev)
        )
        assert start == other_start and rooms != other_rooms and rooms == tour(env, train)[1:]


def tour(env, variation):
    """What one sees first, and in the hallway and the bedroom."""
    seen = [env.reset({"name": "find-living-thing", "variation": variation}).text]
    for room in ("hallway", "bedroom"):
        env.step(f"teleport to {room}")
        seen.append(env.step("look around")[0].text)
    return seen


def test_groups_start_alike():
    train, _ = make_envs(make_config("scienceworld", kwargs=QUICK, n=3, num_workers=1))
    observations, _ = train.reset(
        train.gen_batch(1, 2)
    )  # raises GroupMismatch unless they start alike
    train.close()
    assert len(set(observations["text"])) == 2


def test_an_episode_is_determined_by_its_task_whatever_neighbours_do(env):
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
        "go to kitchen",
        "wait1",
    ]
    start = env.reset(task, 1)
    alone = [env.step(action) for action in actions]
    neighbour.reset(other, 0)
    assert env.reset(task, 2) == start
    beside = []
    for action in actions:
        neighbour.step("wait1")
        beside.append(env.step(action))
    assert alone == beside
    assert [info["is_action_valid"] for *_, info in alone] == [False] * 7 + [True] * 2
    assert alone[6][0].anchor == start.anchor != alone[7][0].anchor
    neighbour.close()


def test_what_a_container_holds_is_listed_in_the_same_order_in_every_jvm(env):
    """The cups of paint in the art studio; without the JVM's one hash for all objects a look at
    them is another one nearly every time.
    """
    task = {"name": "find-animal", "variation": 220}
    other = PACKAGE.make(read({"java_options": "-Dother=jvm"}))
    looks = {one.reset(task, 0).text for one in (env, other, env, other, env)}
    other.close()
    assert len(looks) == 1 and "(containing blue paint)" in looks.pop()


def test_failing_takes_back_what_was_gained(env):
    task = list_tasks(read({"task_names": ["find-living-thing"]}), "train")[0]
    path = env.gold_path(task)
    env.reset(task, 0)
    gained = sum(env.step(action)[1] for action in path[:2])
    assert gained > 0
    _observation, reward, done, info = env.step("focus on air")
    assert done and not info["won"] and info["score"] == 0
    assert reward == pytest.approx(-gained)


def test_valid_actions_are_listed_where_they_are_asked_for(env):
    task = list_tasks(read(QUICK), "train")[0]
    assert "admissible_actions" not in env.reset(task).info
    listing = PACKAGE.make(read({"list_actions": True}))
    possible = listing.reset(task, 0).info["admissible_actions"]
    assert possible == sorted(set(possible)) and "reset task" not in possible
    assert listing.step(possible[0])[3]["is_action_valid"]
    listing.close()


def test_unknown_experiments_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, check=mentions("env.scienceworld.task_names=['cook']", "boil")):
        list_tasks(read({"task_names": ["cook"]}), "train")
    with pytest.raises(ValueError, check=mentions("task_names='boil'")):
        list_tasks(read({"task_names": "boil"}), "train")
