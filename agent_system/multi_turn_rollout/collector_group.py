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
    CollectedTrajectories,
    CollectorWorker,
    PolicyTokenizer,
)
from agent_system.multi_turn_rollout.engine_client import REQUEST_TIMEOUT_S, RolloutWorkerHandle
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory
from verl.config.schema.env import EnvConfig
from verl.single_controller.base.errors import WorkerDiedError
from verl.single_controller.ray.calls import gather_results, ray_get
from verl.utils.progress import Progress
from verl.utils.waits import waiting_for

logger = logging.getLogger(__name__)
# Seconds. The start includes environments and, on a fresh machine, Ray's worker processes.
START_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 1.0  # between two checks of the progress
MAX_REPLACEMENTS = (
    2  # replacements of one collector per call; more deaths indicate a systematic fault
)

# Requests trajectories from collector ``number`` and returns the object reference.
RequestShard: TypeAlias = Callable[[int], Any]


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
        self._env_config = env_config
        self._engines = list(rollout_workers)
        self._arguments = (env_config, tokenizer, self._engines)
        self._options = options
        self._remote_workers: list[Any] = []  # actor handles; their methods are created at run time
        self._node_ids: dict[int, str] = {}  # node ID of each collector
        # For every collector, by traj_uid: specs that were started and not returned.
        self._in_flight: list[dict[str, RolloutSpec]] = [
            {} for _ in range(env_config.num_collectors)
        ]
        self._num_replacements = Counter[int]()  # replacements of each collector
        self._needs_all_specs: set[int] = set()  # replacements without the unfinished specs
        self._num_finished = 0  # finished episodes at the last check
        # Both are set or both None: the worker in this process and its asyncio loop.
        self._local_worker: CollectorWorker | None = None
        self._runner: asyncio.Runner | None = None
        if not isinstance(rollout_workers[0], ActorHandle):
            self._runner = asyncio.Runner()
            self._local_worker = CollectorWorker(*self._arguments, **options)
            return
        self._remote_workers = [
            self._start_worker(number) for number in range(env_config.num_collectors)
        ]

    def _start_worker(self, number: int) -> Any:
        # A collector waits nearly all the time, so it reserves no CPU. It reserves one byte:
        # Ray places actors without resources on any node. Its environments are its children.
        # A replacement uses another node: Ray may not have noticed yet that the node is dead.
        self._node_ids[number] = choose_node(number, ray.nodes(), self._node_ids.get(number))
        strategy = NodeAffinitySchedulingStrategy(self._node_ids[number], soft=True)
        options = {"num_cpus": 0, "memory": 1, "scheduling_strategy": strategy}
        actor = ray.remote(CollectorWorker).options(**options)
        worker: Any = actor.remote(*self._arguments, self._client_name(number), **self._options)
        # Started early, while other processes load. An error is raised again by the first call.
        worker.start.remote()
        return worker

    def _client_name(self, number: int) -> str:
        """Return the name of collector ``number`` at the engines.

        A replacement has another name, so that it does not get results of its predecessor.
        """
        num_replacements = self._num_replacements[number]
        return (
            f"{collector_name(number)}.{num_replacements}"
            if num_replacements
            else collector_name(number)
        )

    def _replace_worker(self, number: int) -> None:
        """Replace a lost collector, and abort its requests at the engines."""
        # The old actor may be alive but unreachable.
        ray.kill(self._remote_workers[number])
        for engine in self._engines:
            engine.abort.remote(self._client_name(number))
        self._num_replacements[number] += 1
        self._needs_all_specs.add(number)
        self._remote_workers[number] = self._start_worker(number)

    def collect_ready(
        self, specs: Sequence[RolloutSpec], settings: RolloutSettings, keep: int
    ) -> CollectedTrajectories:
        """Start ``specs`` and return finished groups, also of earlier calls, as soon as ``keep``
        are left.

        The remaining groups continue. Raises the errors of the workers.
        """
        if self._runner is not None and self._local_worker is not None:
            return _check_group_starts(
                self._runner.run(self._local_worker.collect_ready(specs, settings, keep))
            )
        num_workers = len(self._remote_workers)
        shards = shard_by_group(specs, num_workers)
        keep_per_worker = [len(range(place, keep, num_workers)) for place in range(num_workers)]
        for in_flight, shard in zip(self._in_flight, shards, strict=True):
            in_flight.update({spec.traj_uid: spec for spec in shard})

        def request_shard(number: int) -> Any:
            shard = shards[number]
            if number in self._needs_all_specs:
                shard = list(self._in_flight[number].values())
                self._needs_all_specs.remove(number)
            return self._remote_workers[number].collect_ready.remote(
                shard, settings, keep_per_worker[number]
            )

        parts = self._generate_parts(request_shard, range(num_workers), len(specs), settings)
        for in_flight, part in zip(self._in_flight, parts, strict=True):
            for trajectory in part.trajectories:
                del in_flight[trajectory.spec.traj_uid]
        return _merge_parts(
            parts, [trajectory for part in parts for trajectory in part.trajectories]
        )

    def collect(
        self, specs: Sequence[RolloutSpec], settings: RolloutSettings
    ) -> CollectedTrajectories:
        """Return the trajectories of ``specs`` in order. Raises the errors of the workers."""
        if self._runner is not None and self._local_worker is not None:
            return _check_group_starts(
                self._runner.run(self._local_worker.collect(specs, settings))
            )
        shards = shard_by_group(specs, len(self._remote_workers))
        busy_numbers = [number for number, shard in enumerate(shards) if shard]

        def request_shard(number: int) -> Any:
            return self._remote_workers[number].collect.remote(shards[number], settings)

        parts = self._generate_parts(request_shard, busy_numbers, len(specs), settings)
        # Results are in the order of shards; return them in the order of the specs.
        by_index = {
            trajectory.spec.index: trajectory for part in parts for trajectory in part.trajectories
        }
        return _merge_parts(parts, [by_index[spec.index] for spec in specs])

    def _generate_parts(
        self,
        request_shard: RequestShard,
        numbers: Sequence[int],
        num_specs: int,
        settings: RolloutSettings,
    ) -> list[CollectedTrajectories]:
        with Progress("generating", num_specs, "trajectories") as progress:
            return self._wait_for_parts(
                request_shard, numbers, self._compute_timeout_s(num_specs, settings), progress
            )

    def _wait_for_parts(
        self,
        request_shard: RequestShard,
        numbers: Sequence[int],
        timeout_s: float,
        progress: Progress,
    ) -> list[CollectedTrajectories]:
        """Return the results of the collectors ``numbers``, and report finished episodes to
        ``progress``.

        Raises the error of a collector, ``WorkerDiedError`` where one was lost too often, and
        ``WorkerTimeoutError`` after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        finished_before = self._count_finished()
        parts: dict[int, CollectedTrajectories] = {}
        lost = Counter[int]()
        pending = {request_shard(number): number for number in numbers}
        with waiting_for(map(collector_name, numbers)) as late_names:
            while pending:
                self._receive_done(pending, parts, lost, request_shard)
                late_names[:] = map(collector_name, pending.values())
                if pending and time.monotonic() > deadline:
                    gather_results(list(pending), 0.0, late_names)
                if pending:
                    progress.set_done(max(0, self._count_finished() - finished_before))
        for number in numbers:
            parts[number].lost_collectors = lost[number]
        return [parts[number] for number in numbers]

    def _receive_done(
        self,
        pending: dict[Any, int],
        parts: dict[int, CollectedTrajectories],
        lost: Counter[int],
        request_shard: RequestShard,
    ) -> None:
        """Move results that arrive within ``POLL_INTERVAL_S`` from ``pending`` to ``parts``.

        A collector that died is replaced, counted in ``lost``, and requested again.
        """
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=POLL_INTERVAL_S)
        # Failures are raised at once: the other collectors may take long.
        for ref in done:
            number = pending.pop(ref)
            part = self._receive_part(ref, number, is_last_attempt=lost[number] == MAX_REPLACEMENTS)
            if part is None:
                lost[number] += 1
                pending[request_shard(number)] = number
            else:
                parts[number] = part

    def _receive_part(
        self, ref: Any, number: int, is_last_attempt: bool
    ) -> CollectedTrajectories | None:
        """Return the result of collector ``number``; None where it died and was replaced.

        With ``is_last_attempt`` it is not replaced, and ``WorkerDiedError`` is raised.
        """
        name = collector_name(number)
        try:
            return ray_get(ref, POLL_INTERVAL_S, name)
        except WorkerDiedError as error:
            if is_last_attempt:
                raise
            logger.warning("%s died; its unfinished trajectories start again: %s", name, error)
        self._replace_worker(number)
        return None

    def _count_finished(self) -> int:
        """Return the number of finished episodes of all workers.

        Where a worker does not answer in time, this is the last known number.
        """
        pending = [worker.count_finished.remote() for worker in self._remote_workers]
        names = [collector_name(number) for number in range(len(pending))]
        answers, unanswered = ray.wait(pending, num_returns=len(pending), timeout=POLL_INTERVAL_S)
        if unanswered:
            return self._num_finished
        try:
            self._num_finished = sum(gather_results(answers, POLL_INTERVAL_S, names))
        except WorkerDiedError:
            logger.debug("a collector died; its replacement follows", exc_info=True)
        return self._num_finished

    def close(self) -> None:
        """Stop the environments and the collector workers."""
        if self._runner is not None and self._local_worker is not None:
            self._runner.run(self._local_worker.close())
            self._runner.close()
        self._runner = None
        self._local_worker = None
        workers, self._remote_workers = self._remote_workers, []
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

    def _compute_timeout_s(self, num_specs: int, settings: RolloutSettings) -> float:
        """Return the timeout in seconds of a call: the sum of the timeouts of all waits."""
        env = self._env_config
        rounds = math.ceil(num_specs / (env.num_workers * env.envs_per_worker))
        step_s = env.step_timeout_s + REQUEST_TIMEOUT_S
        # All environments of a round run concurrently: a round takes as long as one episode.
        episode_s = env.reset_timeout_s + settings.max_steps * step_s
        return START_TIMEOUT_S + rounds * episode_s + REQUEST_TIMEOUT_S


def collector_name(number: int) -> str:
    """Return the name of a collector worker in messages and at the engines."""
    return f"collector-{number}"


def choose_node(number: int, nodes: Sequence[Mapping[str, Any]], avoided: str | None = None) -> str:
    """Return the ID of the node for collector ``number``, from the entries of ``ray.nodes()``.

    Nodes that are alive are used in turn, those with most CPUs first. ``avoided`` is used only
    where it is the only node.
    """
    alive = [node for node in nodes if node["Alive"]]
    alive = [node for node in alive if node["NodeID"] != avoided] or alive
    alive.sort(key=lambda node: (-node["Resources"].get("CPU", 0.0), node["NodeID"]))
    return alive[number % len(alive)]["NodeID"]


def _merge_parts(
    parts: Sequence[CollectedTrajectories], trajectories: list[Trajectory]
) -> CollectedTrajectories:
    # The parts were generated concurrently, so the slowest one gives the time.
    collected = CollectedTrajectories(
        trajectories=trajectories,
        rollout_s=max(part.rollout_s for part in parts),
        thoughts_s=max(part.thoughts_s for part in parts),
        env_restarts=sum(part.env_restarts for part in parts),
        lost_collectors=sum(part.lost_collectors for part in parts),
    )
    return _check_group_starts(collected)


def _check_group_starts(collected: CollectedTrajectories) -> CollectedTrajectories:
    """Return ``collected`` unchanged, with a warning about failed trajectories.

    Raises ``GroupMismatch`` where members of a group started from different states.
    """
    trajectories = collected.trajectories
    assert_same_start([t.spec.uid for t in trajectories], [t.start_state for t in trajectories])
    failed = [t for t in trajectories if t.aborted is not None]
    if failed:
        first = failed[0]
        logger.warning(
            "%d trajectories failed; the first one: %s %s",
            len(failed),
            first.aborted,
            first.abort_detail[:300],
        )
    return collected


def shard_by_group(specs: Sequence[RolloutSpec], shards: int) -> list[list[RolloutSpec]]:
    """Return ``specs`` in ``shards`` lists; whole groups are assigned in turn.

    uids a a b b c c in 2 shards: [a a c c] and [b b]
    """
    group_numbers: dict[str, int] = {}
    assigned: list[list[RolloutSpec]] = [[] for _ in range(shards)]
    for spec in specs:
        # Members of a group stay together: with ``mixed_groups``, alternative thoughts depend on
        # all returns of the group.
        group = group_numbers.setdefault(spec.uid, len(group_numbers))
        assigned[group % shards].append(spec)
    return assigned
