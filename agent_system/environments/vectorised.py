"""Environments in lock-step: all are reset together and stepped together.

Training does not use this module, because its trajectories do not wait for each other.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.pool.environment_pool import EnvironmentPool, PoolSession
from agent_system.environments.settings import EnvSettings

if TYPE_CHECKING:
    from verl.config.schema.env import EnvConfig

T = TypeVar("T")
# Seconds that one call may take in addition to the timeouts of ``reset`` and ``step``.
EXTRA_TIMEOUT_S = 300.0


class LockStepDriver:
    """Environments in a private pool, whose event loop runs in a private thread.

    ``run`` executes a coroutine of this class in that thread. Every row keeps its environment until
    the next reset.
    """

    def __init__(self, env_config: "EnvConfig", settings: EnvSettings) -> None:
        self._env_config = env_config
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, daemon=True, name="environment-manager"
        )
        self._thread.start()
        self._pool: EnvironmentPool | None = None
        self._session_stack = AsyncExitStack()
        self._sessions: list[PoolSession] = []
        self._last_results: list[Step] = []

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of this class in the thread and return its result."""
        call_timeout_s = (
            self._env_config.reset_timeout_s + self._env_config.step_timeout_s + EXTRA_TIMEOUT_S
        )
        # Add up the timeouts: environments of one process run one after another.
        timeout_s = call_timeout_s * (1 + len(self._last_results))
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=timeout_s)

    def close(self) -> None:
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    async def reset(self, tasks: Sequence[Task], seeds: Sequence[int]) -> list[Observation]:
        await self._session_stack.aclose()
        pool = await self._ensure_capacity(len(tasks))
        self._sessions = [
            await self._session_stack.enter_async_context(pool.open_session()) for _ in tasks
        ]
        observations = await asyncio.gather(
            *(
                env.reset(task, seed)
                for env, task, seed in zip(self._sessions, tasks, seeds, strict=True)
            )
        )
        self._last_results = [
            (first_observation, 0.0, False, first_observation.info)
            for first_observation in observations
        ]
        return list(observations)

    async def _ensure_capacity(self, num_rows: int) -> EnvironmentPool:
        """Return a pool of at least ``num_rows`` environments. Replace a pool that is too small."""
        if self._pool is not None and self._pool.max_sessions >= num_rows:
            return self._pool
        if self._pool is not None:
            await self._pool.close()
        config = self._env_config
        num_workers = min(config.num_workers, num_rows)
        self._pool = EnvironmentPool(
            config.env_name,
            self._settings,
            num_workers,
            envs_per_worker=-(-num_rows // num_workers),  # rounded up
            reset_timeout_s=config.reset_timeout_s,
            step_timeout_s=config.step_timeout_s,
        )
        return await self._pool.start()

    async def step(self, actions: Sequence[str]) -> list[Step]:
        async def step_unless_done(env: PoolSession, action: str, last_result: Step) -> Step:
            observation, _, done, info = last_result
            return (observation, 0.0, True, info) if done else await env.step(action)

        step_calls = map(step_unless_done, self._sessions, actions, self._last_results)
        self._last_results = list(await asyncio.gather(*step_calls))
        return self._last_results

    async def _close(self) -> None:
        await self._session_stack.aclose()
        if self._pool is not None:
            await self._pool.close()
