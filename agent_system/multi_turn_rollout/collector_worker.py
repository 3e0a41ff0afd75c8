"""The collector worker: one asyncio loop that plays many trajectories at once.

Every trajectory is a coroutine (``episode``). Nobody waits for the slowest environment of a batch;
a trajectory that is over costs nothing. The environment pool and the engine connection stay open
from call to call.

    collect(jobs) ─▶ groups ─▶ trajectories ─┬─ tokens ──▶ EngineClient ──▶ rollout workers
                                             └─ actions ─▶ EnvironmentPool ─▶ environment processes
"""

import asyncio
import importlib
import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_system.agents import EngineAgent
from agent_system.environments.env_registry import env_settings, get_package
from agent_system.environments.pool import EnvironmentPool
from agent_system.multi_turn_rollout.engine_client import EngineAborted, EngineClient, Sampling
from agent_system.multi_turn_rollout.packing import select_trajectories
from agent_system.multi_turn_rollout.play_settings import PlaySettings
from agent_system.multi_turn_rollout.trajectory import Job, Trajectory
from agent_system.multi_turn_rollout.trajectory_player import (
    Stage,
    TrajectoryPlayer,
    expand_turn,
    gather_or_cancel,
)
from agent_system.tokens.bridge import ChatBridge
from rlvcr.alternatives import AlternativeSampler
from rlvcr.levels import LevelCodec
from verl.utils.sampling import SamplingResult
from verl.utils.seeds import derive_seed


@dataclass(slots=True)
class Collected:
    """Trajectories in the order of their jobs, and how long it took, in seconds.

    ``play_s``: from the start until the last episode was over; ``thoughts_s``: from then until the
    last thought at another level was there. ``restarts`` counts environment workers that died or
    hung and were replaced.
    """

    trajectories: list[Trajectory]
    play_s: float
    thoughts_s: float
    restarts: int = 0

    def add(self, other: "Collected") -> None:
        """Append what was played afterwards."""
        self.trajectories += other.trajectories
        self.play_s += other.play_s
        self.thoughts_s += other.thoughts_s
        self.restarts += other.restarts


class CollectorWorker:
    """Plays jobs on environments of ``env_config.env_name`` with tokens from ``rollout_workers``.

    A Ray actor, or an object in this process. ``name`` tells the collectors of a run apart;
    ``external_lib`` is imported before the environment is looked up; ``template_kwargs`` go to the
    chat template.
    """

    def __init__(
        self,
        env_config: Any,
        tokenizer: Any,
        rollout_workers: Sequence[Any],
        name: str = "collector-0",
        external_lib: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if external_lib:
            importlib.import_module(external_lib)
        self._package = get_package(env_config.env_name)
        self._env_config = env_config
        self._bridge = ChatBridge(tokenizer, template_kwargs)
        self._tokenizer = tokenizer
        self._codec: LevelCodec | None = None
        self._engine = EngineClient(rollout_workers, name)
        self._pool = EnvironmentPool(
            env_config.env_name,
            env_settings(env_config),
            env_config.num_workers,
            env_config.envs_per_worker,
            env_config.reset_timeout_s,
            env_config.step_timeout_s,
        )
        self._started = False
        self._start_lock = asyncio.Lock()

    async def collect(self, jobs: Sequence[Job], settings: PlaySettings) -> Collected:
        """Play every job and return the trajectories in the order of ``jobs``.

        Raises ``EngineError`` when a rollout worker failed and ``WorkerStartError`` when no
        environment can be started; everything smaller is in the trajectories.
        """
        async with self._start_lock:
            if not self._started:
                await self._pool.start()
                self._started = True
        stage = self._stage(settings)
        groups: dict[str, list[Job]] = defaultdict(list)
        for job in jobs:
            groups[job.uid].append(job)
        began, restarted = time.perf_counter(), self._pool.counts["restarts"]
        played = await gather_or_cancel(
            self._play_group(stage, members) for members in groups.values()
        )
        by_index = {trajectory.job.index: trajectory for group in played for trajectory in group}
        ended = max((trajectory.ended_at for trajectory in by_index.values()), default=began)
        thoughts_s, restarts = (
            time.perf_counter() - ended,
            self._pool.counts["restarts"] - restarted,
        )
        return Collected([by_index[job.index] for job in jobs], ended - began, thoughts_s, restarts)

    async def _play_group(self, stage: Stage, jobs: list[Job]) -> list[Trajectory]:
        group = await gather_or_cancel(
            TrajectoryPlayer(stage, job).play(self._pool) for job in jobs
        )
        alternatives = stage.settings.alternatives
        if alternatives is not None and alternatives.expand == "mixed_groups":
            kept = select_trajectories(group, self._env_config.on_abort)[0]
            if len({trajectory.reward for trajectory in kept}) > 1:
                await gather_or_cancel(
                    expand_turn(stage, t, turn) for t in kept for turn in t.turns
                )
        return group

    def _stage(self, settings: PlaySettings) -> Stage:
        if settings.levels and self._codec is None:
            self._codec = LevelCodec(self._tokenizer)
        sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)

        # a forced level and what is sampled after it are no longer than a turn may be
        forced = len(self._codec.prefix_ids[1]) if settings.epsilon_levels else 0

        def agent(job: Job) -> EngineAgent:
            turns = itertools.count()

            async def sample(prompt_ids: list[int]) -> SamplingResult:
                return await self._engine.sample(
                    prompt_ids,
                    max_tokens=settings.max_turn_tokens - forced,
                    sampling=sampling,
                    stop=settings.stop,
                    route=job.index,
                    seed=derive_seed(settings.seed, "turn", job.traj_uid, next(turns)),
                )

            return EngineAgent(sample, self._bridge.decode)

        async def sample_thought(
            prompt_ids: list[int], max_tokens: int, stop: tuple[str, ...], route: int, seed: int
        ) -> SamplingResult | None:
            try:
                return await self._engine.sample(
                    prompt_ids,
                    max_tokens=max_tokens,
                    sampling=sampling,
                    stop=stop,
                    route=route,
                    seed=seed,
                )
            except EngineAborted:
                return None

        alternatives = None
        if settings.alternatives is not None:
            alternatives = AlternativeSampler(
                settings.alternatives, self._codec, sample_thought, self._bridge.encode_text
            )
        codec = self._codec if settings.levels else None
        prompts = settings.prompts(self._package, self._env_config)
        return Stage(settings, self._package, prompts, self._bridge, agent, codec, alternatives)

    async def close(self) -> None:
        """Stop the environments and the engine connection."""
        await self._engine.close()
        if self._started:
            await self._pool.close()
