"""Group of collector workers that generates the trajectories of rollout specs.

A collector that dies, alone or with its node, is replaced on another node of the cluster. Its
unfinished trajectories start again with the same seeds.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agent_system.environments.groups import assert_same_start
from agent_system.multi_turn_rollout.collector_worker import (
    Collected,
    CollectorWorker,
    PolicyTokenizer,
)
from agent_system.multi_turn_rollout.engine_client import REQUEST_TIMEOUT_S, RolloutWorkerHandle
from agent_system.multi_turn_rollout.play_settings import PlaySettings
from agent_system.multi_turn_rollout.trajectory import Job, Trajectory
from verl.config.schema.env import EnvConfig
from verl.single_controller.base.errors import WorkerDiedError
from verl.single_controller.ray.calls import gather, ray_get
from verl.utils.progress import Progress
from verl.utils.waits import waiting_for

logger = logging.getLogger(__name__)
# Seconds. The start includes environments and, on a fresh machine, Ray's worker processes.
START_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 10.0
LOOK_S = 1.0  # between two checks of the progress
REPLACED = 2  # replacements of one collector per call; more deaths indicate a systematic fault

# Requests trajectories from collector ``number`` and returns the object reference.
Ask: TypeAlias = Callable[[int], Any]


class CollectorGroup:
    """Group of ``env_config.num_collectors`` collector workers. Whole groups (uids) are assigned in
    turn.

    ``options`` are further arguments of every ``CollectorWorker``. The collectors are Ray actors if
    the rollout workers are. Otherwise there is one collector, in this process.
    """

    def __init__(
        self,
        env_config: EnvConfig,
        tokenizer: PolicyTokenizer,
        rollout_workers: Sequence[RolloutWorkerHandle],
        **options: Any,
    ) -> None:
        self._env = env_config
        self._engines = list(rollout_workers)
        self._arguments = (env_config, tokenizer, self._engines)
        self._options = options
        self._remote: list[Any] = []  # actor handles; their methods are created at run time
        self._places: dict[int, str] = {}  # node ID of each collector
        # For every collector, by traj_uid: specs that were started and not returned.
        self._under_way: list[dict[str, Job]] = [{} for _ in range(env_config.num_collectors)]
        self._replaced = Counter[int]()  # replacements of each collector
        self._knows_nothing: set[int] = set()  # replacements without the unfinished specs
        self._over = 0  # finished episodes at the last check
        # Both are set or both None: the worker in this process and its asyncio loop.
        self._local: CollectorWorker | None = None
        self._runner: asyncio.Runner | None = None
        if not isinstance(rollout_workers[0], ActorHandle):
            self._runner = asyncio.Runner()
            self._local = CollectorWorker(*self._arguments, **options)
            return
        self._remote = [self._started(number) for number in range(env_config.num_collectors)]

    def _started(self, number: int) -> Any:
        # A collector waits nearly all the time, so it reserves no CPU. It reserves one byte:
        # Ray places actors without resources on any node. Its environments are its children.
        # A replacement uses another node: Ray may not have noticed yet that the node is dead.
        self._places[number] = node_of(number, ray.nodes(), self._places.get(number))
        place = NodeAffinitySchedulingStrategy(self._places[number], soft=True)
        options = {"num_cpus": 0, "memory": 1, "scheduling_strategy": place}
        actor = ray.remote(CollectorWorker).options(**options)
        worker: Any = actor.remote(*self._arguments, self._client(number), **self._options)
        # Started early, while other processes load. An error is raised again by the first call.
        worker.start.remote()
        return worker

    def _client(self, number: int) -> str:
        """Return the name of collector ``number`` at the engines.

        A replacement has another name, so that it does not get results of its predecessor.
        """
        times = self._replaced[number]
        return f"{collector_name(number)}.{times}" if times else collector_name(number)

    def _replace(self, number: int) -> None:
        """Replace a lost collector, and abort its requests at the engines."""
        # The old actor may be alive but unreachable.
        ray.kill(self._remote[number])
        for engine in self._engines:
            engine.abort.remote(self._client(number))
        self._replaced[number] += 1
        self._knows_nothing.add(number)
        self._remote[number] = self._started(number)

    def collect_ready(self, jobs: Sequence[Job], settings: PlaySettings, keep: int) -> Collected:
        """Start ``specs`` and return finished groups, also of earlier calls, as soon as ``keep``
        are left.

        The remaining groups continue. Raises the errors of the workers.
        """
        if self._runner is not None and self._local is not None:
            return _checked(self._runner.run(self._local.collect_ready(jobs, settings, keep)))
        workers = len(self._remote)
        shards = shard_by_group(jobs, workers)
        kept = [len(range(place, keep, workers)) for place in range(workers)]
        for under_way, shard in zip(self._under_way, shards, strict=True):
            under_way.update({job.traj_uid: job for job in shard})

        def ask(number: int) -> Any:
            shard = shards[number]
            if number in self._knows_nothing:
                shard = list(self._under_way[number].values())
                self._knows_nothing.remove(number)
            return self._remote[number].collect_ready.remote(shard, settings, kept[number])

        parts = self._play(ask, range(workers), len(jobs), settings)
        for under_way, part in zip(self._under_way, parts, strict=True):
            for trajectory in part.trajectories:
                del under_way[trajectory.job.traj_uid]
        return _joined(parts, [trajectory for part in parts for trajectory in part.trajectories])

    def collect(self, jobs: Sequence[Job], settings: PlaySettings) -> Collected:
        """Return the trajectories of ``specs`` in order. Raises the errors of the workers."""
        if self._runner is not None and self._local is not None:
            return _checked(self._runner.run(self._local.collect(jobs, settings)))
        shards = shard_by_group(jobs, len(self._remote))
        busy = [number for number, shard in enumerate(shards) if shard]

        def ask(number: int) -> Any:
            return self._remote[number].collect.remote(shards[number], settings)

        parts = self._play(ask, busy, len(jobs), settings)
        # Results are in the order of shards; return them in the order of the specs.
        by_index = {
            trajectory.job.index: trajectory for part in parts for trajectory in part.trajectories
        }
        return _joined(parts, [by_index[job.index] for job in jobs])

    def _play(
        self, ask: Ask, numbers: Sequence[int], jobs: int, settings: PlaySettings
    ) -> list[Collected]:
        with Progress("generating", jobs, "trajectories") as progress:
            return self._watched(ask, numbers, self._deadline(jobs, settings), progress)

    def _watched(
        self, ask: Ask, numbers: Sequence[int], timeout_s: float, progress: Progress
    ) -> list[Collected]:
        """Return the results of the collectors ``numbers``, and report finished episodes to
        ``progress``.

        Raises the error of a collector, ``WorkerDiedError`` where one was lost too often, and
        ``WorkerTimeoutError`` after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        before = self._plays_over()
        parts: dict[int, Collected] = {}
        lost = Counter[int]()
        pending = {ask(number): number for number in numbers}
        with waiting_for(map(collector_name, numbers)) as late:
            while pending:
                self._receive_done(pending, parts, lost, ask)
                late[:] = map(collector_name, pending.values())
                if pending and time.monotonic() > deadline:
                    gather(list(pending), 0.0, late)
                if pending:
                    progress.to(max(0, self._plays_over() - before))
        for number in numbers:
            parts[number].lost = lost[number]
        return [parts[number] for number in numbers]

    def _receive_done(
        self, pending: dict[Any, int], parts: dict[int, Collected], lost: Counter[int], ask: Ask
    ) -> None:
        """Move results that arrive within ``POLL_INTERVAL_S`` from ``pending`` to ``parts``.

        A collector that died is replaced, counted in ``lost``, and requested again.
        """
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=LOOK_S)
        # Failures are raised at once: the other collectors may take long.
        for ref in done:
            number = pending.pop(ref)
            part = self._part(ref, number, last=lost[number] == REPLACED)
            if part is None:
                lost[number] += 1
                pending[ask(number)] = number
            else:
                parts[number] = part

    def _part(self, ref: Any, number: int, last: bool) -> Collected | None:
        """Return the result of collector ``number``; None where it died and was replaced.

        With ``is_last_attempt`` it is not replaced, and ``WorkerDiedError`` is raised.
        """
        name = collector_name(number)
        try:
            return ray_get(ref, LOOK_S, name)
        except WorkerDiedError as error:
            if last:
                raise
            logger.warning("%s died; its unfinished trajectories start again: %s", name, error)
        self._replace(number)
        return None

    def _plays_over(self) -> int:
        """Return the number of finished episodes of all workers.

        Where a worker does not answer in time, this is the last known number.
        """
        asked = [worker.plays_over.remote() for worker in self._remote]
        names = [collector_name(number) for number in range(len(asked))]
        answers, silent = ray.wait(asked, num_returns=len(asked), timeout=LOOK_S)
        if silent:
            return self._over
        try:
            self._over = sum(gather(answers, LOOK_S, names))
        except WorkerDiedError:
            logger.debug("a collector died; its replacement follows", exc_info=True)
        return self._over

    def close(self) -> None:
        """Stop the environments and the collector workers."""
        if self._runner is not None and self._local is not None:
            self._runner.run(self._local.close())
            self._runner.close()
        self._runner = None
        self._local = None
        workers, self._remote = self._remote, []
        if not workers:
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
        """Return the timeout in seconds of a call: the sum of the timeouts of all waits."""
        env = self._env
        rounds = math.ceil(jobs / (env.num_workers * env.envs_per_worker))
        step_s = env.step_timeout_s + REQUEST_TIMEOUT_S
        # All environments of a round run concurrently: a round takes as long as one episode.
        episode_s = env.reset_timeout_s + settings.max_steps * step_s
        return START_TIMEOUT_S + rounds * episode_s + REQUEST_TIMEOUT_S


def collector_name(number: int) -> str:
    """Return the name of a collector worker in messages and at the engines."""
    return f"collector-{number}"


def node_of(number: int, nodes: Sequence[Mapping[str, Any]], avoided: str | None = None) -> str:
    """Return the ID of the node for collector ``number``, from the entries of ``ray.nodes()``.

    Nodes that are alive are used in turn, those with most CPUs first. ``avoided`` is used only
    where it is the only node.
    """
    alive = [node for node in nodes if node["Alive"]]
    alive = [node for node in alive if node["NodeID"] != avoided] or alive
    alive.sort(key=lambda node: (-node["Resources"].get("CPU", 0.0), node["NodeID"]))
    return alive[number % len(alive)]["NodeID"]


def _joined(parts: Sequence[Collected], trajectories: list[Trajectory]) -> Collected:
    # The parts were generated concurrently, so the slowest one gives the time.
    collected = Collected(
        trajectories=trajectories,
        play_s=max(part.play_s for part in parts),
        thoughts_s=max(part.thoughts_s for part in parts),
        restarts=sum(part.restarts for part in parts),
        lost=sum(part.lost for part in parts),
    )
    return _checked(collected)


def _checked(collected: Collected) -> Collected:
    """Return ``collected`` unchanged, with a warning about failed trajectories.

    Raises ``GroupMismatch`` where members of a group started from different states.
    """
    trajectories = collected.trajectories
    assert_same_start([t.job.uid for t in trajectories], [t.start_state for t in trajectories])
    broken = [t for t in trajectories if t.aborted is not None]
    if broken:
        first = broken[0]
        logger.warning(
            "%d trajectories failed; the first one: %s %s",
            len(broken),
            first.aborted,
            first.abort_detail[:300],
        )
    return collected


def shard_by_group(jobs: Sequence[Job], shards: int) -> list[list[Job]]:
    """Return ``specs`` in ``shards`` lists; whole groups are assigned in turn.

    uids a a b b c c in 2 shards: [a a c c] and [b b]
    """
    number: dict[str, int] = {}
    dealt: list[list[Job]] = [[] for _ in range(shards)]
    for job in jobs:
        # Members of a group stay together: with ``mixed_groups``, alternative thoughts depend on
        # all returns of the group.
        group = number.setdefault(job.uid, len(number))
        dealt[group % shards].append(job)
    return dealt
