"""A batch of environments driven from synchronous code: all reset together, all step together."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from agent_system.environments.base import Observation
from agent_system.environments.pool import EnvironmentPool
from agent_system.environments.settings import EnvSettings


class LockStep:
    """A pool with a loop and a thread of its own; every row keeps its environment from reset to
    reset.
    """

    def __init__(self, env_config: Any, settings: EnvSettings) -> None:
        self._env_config = env_config
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, daemon=True, name="environment-manager"
        )
        self._thread.start()
        self._pool: EnvironmentPool | None = None
        self._open = AsyncExitStack()
        self._sessions: list[Any] = []
        self._last: list[tuple] = []

    def reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[Observation]:
        """Start the episodes; one environment per task."""
        observations = self._run(self._reset(tasks, seeds))
        self._last = [(observation, 0.0, False, observation.info) for observation in observations]
        return observations

    def step(self, actions: Sequence[str]) -> list[tuple]:
        """One action per environment; (observation, reward, done, info) each."""
        if len(actions) != len(self._last):
            raise ValueError(f"{len(actions)} actions for {len(self._last)} environments")
        self._last = self._run(self._step(actions))
        return self._last

    def close(self) -> None:
        """End the pool, the loop and the thread."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def _run(self, coroutine: Coroutine) -> Any:
        limit = self._env_config.reset_timeout_s + self._env_config.step_timeout_s + 300
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(
            timeout=limit * (1 + len(self._last))
        )

    async def _reset(self, tasks: Sequence[dict], seeds: Sequence[int]) -> list[Observation]:
        await self._open.aclose()
        await self._ensure(len(tasks))
        self._sessions = [await self._open.enter_async_context(self._pool.session()) for _ in tasks]
        calls = (
            env.reset(task, seed)
            for env, task, seed in zip(self._sessions, tasks, seeds, strict=True)
        )
        return list(await asyncio.gather(*calls))

    async def _ensure(self, rows: int) -> None:
        if self._pool is not None and self._pool.capacity >= rows:
            return
        if self._pool is not None:
            await self._pool.close()
        config, workers = self._env_config, min(self._env_config.num_workers, rows)
        timeouts = {
            "reset_timeout_s": config.reset_timeout_s,
            "step_timeout_s": config.step_timeout_s,
        }
        self._pool = EnvironmentPool(
            config.env_name, self._settings, workers, -(-rows // workers), **timeouts
        )
        await self._pool.start()

    async def _step(self, actions: Sequence[str]) -> list[tuple]:
        async def one(env: Any, action: str, last: tuple) -> tuple:
            return (last[0], 0.0, True, last[3]) if last[2] else await env.step(action)

        return list(await asyncio.gather(*map(one, self._sessions, actions, self._last)))

    async def _close(self) -> None:
        await self._open.aclose()
        if self._pool is not None:
            await self._pool.close()
