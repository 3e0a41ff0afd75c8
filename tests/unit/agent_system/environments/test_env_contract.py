"""Tests of the contract that every environment keeps.

Each environment can be solved through the collector, the members of a group start alike, and tasks
are stable. To add an environment, add a small section to ``CASES`` and a policy that succeeds to
``tests/helpers/expert_policies.py``.
"""

import json
import os
import subprocess
import sys

import pytest

from agent_system.environments.env import Observation
from agent_system.environments.env_registry import get_package, read_env_settings
from agent_system.environments.manager import make_envs
from agent_system.environments.pool import wire as pool_wire
from rlvcr.levels import DEFAULT_PROMPTS, LEVELS
from tests.helpers.expert_policies import GOLD
from tests.helpers.number_line_world import make_config
from tests.helpers.refusals import has_problem
from tests.helpers.solvability import collect_successes
from verl.config.load import load_config
from verl.config.settings import ConfigError

CASES = {
    "exam": {"questions": 5, "train_tasks": 24, "val_tasks": 6},
    "frozen_lake": {"size": 5, "train_maps": 24, "val_maps": 6},
    "recall": {"pages": 4, "train_tasks": 24, "val_tasks": 6},
    "relay": {"doors": 5, "train_tasks": 24, "val_tasks": 6},
    "search": {},
    "shop": {"products": 60},
    "sokoban": {"train_levels": 24, "val_levels": 6, "num_boxes": 2},
}
NAMES = sorted(CASES)


def make_managers(name, seed=0):
    return make_envs(make_config(name, kwargs=CASES[name], seed=seed, n=3))


def make_env_and_task(name, task=0):
    train, _ = make_managers(name)
    return train.package.make(train.settings), train.task_list[task]


@pytest.mark.parametrize("levels", [False, True], ids=["plain", "levels"])
@pytest.mark.parametrize("history", ["append", "window"])
@pytest.mark.parametrize("name", NAMES)
def test_environment_is_solved_through_the_collector(name, history, levels):
    data = collect_successes(
        name, GOLD[name], groups=3, n=2, history=history, levels=levels, **CASES[name]
    )
    assert set(data.non_tensor_batch["episode_rewards"]) == {1.0}
    if levels:
        assert {step.level for steps in data.non_tensor_batch["steps"] for step in steps} == {2}


@pytest.mark.parametrize("name", NAMES)
def test_validation_tasks_can_be_solved(name):
    collect_successes(name, GOLD[name], groups=5, n=1, split="val", **CASES[name])


@pytest.mark.parametrize("name", NAMES)
def test_group_members_share_task_and_start_state(name):
    train, _ = make_managers(name)
    batch = train.gen_batch(1, 4)
    observations, infos = train.reset(batch)  # raises GroupMismatch unless they start alike
    train.close()
    columns = batch.non_tensor_batch
    starts = {}
    for uid, task, anchor in zip(
        columns["uid"], columns["task_id"], observations["anchor"], strict=True
    ):
        starts.setdefault(uid, set()).add((task, anchor))
    assert len(starts) == 4 and all(len(members) == 1 for members in starts.values())
    assert len(set.union(*starts.values())) == 4, "different tasks start from different states"
    assert all(info["admissible_actions"] for info in infos)


@pytest.mark.parametrize("name", NAMES)
def test_train_and_validation_share_no_task(name):
    train, val = make_managers(name)

    def contents(tasks):
        return {
            json.dumps({k: v for k, v in task.items() if k != "task_id"}, sort_keys=True)
            for task in tasks
        }

    assert len(contents(train.task_list)) == len(train.task_list) and len(
        contents(val.task_list)
    ) == len(val.task_list)
    assert not contents(train.task_list) & contents(val.task_list)
    assert len(val.task_list) < len(train.task_list)


@pytest.mark.parametrize("name", NAMES)
def test_same_config_and_seed_give_the_same_tasks(name):
    first, again, other = (
        make_managers(name, seed)[0].gen_batch(2, 4).non_tensor_batch for seed in (0, 0, 1)
    )
    assert first["task_id"].tolist() == again["task_id"].tolist()
    assert first["env_seed"].tolist() == again["env_seed"].tolist()
    assert first["task_id"].tolist() != other["task_id"].tolist()
    val_managers = [make_managers(name, seed)[1] for seed in (0, 1)]
    assert val_managers[0].panel_hash == val_managers[1].panel_hash, (
        "runs with other seeds use the same validation set"
    )


def test_another_process_makes_the_same_tasks():
    """Tasks do not depend on the hash seed of the process."""
    code = (
        "import hashlib, json, sys\n"
        "from agent_system.environments.env_registry import get_package\n"
        "cases = json.loads(sys.argv[1])\n"
        "packages = [(get_package(name), section) for name, section in cases.items()]\n"
        "read = [(p, p.read_settings(section)) for p, section in packages]\n"
        "tasks = [p.tasks(settings, s) for p, settings in read for s in ('train', 'val')]\n"
        "print(hashlib.sha256(json.dumps(tasks).encode()).hexdigest())"
    )
    command = [sys.executable, "-c", code, json.dumps(CASES)]
    digests = {
        subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1 and len(digests.pop()) == 65


@pytest.mark.parametrize("name", NAMES)
def test_episode_depends_only_on_task_and_seed(name):
    env, task = make_env_and_task(name)
    other = make_env_and_task(name, 1)[1]

    def run_episode():
        start = env.reset(task, 5)
        outcomes: list[tuple[object, ...]] = [(start.text, start.anchor)]
        for _ in range(4):
            action = (start.info["admissible_actions"])[-1]
            observation, reward, done, info = env.step(action)
            outcomes.append(
                (observation.text, observation.anchor, reward, done, info["is_action_valid"])
            )
            if done:
                break
        return outcomes

    first = run_episode()
    env.reset(other, 5)
    assert run_episode() == first


@pytest.mark.parametrize(
    "action", ["", "no such thing", "search[]", "click[nothing]", "x" * 400, "[[["]
)
@pytest.mark.parametrize("name", NAMES)
def test_invalid_action_changes_nothing_and_is_marked(name, action):
    env, task = make_env_and_task(name)
    start = env.reset(task, 0)
    observation, reward, done, info = env.step(action)
    assert (reward, done, info) == (0.0, False, {"won": False, "is_action_valid": False})
    assert observation.anchor == start.anchor and observation.text != start.text
    assert observation.info["admissible_actions"] == start.info["admissible_actions"]


@pytest.mark.parametrize("name", NAMES)
def test_tasks_and_observations_can_be_serialised(name):
    env, task = make_env_and_task(name)
    assert json.loads(json.dumps(task)) == task
    observation = env.reset(task, 0)
    decoded = pool_wire.decode(pool_wire.encode({"ok": pool_wire.pack_observation(observation)}))
    assert Observation(*decoded["ok"]) == observation
    env.close()


@pytest.mark.parametrize("name", NAMES)
def test_prompts_explain_plain_actions_and_the_four_levels(name):
    train, _ = make_managers(name)
    prompts = train.package.prompts(train.settings)
    plain, levels = prompts.system(False), prompts.system(True)
    assert plain is not None and levels is not None
    assert "<level>" not in plain and "<action>" in plain
    assert all(f"Level {level}: {DEFAULT_PROMPTS[level]}" in levels for level in LEVELS)
    example = plain.rpartition("<action>")[2].removesuffix("</action>")
    assert train.package.project(f"<think>so</think><action> {example} </action>") == (
        example,
        True,
    )


@pytest.mark.parametrize("name", NAMES)
def test_unknown_key_of_the_section_is_refused(name):
    key = next(iter(CASES[name]), "topk")
    expected = has_problem("unknown_key", f"env.{name}.{key}x", f"env.{name}.{key}=3")
    with pytest.raises(ConfigError, check=expected):
        make_envs(make_config(name, kwargs={f"{key}x": 3}))


@pytest.mark.parametrize("name", NAMES)
def test_section_may_be_named_after_the_environment(name):
    config = make_config(name, kwargs={})
    setattr(config.env, name, dict(CASES[name]))
    expected = get_package(name).read_settings({"max_steps": 12, "seed": 0, **CASES[name]})
    assert read_env_settings(config.env) == expected


@pytest.mark.parametrize("name", NAMES)
def test_config_of_the_same_name_makes_the_environment(name):
    config = load_config(name)
    assert config.env.env_name == name
    train, val = make_envs(config)
    assert len(train.task_list) >= 100 and len(val.validation_set) == config.env.val_tasks


def test_webshop_is_an_alias_of_shop():
    assert get_package("webshop") is get_package("shop")
