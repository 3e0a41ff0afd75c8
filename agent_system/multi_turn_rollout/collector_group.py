"""The collector workers of a run as one object that plays jobs."""

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any

import ray

from agent_system.multi_turn_rollout.collector_worker import Collected, CollectorWorker
from agent_system.multi_turn_rollout.engine_client import REQUEST_TIMEOUT_S
from agent_system.multi_turn_rollout.play_settings import PlaySettings
from agent_system.multi_turn_rollout.trajectory import Job

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 10.0


class CollectorGroup:
    """``env_config.num_collectors`` collector workers; whole groups (uids) are dealt out to them in
    turn.

    ``options`` are further arguments of every ``CollectorWorker``. Where the rollout workers are
    Ray actors the collectors are too; otherwise there is one, in this process.
    """

    def __init__(
        self, env_config: Any, tokenizer: Any, rollout_workers: Sequence[Any], **options: Any
    ) -> None:
        self._env = env_config
        self._runner: asyncio.Runner | None = None
        if isinstance(rollout_workers[0], ray.actor.ActorHandle):
            remote = ray.remote(CollectorWorker).options(num_cpus=0)
            self._workers = [
                remote.remote(
                    env_config, tokenizer, list(rollout_workers), f"collector-{number}", **options
                )
                for number in range(env_config.num_collectors)
            ]
        else:
            self._runner = asyncio.Runner()
            self._workers = [CollectorWorker(env_config, tokenizer, rollout_workers, **options)]

    def collect(self, jobs: Sequence[Job], settings: PlaySettings) -> Collected:
        """Play ``jobs``; trajectories come back in their order. Raises what the workers raise."""
        if self._runner is not None:
            return self._runner.run(self._workers[0].collect(jobs, settings))
        shards = shard_by_group(jobs, len(self._workers))
        pending = [
            worker.collect.remote(shard, settings)
            for worker, shard in zip(self._workers, shards, strict=True)
            if shard
        ]
        parts: list[Collected] = ray.get(pending, timeout=self._deadline(len(jobs), settings))
        by_index = {
            trajectory.job.index: trajectory for part in parts for trajectory in part.trajectories
        }
        return Collected(
            [by_index[job.index] for job in jobs],
            max(part.play_s for part in parts),
            max(part.thoughts_s for part in parts),
            sum(part.restarts for part in parts),
        )

    def close(self) -> None:
        """Stop environments and workers."""
        workers, self._workers = self._workers, []
        if self._runner is not None:
            for worker in workers:
                self._runner.run(worker.close())
            self._runner.close()
            self._runner = None
            return
        closing = [worker.close.remote() for worker in workers]
        _, late = ray.wait(closing, num_returns=len(closing), timeout=CLOSE_TIMEOUT_S)
        if late:
            logger.warning(
                "%d collector workers did not close within %.0f s", len(late), CLOSE_TIMEOUT_S
            )
        for worker in workers:
            ray.kill(worker)

    def _deadline(self, jobs: int, settings: PlaySettings) -> float:
        """Seconds after which something hangs that has deadlines of its own: every wait of every
        round added up.
        """
        env = self._env
        rounds = math.ceil(jobs / (env.num_workers * env.envs_per_worker))
        episode = env.reset_timeout_s + settings.max_steps * (
            env.step_timeout_s + REQUEST_TIMEOUT_S
        )
        return START_TIMEOUT_S + rounds * episode + REQUEST_TIMEOUT_S


def shard_by_group(jobs: Sequence[Job], shards: int) -> list[list[Job]]:
    """``jobs`` in ``shards`` lists of nearly equally many whole groups, dealt out in turn."""
    number: dict[str, int] = {}
    dealt: list[list[Job]] = [[] for _ in range(shards)]
    for job in jobs:
        dealt[number.setdefault(job.uid, len(number)) % shards].append(job)
    return dealt
