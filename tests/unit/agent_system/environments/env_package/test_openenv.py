"""Tests of OpenEnv: the same environment in this process and behind a server of its protocol."""

import json
from contextlib import ExitStack

import pytest

from agent_system.environments.env_package.openenv.package import (
    PACKAGE,
    OpenEnvEnv,
    ServerFailedError,
)
from agent_system.environments.manager import make_envs
from tests.helpers.number_line_world import make_config
from tests.helpers.openenv_server import GuessWorld, served
from tests.helpers.refusals import mentions
from tests.helpers.solvability import collect_successes, follow_script

read = PACKAGE.read_settings
LOCAL = {
    "environment": "tests.helpers.openenv_server:GuessWorld",
    "action": "tests.helpers.openenv_server:Guess",
}
SMALL = {"train_tasks": 6, "val_tasks": 3, "text_field": "text", "placement": "inline"}


@pytest.fixture(params=["local", "server"])
def section(request):
    with ExitStack() as stack:
        location = LOCAL if request.param == "local" else {"url": stack.enter_context(served())}
        yield {**SMALL, **location}


def make_policy(task):
    world = GuessWorld()
    world.reset(seed=task["seed"])
    wrong = 1 if world.hidden != 1 else 2
    return follow_script([str(wrong), str(world.hidden)])


def test_environment_is_solved_through_the_collector(section):
    data = collect_successes("openenv", make_policy, groups=1, n=2, **section)
    assert (data.non_tensor_batch["episode_rewards"] == 1.0).all()


def test_local_and_server_give_the_same_observations():
    def run_episode(location):
        env = OpenEnvEnv(read({**SMALL, "text_field": None, **location}))
        task = PACKAGE.tasks(env.settings, "train")[0]
        outcomes = [env.reset(task, 0).text, *(env.step(str(n))[:3] for n in range(1, 4))]
        env.close()
        return outcomes

    with served() as url:
        assert run_episode({"url": url}) == run_episode(LOCAL)


@pytest.mark.parametrize(
    ("text", "action", "is_well_formed"),
    [
        ("<action>\ndef f(n):\n    return  n\n</action>", "def f(n):\n    return  n", True),
        (f"<action>{'x = 1; ' * 500}y = 2</action>", f"{'x = 1; ' * 500}y = 2", True),
        ("<action>a</action><action>b</action>", "a", False),
        ("<action> </action>", "", False),
        ("<action>a  b", "a b", False),
        ("so\na  b", "a b", False),
    ],
)
def test_action_keeps_its_white_space_and_its_length(text, action, is_well_formed):
    assert PACKAGE.project(text) == (action, is_well_formed)


def test_action_without_the_right_fields_changes_nothing(section):
    env = OpenEnvEnv(read({**section, "action_field": ""}))
    start = env.reset(PACKAGE.tasks(env.settings, "train")[0], 0)
    for action in ("7", "{", '{"massage": "7"}', "[" * 100_000):
        observation, reward, done, info = env.step(action)
        assert (reward, done, info["is_action_valid"]) == (0.0, False, False)
        assert observation.state == start.state and observation.text != start.text
    _, _, _, info = env.step(json.dumps({"message": "0"}))
    assert info["is_action_valid"]
    env.close()


def test_failed_environment_raises_and_can_be_reset(section):
    env = OpenEnvEnv(read(section))
    task = PACKAGE.tasks(env.settings, "train")[0]
    env.reset(task, 0)
    with pytest.raises(RuntimeError, check=mentions("crashed")):
        env.step("crash")
    assert env.reset(task, 0).text == "1 to 8"
    env.close()


def test_unreachable_server_is_an_error():
    env = OpenEnvEnv(read({"url": "http://127.0.0.1:9", "timeout_s": 1.0}))
    task = PACKAGE.tasks(env.settings, "train")[0]
    with pytest.raises(OSError):
        env.reset(task, 0)
    with pytest.raises(ServerFailedError, check=mentions("step", "reset")):
        env.step("1")


@pytest.mark.parametrize(
    ("section", "part"),
    [
        ({}, "env.openenv.url="),
        ({"url": "http://127.0.0.1:1", **LOCAL}, "env.openenv"),
        ({"url": "127.0.0.1:8000"}, "env.openenv.url='127.0.0.1:8000'"),
        ({"environment": LOCAL["environment"]}, "env.openenv.action=MODULE:CLASS"),
        ({"environment": "nowhere", "action": LOCAL["action"]}, "nowhere"),
    ],
)
def test_settings_without_an_environment_are_refused(section, part):
    with pytest.raises(ValueError, check=mentions(part)):
        OpenEnvEnv(read(section))


def test_splits_have_disjoint_seeds_and_unknown_field_is_named():
    train, val = make_envs(make_config("openenv", kwargs={**LOCAL, **SMALL}, n=2))
    assert not {t["seed"] for t in train.task_list} & {t["seed"] for t in val.task_list}
    env = OpenEnvEnv(read({**LOCAL, "reward": "won", "text_field": "color"}))
    with pytest.raises(KeyError, check=mentions("text", "tries")):
        env.reset(train.task_list[0], 0)
