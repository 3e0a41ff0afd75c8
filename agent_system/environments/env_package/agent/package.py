"""User-provided agent as an environment. One env step is a whole episode.

In that step the agent sends any number of requests to the policy through the endpoint. It knows
only a base URL, a key and OpenAI's API. The policy is trained on the sampled tokens of the replies.
An episode fails if the agent raises an error, exceeds its deadline, or neither returns nor posts a
reward.
"""

import asyncio
import inspect
import json
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from agent_system.endpoint.reward_call import post_reward
from agent_system.environments.chat_prompts import SingleTurnPrompts
from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.agent.settings import AgentSettings
from agent_system.environments.package import EnvPackage
from agent_system.reward_manager.custom import check_arguments, load_import_path

NAME = "agent"
AGENT_ARGUMENTS = ("task", "seed", "base_url", "api_key", "model")
LOOPBACK_ADDRESS = "127.0.0.1"


class AgentEnv:
    """Environment that runs a user-provided agent in a separate thread.

    One process can run many agents, because they mostly wait for the policy.
    """

    placement = "process"  # the agent is user-provided code

    def __init__(self, settings: AgentSettings) -> None:
        self._agent_function = _load_user_function(settings, "path")
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=NAME)
        self._task: Task = {}
        self._seed = 0
        # Exclude the host of the endpoint from proxies: the agent must not send its API key to one.
        for proxy_variable in ("NO_PROXY", "no_proxy"):
            excluded_hosts = [
                host for host in os.environ.get(proxy_variable, "").split(",") if host
            ]
            if LOOPBACK_ADDRESS not in excluded_hosts:
                os.environ[proxy_variable] = ",".join([*excluded_hosts, LOOPBACK_ADDRESS])

    def reset(self, task: Task, seed: int) -> Observation:
        """Store ``task`` and ``seed``. The observation is empty: the agent writes the prompts."""
        self._task = task
        self._seed = seed
        return Observation("", anchor=task["task_id"])

    async def step(self, action: str) -> Step:
        """Run the agent for the whole episode.

        ``action`` is the JSON of an ``EndpointAddress``: base URL, key and model name of the server
        through which the agent queries the policy. The reward is posted to this server, so this
        method returns a reward of 0.

        Raises ``RewardRefusedError`` if the server does not accept the reward, and the errors of
        the agent.
        """
        endpoint_address = json.loads(action)
        await asyncio.get_running_loop().run_in_executor(
            self._executor, self._run_agent, endpoint_address
        )
        return Observation(""), 0.0, True, {}

    def close(self) -> None:
        """Shut the thread down without waiting for the agent."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run_agent(self, endpoint_address: dict[str, str]) -> None:
        try:
            reward = self._agent_function(task=self._task, seed=self._seed, **endpoint_address)
            if inspect.isawaitable(reward):
                # A separate event loop per episode cancels asyncio tasks that the agent left.
                reward = asyncio.run(_await_value(reward))
        except SystemExit as error:  # the exit would also end the other agents of this process
            raise RuntimeError(
                f"the agent called exit with status {error.code}; it must return instead"
            ) from error
        if reward is not None:
            post_reward(endpoint_address["base_url"], endpoint_address["api_key"], reward)


async def _await_value(value: Awaitable[Any]) -> Any:
    return await value


def _load_user_function(settings: AgentSettings, setting_name: str) -> Callable[..., Any]:
    import_path = getattr(settings, setting_name)
    config_key = f"env.{NAME}.{setting_name}"
    if not import_path:
        raise ValueError(
            f"{config_key}='': no function is given; allowed: FILE.py:NAME, MODULE:NAME; "
            f"fix: {config_key}=my_agent.py:"
            f"{'run_episode' if setting_name == 'path' else setting_name}"
        )
    return load_import_path(import_path, config_key)


def list_tasks(settings: AgentSettings, split: str) -> list[Task]:
    """Return the tasks of ``split`` from the user's function ``env.agent.tasks``."""
    agent_function = _load_user_function(settings, "path")  # report errors before workers start
    check_arguments(agent_function, f"env.{NAME}.path={settings.path!r}", AGENT_ARGUMENTS)
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
