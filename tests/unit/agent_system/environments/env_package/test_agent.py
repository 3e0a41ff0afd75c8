"""Tests of the environment whose steps are episodes of a user-provided agent, without a policy."""

import asyncio
import json
import os

import pytest

from agent_system.environments.env_package.agent.package import PACKAGE, AgentEnv
from agent_system.environments.manager import make_envs
from tests.helpers.number_line_world import make_config
from tests.helpers.refusals import mentions

HELPERS = "tests.helpers.number_line_agents"
IMPORT_PATHS = {"path": f"{HELPERS}:play", "tasks": f"{HELPERS}:tasks"}


def test_tasks_come_from_the_user_provided_function():
    train, val = make_envs(make_config("agent", kwargs=IMPORT_PATHS))
    assert train.task_list and val.task_list
    assert {task["data_source"] for task in train.task_list} == {"number_line"}


def test_task_without_data_source_gets_agent(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def play(task, seed, base_url, api_key, model): return 1.0\n"
        "def tasks(split): return [{'task_id': split}]\n"
    )
    settings = PACKAGE.read_settings({"path": f"{file}:play", "tasks": f"{file}:tasks"})
    assert PACKAGE.tasks(settings, "val") == [{"data_source": "agent", "task_id": "val"}]


def test_agent_takes_the_arguments_of_its_decorator(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import functools\n"
        "def adapt(function):\n"
        "    @functools.wraps(function)\n"
        "    def call(task, seed, base_url, api_key, model): return function(task)\n"
        "    return call\n"
        "@adapt\n"
        "def run_agent(task): return 1.0\n"
        "def tasks(split): return [{'task_id': split}]\n"
    )
    settings = PACKAGE.read_settings({"path": f"{file}:run_agent", "tasks": f"{file}:tasks"})
    assert [task["task_id"] for task in PACKAGE.tasks(settings, "val")] == ["val"]


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        ({"path": ""}, ValueError, ["env.agent.path=''", "env.agent.path=my_agent"]),
        ({"tasks": ""}, ValueError, ["env.agent.tasks=''", "env.agent.tasks=my_agent.py:tasks"]),
        ({"path": f"{HELPERS}:plai"}, ValueError, [f"env.agent.path='{HELPERS}:plai'"]),
        ({"path": f"{HELPERS}:tasks"}, ValueError, ["env.agent.path=", "base_url, api_key"]),
        ({"tasks": "no.py:tasks"}, FileNotFoundError, ["env.agent.tasks='no.py:tasks'"]),
    ],
)
def test_missing_agent_or_tasks_is_reported_before_the_start(changes, error, parts):
    with pytest.raises(error, check=mentions(*parts)):
        make_envs(make_config("agent", kwargs={**IMPORT_PATHS, **changes}))


def test_step_without_an_endpoint_address_is_an_error():
    """A policy without the collector passes plain text instead of an address."""
    env = AgentEnv(PACKAGE.read_settings(IMPORT_PATHS))
    observation = env.reset({"task_id": "one"}, 0)
    assert (observation.text, observation.state) == ("", "one")
    with pytest.raises(json.JSONDecodeError):
        asyncio.run(env.step("left"))
    env.close()


def test_local_addresses_are_excluded_from_the_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    AgentEnv(PACKAGE.read_settings(IMPORT_PATHS)).close()
    assert os.environ["NO_PROXY"] == "example.org,127.0.0.1"
    assert os.environ["no_proxy"] == "127.0.0.1"
