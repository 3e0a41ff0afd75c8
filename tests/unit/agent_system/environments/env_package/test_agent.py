"""The environment whose steps are plays of an agent, without a policy."""

import asyncio
import os

import pytest

from agent_system.environments.env_package.agent.package import PACKAGE, AgentEnv
from agent_system.environments.manager import make_envs
from tests.helpers.play import make_config

HOME = "tests.helpers.line_agent"
PLACES = {"path": f"{HOME}:play", "tasks": f"{HOME}:tasks"}


def test_tasks_are_those_of_the_users_function():
    train, val = make_envs(make_config("agent", kwargs=PLACES))
    assert train.task_list and val.task_list
    assert {task["data_source"] for task in train.task_list} == {"number_line"}


def test_a_task_without_a_source_is_from_the_agent(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def play(task, seed, base_url, api_key, model): return 1.0\n"
        "def tasks(split): return [{'task_id': split}]\n"
    )
    settings = PACKAGE.read_settings({"path": f"{file}:play", "tasks": f"{file}:tasks"})
    assert PACKAGE.tasks(settings, "val") == [{"data_source": "agent", "task_id": "val"}]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": ""}, r"env\.agent\.path=''.*env\.agent\.path=my_agent"),
        ({"tasks": ""}, r"env\.agent\.tasks=''.*env\.agent\.tasks=my_agent\.py:tasks"),
        ({"path": f"{HOME}:plai"}, r"env\.agent\.path='.*plai'"),
        ({"tasks": "no.py:tasks"}, r"env\.agent\.tasks='no\.py:tasks'"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(changes, said):
    with pytest.raises((ValueError, AttributeError, OSError), match=said):
        make_envs(make_config("agent", kwargs={**PLACES, **changes}))


def test_a_step_without_a_door_is_an_error():
    """As of a policy that plays without the collector."""
    env = AgentEnv(PACKAGE.read_settings(PLACES))
    seen = env.reset({"task_id": "one"}, 0)
    assert (seen.text, seen.state) == ("", "one")
    with pytest.raises(ValueError, match="Expecting value"):
        asyncio.run(env.step("left"))
    env.close()


def test_no_proxy_is_asked_for_an_address_of_this_machine(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    AgentEnv(PACKAGE.read_settings(PLACES)).close()
    assert os.environ["NO_PROXY"] == "example.org,127.0.0.1"
    assert os.environ["no_proxy"] == "127.0.0.1"
