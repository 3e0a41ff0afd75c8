"""User-provided agent as an environment. One env step is a whole episode.

In that step the agent sends any number of requests to the policy through the endpoint. It knows
only a base URL, a key and OpenAI's API. The policy is trained on the sampled tokens of the replies.
An episode fails if the agent raises, exceeds its deadline or gives no reward.
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
from agent_system.environments.experts.episode import await_if_needed
from agent_system.environments.package import EnvPackage
from agent_system.reward_manager.custom import load_import_path

NAME = "agent"
LOOPBACK = "127.0.0.1"


class AgentEnv:
    """Environment that runs the agent in a separate thread.

    One process can therefore run many agents, which mostly wait for the policy.
    """

    placement = "process"  # the agent is user-provided code

    def __init__(self, settings: AgentSettings) -> None:
        self._agent = _load_user_function(settings, "path")
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=NAME)
        self._task: Task = {}
        self._seed = 0
        # A client must not send its API key to a proxy, so exclude the loopback addresses.
        for name in ("NO_PROXY", "no_proxy"):
            hosts = [host for host in os.environ.get(name, "").split(",") if host]
            if LOOPBACK not in hosts:
                os.environ[name] = ",".join([*hosts, LOOPBACK])

    def reset(self, task: Task, seed: int) -> Observation:
        """Store ``task`` and ``seed``. The observation is empty: the agent writes the prompts."""
        self._task = task
        self._seed = seed
        return Observation("", anchor=task["task_id"])

    async def step(self, action: str) -> Step:
        """Run the agent for the whole episode. ``action`` is the JSON of an ``EndpointAddress``.

        The reward is posted to the endpoint, so this method returns a reward of 0. Raises
        ``RewardRefused`` and the errors of the agent.
        """
        address = json.loads(action)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._run_agent, address)
        return Observation(""), 0.0, True, {}

    def close(self) -> None:
        """Shut the thread down without waiting for the agent."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run_agent(self, address: dict[str, str]) -> None:
        try:
            reward = await_if_needed(self._agent(task=self._task, seed=self._seed, **address))
        except SystemExit as error:  # it would end the process and so all other agents in it
            raise RuntimeError(
                f"the agent called exit with status {error.code}; it must return instead"
            ) from error
        if reward is not None:
            post_reward(address["base_url"], address["api_key"], reward)


def _load_user_function(settings: AgentSettings, key: str) -> Callable[..., Any]:
    import_path = getattr(settings, key)
    config_key = f"env.{NAME}.{key}"
    if not import_path:
        raise ValueError(
            f"{config_key}='': no function is given; allowed: FILE.py:NAME, MODULE:NAME; "
            f"fix: {config_key}=my_agent.py:{'play' if key == 'path' else key}"
        )
    return load_import_path(import_path, config_key)


def list_tasks(settings: AgentSettings, split: str) -> list[Task]:
    """Return the tasks of the user's function for ``split``, with a default ``data_source``."""
    _load_user_function(settings, "path")  # report a missing agent now, not when the workers start
    return [{"data_source": NAME, **task} for task in _load_user_function(settings, "tasks")(split)]


PACKAGE = EnvPackage(
    name=NAME,
    settings=AgentSettings,
    make=AgentEnv,  # pyright: ignore[reportArgumentType]  a step may be a coroutine
    tasks=list_tasks,
    prompts=lambda _settings: SingleTurnPrompts(),  # the agent writes all messages
    project=lambda text: (text, True),  # the agent interprets the replies
    stop=(),
    runs_agent=True,
    remarks=lambda: {"": "it needs env.agent.path, the function that starts your agent"},
)
