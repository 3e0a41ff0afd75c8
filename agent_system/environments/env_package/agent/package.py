"""An agent of the user's own as an environment: one step is the whole play, in which the agent asks
the policy through the endpoint as often as it likes.

The agent is code that knows a base URL, a key and OpenAI's API. What it was answered is trained on
as it was sampled; an agent that raises, hangs or posts no reward breaks its play, as an environment
does.
"""

import asyncio
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agent_system.endpoint.reward_call import post_reward
from agent_system.environments.chat_prompts import SingleTurnPrompts
from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.agent.settings import AgentSettings
from agent_system.environments.experts.episode import now
from agent_system.environments.package import EnvPackage
from agent_system.reward_manager.custom import load_place

NAME = "agent"
LOOPBACK = "127.0.0.1"


class AgentEnv:
    """Runs the agent in a thread of its own, so that one process hosts many that wait for the
    policy.
    """

    placement = "process"  # the agent is the user's own code

    def __init__(self, settings: AgentSettings) -> None:
        self._agent = _function(settings, "path")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=NAME)
        self._task: Task = {}
        self._seed = 0
        _keep_from_proxies()

    def reset(self, task: Task, seed: int) -> Observation:
        """Take ``task``; what the policy is shown first, the agent will say."""
        self._task = task
        self._seed = seed
        return Observation("", anchor=task["task_id"])

    async def step(self, action: str) -> Step:
        """Let the agent play; ``action`` is the JSON of an ``EndpointAddress``. The endpoint
        receives the reward, and 0 is returned. Raises what the agent raises, and ``RewardRefused``.
        """
        door = json.loads(action)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._play, door)
        return Observation(""), 0.0, True, {}

    def close(self) -> None:
        """End the thread, once the agent is done."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _play(self, door: dict[str, str]) -> None:
        try:
            reward = now(self._agent(task=self._task, seed=self._seed, **door))
        except SystemExit as left:  # it would end the process, and its neighbours with it
            raise RuntimeError(f"the agent left with exit status {left.code}") from left
        if reward is not None:
            post_reward(door["base_url"], door["api_key"], reward)


def _keep_from_proxies() -> None:
    """A client that goes through a proxy must not hand it the key of a play."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        if LOOPBACK not in hosts:
            os.environ[name] = ",".join([*hosts, LOOPBACK])


def _function(settings: AgentSettings, key: str) -> Callable[..., Any]:
    place = getattr(settings, key)
    where = f"env.{NAME}.{key}"
    if not place:
        raise ValueError(
            f"{where}='': nothing to play; allowed: FILE.py:NAME, MODULE:NAME; "
            f"fix: {where}=my_agent.py:{'play' if key == 'path' else key}"
        )
    return load_place(place, where)


def tasks(settings: AgentSettings, split: str) -> list[Task]:
    """What the user's function gives for ``split``; a task without a source is from ``agent``."""
    _function(settings, "path")  # else a missing agent would be seen when workers start
    return [{"data_source": NAME, **task} for task in _function(settings, "tasks")(split)]


def prompts(settings: AgentSettings) -> SingleTurnPrompts:
    """None of its own, whatever the settings: the agent says it all."""
    del settings  # they change nothing here
    return SingleTurnPrompts()


def project(text: str) -> tuple[str, bool]:
    """The text as it is: what is an action in it, the agent knows."""
    return text, True


PACKAGE = EnvPackage(
    name=NAME,
    settings=AgentSettings,
    make=AgentEnv,  # pyright: ignore[reportArgumentType]  its step is a coroutine, as it may be
    tasks=tasks,
    prompts=prompts,
    project=project,
    stop=(),
    brings_agent=True,
)
