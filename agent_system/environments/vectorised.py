"""Environments in lock-step: all are reset together and stepped together.

The module implements ``reset``, ``step`` and ``success_evaluator`` of ``EnvironmentManagerBase``,
for evaluation scripts of verl-agent. ``multi_turn_rollout.first_prompts`` and tests use it too.
Training does not: its trajectories do not wait for each other.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from agent_system.environments.env import Observation, Task
from agent_system.environments.package import EnvPackage
from agent_system.environments.pool.environment_pool import EnvironmentPool, PoolSession
from agent_system.environments.settings import EnvSettings
from agent_system.environments.tasks import assert_same_start

if TYPE_CHECKING:
    from verl.config.schema.env import EnvConfig
    from verl.protocol import DataProto

T = TypeVar("T")
StepResult = tuple[Observation, float, bool, dict[str, Any]]
# A call of the driver runs several calls of environments. Its timeout in seconds is the sum of
# their deadlines plus this value.
EXTRA_WAIT_S = 300.0


class VectorisedPlay:
    """Methods of ``EnvironmentManagerBase`` that reset and step a whole batch together.

    The environments are in a pool that only these methods use.
    """

    env_config: "EnvConfig"
    settings: EnvSettings
    package: EnvPackage
    _driver: "LockStepDriver | None" = None
    _tasks: Sequence[Task] = ()

    def reset(self, gen_batch: "DataProto") -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
        """Start one episode per row of ``gen_batch``.

        Returns:
            Observations (lists [B] under ``text``, ``image``, ``anchor``, ``opening``) and
            infos [B].

        Raises:
            GroupMismatch: Rows of one uid start from different states.
            EnvFailure: An environment failed.
        """
        rows = gen_batch.non_tensor_batch
        if self._driver is None:
            self._driver = LockStepDriver(self.env_config, self.settings)
        self._tasks = rows["task"].tolist()
        observations = self._driver.reset(self._tasks, rows["env_seed"].tolist())
        start_states = [(observation.text, observation.state) for observation in observations]
        assert_same_start(rows["uid"].tolist(), start_states)
        return _observation_columns(observations), [
            observation.info for observation in observations
        ]

    def step(
        self, text_actions: Sequence[str]
    ) -> tuple[dict[str, list[Any]], np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Read the action in one model text per row and apply it.

        A row that is done keeps its last observation and gets reward 0.

        Returns:
            Observations, rewards [B] float32, dones [B] bool, and infos [B] with ``won`` and
            ``is_action_valid``.
        """
        if self._driver is None:
            raise RuntimeError("step was called before reset; fix: call reset first")
        if len(text_actions) != len(self._tasks):
            raise ValueError(f"{len(text_actions)} actions for {len(self._tasks)} environments")
        packages = map(self.package.package_for_task, self._tasks)
        projected = [
            package.project(text) for package, text in zip(packages, text_actions, strict=True)
        ]
        results = self._driver.step([action for action, _ in projected])
        infos: list[dict[str, Any]] = []
        for (_, formed), (_, _, _, info) in zip(projected, results, strict=True):
            is_valid = bool(formed and info.get("is_action_valid", True))
            infos.append({**info, "is_action_valid": is_valid})
        rewards = np.array([result[1] for result in results], dtype=np.float32)
        dones = np.array([result[2] for result in results], dtype=bool)
        return _observation_columns([result[0] for result in results]), rewards, dones, infos

    def success_evaluator(
        self, infos: Sequence[dict[str, Any]], data_sources: Sequence[str] | np.ndarray
    ) -> dict[str, np.ndarray]:
        """Return ``success_rate`` [B] (0 or 1 per row) and ``<data_source>_success_rate``.

        ``infos`` are those of the last env step of each episode.
        """
        outcome: dict[str, list[float]] = defaultdict(list)
        for info, source in zip(infos, data_sources, strict=True):
            won = float(bool(info.get("won", False)))
            outcome["success_rate"].append(won)
            outcome[f"{source}_success_rate"].append(won)
        return {key: np.array(values, dtype=np.float32) for key, values in outcome.items()}

    def close(self) -> None:
        """Close the private pool, if there is one."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()


class LockStepDriver:
    """Synchronous interface to a pool whose event loop runs in a private thread.

    Every row keeps its environment until the next reset.
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
        self._open_sessions = AsyncExitStack()
        self._sessions: list[PoolSession] = []
        self._last_results: list[StepResult] = []

    def reset(self, tasks: Sequence[Task], seeds: Sequence[int]) -> list[Observation]:
        """Start one episode per task and return the first observations."""
        observations = self._run(self._reset(tasks, seeds))
        self._last_results = [
            (observation, 0.0, False, observation.info) for observation in observations
        ]
        return observations

    def step(self, actions: Sequence[str]) -> list[StepResult]:
        """Apply one action per environment; return (observation, reward, done, info) of each."""
        self._last_results = self._run(self._step(actions))
        return self._last_results

    def close(self) -> None:
        """Close the pool, the event loop and the thread."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        one_call = self._env_config.reset_timeout_s + self._env_config.step_timeout_s + EXTRA_WAIT_S
        # Environments of one process run one after another.
        timeout_s = one_call * (1 + len(self._last_results))
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=timeout_s)

    async def _reset(self, tasks: Sequence[Task], seeds: Sequence[int]) -> list[Observation]:
        await self._open_sessions.aclose()
        pool = await self._ensure_capacity(len(tasks))
        self._sessions = [
            await self._open_sessions.enter_async_context(pool.open_session()) for _ in tasks
        ]
        calls = (
            env.reset(task, seed)
            for env, task, seed in zip(self._sessions, tasks, seeds, strict=True)
        )
        return list(await asyncio.gather(*calls))

    async def _ensure_capacity(self, rows: int) -> EnvironmentPool:
        """Return a pool of at least ``rows`` environments. Replace a pool that is too small."""
        if self._pool is not None and self._pool.max_sessions >= rows:
            return self._pool
        if self._pool is not None:
            await self._pool.close()
        config = self._env_config
        workers = min(config.num_workers, rows)
        self._pool = EnvironmentPool(
            config.env_name,
            self._settings,
            workers,
            envs_per_worker=-(-rows // workers),  # rounded up
            reset_timeout_s=config.reset_timeout_s,
            step_timeout_s=config.step_timeout_s,
        )
        return await self._pool.start()

    async def _step(self, actions: Sequence[str]) -> list[StepResult]:
        async def step_unless_done(env: PoolSession, action: str, last: StepResult) -> StepResult:
            observation, _, done, info = last
            return (observation, 0.0, True, info) if done else await env.step(action)

        return list(
            await asyncio.gather(
                *map(step_unless_done, self._sessions, actions, self._last_results)
            )
        )

    async def _close(self) -> None:
        await self._open_sessions.aclose()
        if self._pool is not None:
            await self._pool.close()


def _observation_columns(observations: Sequence[Observation]) -> dict[str, list[Any]]:
    return {
        "text": [observation.text for observation in observations],
        "image": [observation.image for observation in observations],
        "anchor": [observation.state for observation in observations],
        "opening": [observation.opening for observation in observations],
    }
