"""Collector worker: one asyncio loop that generates many trajectories concurrently.

Every trajectory is a coroutine, so none waits for the slowest environment of a batch. The
environment pool and the engine connection stay open between calls.

    collect(specs) ─▶ groups ─▶ trajectories ─┬─ tokens ──▶ EngineClient ──▶ rollout workers
                                              └─ actions ─▶ EnvironmentPool ─▶ environment processes
    user-provided agents in those processes ─▶ EndpointServer ─▶ their trajectories
"""

import asyncio
import importlib
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agent_system.endpoint.server import EndpointServer
from agent_system.environments.env_registry import get_package, read_env_settings
from agent_system.environments.pool.environment_pool import EnvironmentPool
from agent_system.multi_turn_rollout.agent_trajectory_generator import UserAgentTrajectoryGenerator
from agent_system.multi_turn_rollout.engine_client import (
    EngineClient,
    PolicySampler,
    RolloutWorkerHandle,
    TokenSource,
)
from agent_system.multi_turn_rollout.packing import select_usable_trajectories
from agent_system.multi_turn_rollout.partial_rollouts import GroupsInFlight
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.stored_trajectories import encode_stored_rows
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory
from agent_system.multi_turn_rollout.trajectory_generator import (
    RolloutContext,
    TrajectoryGenerator,
    gather_or_cancel,
    sample_alternative_thoughts_of_group,
)
from agent_system.tokens.bridge import ChatBridge, ChatTokenizer
from rlvcr.alternatives import AlternativeThoughtSampler
from rlvcr.levels import LevelCodec
from rlvcr.token_bytes import Tokenizer
from verl.config.schema.env import EnvConfig
from verl.protocol import DataProto
from verl.utils.jsonl import EncodedLines, RowEncoder
from verl.utils.stacks import install_stack_dump_handler


class PolicyTokenizer(ChatTokenizer, Tokenizer, Protocol):
    """Tokenizer with the methods that chat templates and the parser of thinking levels need."""


@dataclass(slots=True)
class CollectedTrajectories:
    """Result of a rollout: trajectories, times in seconds, and counts of replaced processes.

    ``rollout_s`` is the time from the start of the call to the end of the last episode.
    ``thoughts_s`` is the time from then to the end of the last alternative thought.
    """

    trajectories: list[Trajectory]
    rollout_s: float
    thoughts_s: float  # time for alternative thoughts after the last episode
    env_restarts: int = 0
    lost_collectors: int = 0

    def copy_without_texts(self) -> "CollectedTrajectories":
        """Return a smaller copy, from which the driver builds batches and metrics."""
        trajectories_without_texts = [
            trajectory.copy_without_texts() for trajectory in self.trajectories
        ]
        return replace(self, trajectories=trajectories_without_texts)

    def add(self, other: "CollectedTrajectories") -> None:
        """Append the trajectories of a later call, and add its times and counts."""
        self.trajectories += other.trajectories
        self.rollout_s += other.rollout_s
        self.thoughts_s += other.thoughts_s
        self.env_restarts += other.env_restarts
        self.lost_collectors += other.lost_collectors


def group_by_uid(specs: Sequence[RolloutSpec]) -> dict[str, list[RolloutSpec]]:
    groups: dict[str, list[RolloutSpec]] = defaultdict(list)
    for spec in specs:
        groups[spec.uid].append(spec)
    return groups


class CollectorWorker:
    """Worker that generates trajectories: a Ray actor, or an object in this process.

    ``external_lib`` is imported before the environment is looked up.
    """

    def __init__(
        self,
        env_config: EnvConfig,
        tokenizer: PolicyTokenizer,
        rollout_workers: Sequence[RolloutWorkerHandle],
        name: str = "collector-0",
        external_lib: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        install_stack_dump_handler(name)
        # Import ``external_lib`` first: it may register the environment ``env_name``.
        if external_lib:
            importlib.import_module(external_lib)
        self._package = get_package(env_config.env_name)
        self._env_config = env_config
        self._bridge = ChatBridge(tokenizer, template_kwargs)
        self._tokenizer = tokenizer
        # Created on first use: ``LevelCodec`` refuses some tokenizers. They can be used without
        # thinking levels.
        self._codec: LevelCodec | None = None
        self._engine: TokenSource = EngineClient(rollout_workers, name)
        self._pool = EnvironmentPool(
            env_config.env_name,
            read_env_settings(env_config),
            env_config.num_workers,
            env_config.envs_per_worker,
            env_config.reset_timeout_s,
            env_config.step_timeout_s,
        )
        self._endpoint = EndpointServer()
        self._groups_in_flight = GroupsInFlight[list[Trajectory]](
            env_config.rollout.carry_over_steps
        )
        self._start_task: asyncio.Task[EnvironmentPool] | None = None
        self._num_finished_episodes = 0

    async def start(self) -> None:
        """Start the environments once. Raises ``WorkerStartError`` if none can be started."""
        if self._start_task is None:
            self._start_task = asyncio.create_task(self._pool.start())
        await asyncio.shield(self._start_task)

    async def count_finished_episodes(self) -> int:
        """Return the number of episodes that ended since the worker was created."""
        return self._num_finished_episodes

    async def collect(
        self, specs: Sequence[RolloutSpec], settings: RolloutSettings
    ) -> CollectedTrajectories:
        """Generate one trajectory for each of ``specs``, and return them in order.

        Raises ``RolloutWorkerFailed`` and ``WorkerStartError``. Failures of single episodes are
        recorded in their trajectories.
        """
        await self.start()
        context = self._make_context(settings)
        start_s = time.perf_counter()
        num_restarts_before = self._pool.counts["restarts"]
        groups = await gather_or_cancel(
            self._generate_group(context, members) for members in group_by_uid(specs).values()
        )
        trajectory_by_index = {
            trajectory.spec.index: trajectory for group in groups for trajectory in group
        }
        trajectories = [trajectory_by_index[spec.index] for spec in specs]
        return self._build_result(trajectories, start_s, num_restarts_before)

    async def collect_finished_groups(
        self, specs: Sequence[RolloutSpec], settings: RolloutSettings, max_unfinished_groups: int
    ) -> CollectedTrajectories:
        """Start new trajectories and wait until only ``max_unfinished_groups`` groups remain.

        Return the trajectories of the finished groups, also of earlier calls, the oldest first.
        """
        await self.start()
        context = self._make_context(settings)
        start_s = time.perf_counter()
        num_restarts_before = self._pool.counts["restarts"]
        for uid, members in group_by_uid(specs).items():
            self._groups_in_flight.start(uid, self._generate_group(context, members))
        groups = await self._groups_in_flight.take_finished(max_unfinished_groups)
        trajectories = [trajectory for group in groups for trajectory in group]
        return self._build_result(trajectories, start_s, num_restarts_before)

    def _build_result(
        self, trajectories: list[Trajectory], start_s: float, num_restarts_before: int
    ) -> CollectedTrajectories:
        end_s = max((trajectory.end_time_s for trajectory in trajectories), default=start_s)
        # Episodes that ended before this call took none of its time.
        end_s = max(end_s, start_s)
        return CollectedTrajectories(
            trajectories=trajectories,
            rollout_s=end_s - start_s,
            thoughts_s=time.perf_counter() - end_s,
            env_restarts=self._pool.counts["restarts"] - num_restarts_before,
        )

    async def collect_and_separate_texts(
        self, method: str, *args: Any
    ) -> tuple[CollectedTrajectories, list[Trajectory]]:
        """Call ``collect`` or ``collect_finished_groups``; return results without and with texts.

        They are two Ray objects. The driver reads the first one, which is smaller. It leaves the
        whole trajectories in the object store until their texts are needed.
        """
        collected: CollectedTrajectories = await getattr(self, method)(*args)
        return collected.copy_without_texts(), collected.trajectories

    async def encode_rows(self, values: DataProto, encode: RowEncoder) -> EncodedLines:
        """Return JSON lines of rows that this collector stored, with columns of ``values``."""
        # In a thread, so that the trajectories in flight continue.
        return await asyncio.to_thread(encode_stored_rows, values, encode, self._tokenizer)

    async def close(self) -> None:
        """Stop the environments, the engine connection and the endpoint."""
        await self._groups_in_flight.cancel_all()
        await self._engine.close()
        if self._start_task is not None:
            await asyncio.wait([self._start_task])
            await self._pool.close()
        await self._endpoint.close()

    async def _generate_group(
        self, context: RolloutContext, specs: list[RolloutSpec]
    ) -> list[Trajectory]:
        group = await gather_or_cancel(self._generate_trajectory(context, spec) for spec in specs)
        alternatives_settings = context.settings.alternatives_settings
        if (
            alternatives_settings is not None
            and alternatives_settings.samples_thoughts_after_rollout
        ):
            trajectories = select_usable_trajectories(group, self._env_config.on_abort)[0]
            if alternatives_settings.expand == "successes":
                trajectories = [trajectory for trajectory in trajectories if trajectory.won]
            has_equal_returns = len({trajectory.reward for trajectory in trajectories}) < 2
            # ``mixed_groups`` skips groups with equal returns of the environment. Without token
            # costs and penalties all their group advantages are 0.
            if alternatives_settings.expand != "mixed_groups" or not has_equal_returns:
                await sample_alternative_thoughts_of_group(context, trajectories)
        return group

    async def _generate_trajectory(self, context: RolloutContext, spec: RolloutSpec) -> Trajectory:
        trajectory = await self._make_generator(context, spec).generate_trajectory(self._pool)
        self._num_finished_episodes += 1
        return trajectory

    def _make_generator(self, context: RolloutContext, spec: RolloutSpec) -> TrajectoryGenerator:
        if self._package.package_for_task(spec.task).runs_agent:
            return UserAgentTrajectoryGenerator(context, spec, self._endpoint)
        return TrajectoryGenerator(context, spec)

    def _make_context(self, settings: RolloutSettings) -> RolloutContext:
        codec = None
        if settings.requests_levels:
            self._codec = codec = self._codec or LevelCodec(self._tokenizer)
        sampler = PolicySampler(self._engine, settings)
        alternative_sampler = None
        if codec is not None and settings.alternatives_settings is not None:
            alternative_sampler = AlternativeThoughtSampler(
                settings.alternatives_settings,
                codec,
                sampler.sample_thought,
                self._bridge.encode_text,
                settings.max_turn_tokens,
                settings.seed,
            )
        return RolloutContext(
            settings=settings,
            package=self._package,
            prompts=settings.build_prompts(self._package, self._env_config),
            bridge=self._bridge,
            sampler=sampler,
            codec=codec,
            alternative_sampler=alternative_sampler,
        )
