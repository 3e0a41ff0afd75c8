"""Group of collector workers that generates one trajectory for each rollout spec (request).

A collector that dies, alone or with its node, is replaced on another node of the cluster. Its
unfinished trajectories start again with the same seeds.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import ray
from ray.actor import ActorHandle
from ray.experimental import get_local_object_locations
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agent_system.environments.tasks import assert_same_start_states
from agent_system.multi_turn_rollout.collector_worker import (
    CollectedTrajectories,
    CollectorWorker,
    PolicyTokenizer,
)
from agent_system.multi_turn_rollout.engine_client import REQUEST_TIMEOUT_S, RolloutWorkerHandle
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.stored_trajectories import (
    StoredTrajectories,
    encode_rows_on_collectors,
    link_stored_trajectories,
)
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory
from verl.config.schema.env import EnvConfig
from verl.protocol import DataProto
from verl.single_controller.base.worker_group import WorkerDiedError
from verl.single_controller.ray.calls import gather_results, ray_get
from verl.utils.jsonl import RowEncoder
from verl.utils.progress import Progress
from verl.utils.waits import mark_as_awaited

logger = logging.getLogger(__name__)
# Seconds to start a collector with its environments and, on a new machine, Ray's processes.
START_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 10.0  # seconds for a collector to stop its environments before it is killed
SLOWEST_TOKEN_S = 0.5  # maximum seconds that a slow engine takes per sampled token
POLL_INTERVAL_S = 1.0  # seconds between two checks of the progress
# Maximum replacements of one collector per call. More deaths indicate a systematic fault.
MAX_REPLACEMENTS_PER_CALL = 2

# Function that requests the trajectories of collector ``number`` and returns the Ray object ref.
RequestShard: TypeAlias = Callable[[int], Any]


class CollectorGroup:
    """All collector workers of a run, which generate trajectories in environments.

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
        self._rollout_workers = list(rollout_workers)
        self._tokenizer = tokenizer
        self._worker_arguments = (env_config, tokenizer, self._rollout_workers)
        self._worker_options = options
        self._remote_workers: list[Any] = []  # actor handles; their methods are created at run time
        self._node_ids: dict[int, str] = {}
        # For each collector: started specs (requests for a trajectory) without result, by traj_uid.
        self._specs_in_flight = [dict[str, RolloutSpec]() for _ in range(env_config.num_collectors)]
        self._num_replacements = Counter[int]()
        self._stored_refs: dict[int, Any] = {}  # Ray refs of trajectories, by collector
        # Replaced collectors, which get all unfinished specs in the next call.
        self._replaced_collectors: set[int] = set()
        self._num_finished_episodes = 0  # finished episodes at the last check
        # The worker in this process and its asyncio loop.
        self._local_worker: tuple[asyncio.Runner, CollectorWorker] | None = None
        if not isinstance(rollout_workers[0], ActorHandle):
            worker = CollectorWorker(*self._worker_arguments, **options)
            self._local_worker = (asyncio.Runner(), worker)
            return
        collector_numbers = range(env_config.num_collectors)
        self._remote_workers = [self._start_worker(number) for number in collector_numbers]

    def _start_worker(self, number: int) -> Any:
        # A collector waits nearly all the time, so it reserves no CPU. It reserves one byte of
        # memory, because Ray places actors without resources on any node. A replacement uses
        # another node: Ray may not have noticed yet that the node is dead.
        self._node_ids[number] = choose_node(number, ray.nodes(), self._node_ids.get(number))
        strategy = NodeAffinitySchedulingStrategy(self._node_ids[number], soft=True)
        options = {"num_cpus": 0, "memory": 1, "scheduling_strategy": strategy}
        actor = ray.remote(CollectorWorker).options(**options)
        worker: Any = actor.remote(
            *self._worker_arguments, self._build_client_name(number), **self._worker_options
        )
        # Start the environments now, while other processes load. An error is raised again by the
        # first call that collects trajectories.
        worker.start.remote()
        return worker

    def _build_client_name(self, number: int) -> str:
        """Return the name under which collector ``number`` sends requests to the rollout workers.

        A replacement has another name, so that it does not get results of its predecessor.
        """
        name, num_replacements = build_collector_name(number), self._num_replacements[number]
        return f"{name}.{num_replacements}" if num_replacements else name

    def _replace_worker(self, number: int) -> None:
        # The old actor may be alive but unreachable.
        ray.kill(self._remote_workers[number])
        for rollout_worker in self._rollout_workers:
            rollout_worker.abort.remote(self._build_client_name(number))
        self._num_replacements[number] += 1
        self._replaced_collectors.add(number)
        self._remote_workers[number] = self._start_worker(number)

    def collect_finished_groups(
        self, specs: Sequence[RolloutSpec], settings: RolloutSettings, max_unfinished_groups: int
    ) -> CollectedTrajectories:
        """Start new trajectories and wait until only ``max_unfinished_groups`` groups remain.

        Return the trajectories of the finished groups, also of earlier calls. Others continue.
        """
        if self._local_worker is not None:
            runner, worker = self._local_worker
            return _check_equal_start_states(
                runner.run(worker.collect_finished_groups(specs, settings, max_unfinished_groups))
            )
        num_workers = len(self._remote_workers)
        shards = shard_by_group(specs, num_workers)
        for specs_in_flight, shard in zip(self._specs_in_flight, shards, strict=True):
            specs_in_flight.update({spec.traj_uid: spec for spec in shard})

        def request_shard(number: int) -> Any:
            shard = shards[number]
            if number in self._replaced_collectors:
                shard = list(self._specs_in_flight[number].values())
                self._replaced_collectors.remove(number)
            max_unfinished_of_collector = len(range(number, max_unfinished_groups, num_workers))
            return self._start_remote_collect(
                number, "collect_finished_groups", shard, settings, max_unfinished_of_collector
            )

        results = self._generate_with_timeout(
            request_shard, range(num_workers), len(specs), settings
        )
        for specs_in_flight, result in zip(self._specs_in_flight, results, strict=True):
            for trajectory in result.trajectories:
                del specs_in_flight[trajectory.spec.traj_uid]
        return _merge_results(results, [t for result in results for t in result.trajectories])

    def collect(
        self, specs: Sequence[RolloutSpec], settings: RolloutSettings
    ) -> CollectedTrajectories:
        """Generate one trajectory for each of ``specs``, and return them in order."""
        if self._local_worker is not None:
            runner, worker = self._local_worker
            return _check_equal_start_states(runner.run(worker.collect(specs, settings)))
        shards = shard_by_group(specs, len(self._remote_workers))

        def request_shard(number: int) -> Any:
            return self._start_remote_collect(number, "collect", shards[number], settings)

        busy_collectors = [number for number, shard in enumerate(shards) if shard]
        results = self._generate_with_timeout(request_shard, busy_collectors, len(specs), settings)
        # Results are in the order of shards; return them in the order of the specs.
        trajectory_by_index = {t.spec.index: t for result in results for t in result.trajectories}
        return _merge_results(results, [trajectory_by_index[spec.index] for spec in specs])

    def _start_remote_collect(self, number: int, method: str, *args: Any) -> Any:
        """Call ``method`` of collector ``number``, which generates trajectories.

        Return the Ray reference of their copies without texts. The reference of the whole
        trajectories is kept for ``_link_stored_trajectories``.
        """
        collect_method = self._remote_workers[number].collect_and_separate_texts.options(
            num_returns=2
        )
        ref_without_texts, self._stored_refs[number] = collect_method.remote(method, *args)
        return ref_without_texts

    def _link_stored_trajectories(self, results: Mapping[int, CollectedTrajectories]) -> None:
        """Link the textless trajectories in ``results`` with the whole ones in Ray's store."""
        for number, result in results.items():
            source = StoredTrajectories(self._stored_refs.pop(number), number)
            link_stored_trajectories(result.trajectories, source)

    def _wait_for_stored_trajectories(self, number: int, collector_name: str) -> None:
        """Wait until the whole trajectories of collector ``number`` are on this node.

        Then they remain available if the collector or its node dies. Raises ``WorkerDiedError`` if
        they were lost with the node of the collector.
        """
        ref = self._stored_refs[number]
        ready_refs, _ = ray.wait([ref], timeout=REQUEST_TIMEOUT_S)
        if not ready_refs:
            logger.warning(
                "trajectories of %s are not copied yet: its node must stay alive", collector_name
            )
        # If the object was lost, Ray stores an error in its place, and ray_get raises it. ray_get
        # loads all trajectories, which takes long. So call it only if the collector's node has no
        # copy any more, and for small objects, which have no location.
        node_ids_with_copy = get_local_object_locations([ref]).get(ref, {}).get("node_ids", [])
        if self._node_ids[number] not in node_ids_with_copy:
            ray_get(ref, POLL_INTERVAL_S, f"trajectories of {collector_name}")

    def encode_rows(self, data: DataProto, encode: RowEncoder) -> Iterator[memoryview]:
        """Yield a JSON line for each row of ``data``, encoded by the collector with its texts."""
        return encode_rows_on_collectors(data, encode, list(self._remote_workers), self._tokenizer)

    def _generate_with_timeout(
        self,
        request_shard: RequestShard,
        collector_numbers: Sequence[int],
        num_specs: int,
        settings: RolloutSettings,
    ) -> list[CollectedTrajectories]:
        env_config = self._env_config
        num_rounds = math.ceil(num_specs / (env_config.num_workers * env_config.envs_per_worker))
        turn_timeout_s = max(REQUEST_TIMEOUT_S, settings.max_turn_tokens * SLOWEST_TOKEN_S)
        step_timeout_s = env_config.step_timeout_s + turn_timeout_s
        # A round is one episode in each environment. They run concurrently, so a round takes as
        # long as the longest episode.
        episode_timeout_s = env_config.reset_timeout_s + settings.max_steps * step_timeout_s
        # The time until the next episode ends is limited by the time of the start of the
        # environments and of all rounds of episodes together.
        timeout_s = START_TIMEOUT_S + num_rounds * episode_timeout_s + REQUEST_TIMEOUT_S
        with Progress("generating", num_specs, "trajectories") as progress:
            results = self._wait_for_results(request_shard, collector_numbers, timeout_s, progress)
        self._link_stored_trajectories(dict(zip(collector_numbers, results, strict=True)))
        return results

    def _wait_for_results(
        self,
        request_shard: RequestShard,
        collector_numbers: Sequence[int],
        timeout_s: float,
        progress: Progress,
    ) -> list[CollectedTrajectories]:
        """Send a request to each collector and return their trajectories.

        Raises the error of a collector, ``WorkerDiedError`` if one died too often, and
        ``WorkerTimeoutError`` if no episode ends within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        num_finished_before = num_finished = self._count_finished_episodes()
        results: dict[int, CollectedTrajectories] = {}
        num_lost_by_collector = Counter[int]()
        number_by_ref = {request_shard(number): number for number in collector_numbers}
        with mark_as_awaited(map(build_collector_name, collector_numbers)) as awaited_names:
            while number_by_ref:
                self._receive_results(number_by_ref, results, num_lost_by_collector, request_shard)
                awaited_names[:] = map(build_collector_name, number_by_ref.values())
                if not number_by_ref:
                    break
                if time.monotonic() > deadline:
                    gather_results(list(number_by_ref), 0.0, awaited_names)
                previous_num_finished = num_finished
                num_finished = self._count_finished_episodes()
                if num_finished != previous_num_finished:
                    deadline = time.monotonic() + timeout_s
                progress.set_done(max(0, num_finished - num_finished_before))
        for number in collector_numbers:
            results[number].lost_collectors = num_lost_by_collector[number]
        return [results[number] for number in collector_numbers]

    def _receive_results(
        self,
        number_by_ref: dict[Any, int],
        results: dict[int, CollectedTrajectories],
        num_lost_by_collector: Counter[int],
        request_shard: RequestShard,
    ) -> None:
        """Move results that arrive within ``POLL_INTERVAL_S`` to ``results``.

        A collector that died is replaced, counted in ``num_lost_by_collector``, and requested
        again. If it dies after ``MAX_REPLACEMENTS_PER_CALL`` replacements, ``WorkerDiedError`` is
        raised.
        """
        done_refs, _ = ray.wait(
            list(number_by_ref), num_returns=len(number_by_ref), timeout=POLL_INTERVAL_S
        )
        # Raise failures immediately: the other collectors may take long.
        for ref in done_refs:
            number = number_by_ref.pop(ref)
            name = build_collector_name(number)
            try:
                result = ray_get(ref, POLL_INTERVAL_S, name)
                self._wait_for_stored_trajectories(number, name)
                results[number] = result
            except WorkerDiedError as error:
                if num_lost_by_collector[number] == MAX_REPLACEMENTS_PER_CALL:
                    raise
                logger.warning("%s died; its trajectories start again: %s", name, error)
                self._replace_worker(number)
                num_lost_by_collector[number] += 1
                number_by_ref[request_shard(number)] = number

    def _count_finished_episodes(self) -> int:
        """Return the number of finished episodes of all workers, or the last known one."""
        count_refs = [worker.count_finished_episodes.remote() for worker in self._remote_workers]
        collector_names = [build_collector_name(number) for number in range(len(count_refs))]
        answered_refs, unanswered_refs = ray.wait(
            count_refs, num_returns=len(count_refs), timeout=POLL_INTERVAL_S
        )
        if unanswered_refs:
            return self._num_finished_episodes
        try:
            self._num_finished_episodes = sum(
                gather_results(answered_refs, POLL_INTERVAL_S, collector_names)
            )
        except WorkerDiedError:
            logger.debug("a collector died; its replacement follows", exc_info=True)
        return self._num_finished_episodes

    def close(self) -> None:
        """Stop the environments and the collector workers."""
        if self._local_worker is not None:
            runner, worker = self._local_worker
            runner.run(worker.close())
            runner.close()
            self._local_worker = None
        workers, self._remote_workers = self._remote_workers, []
        if not workers:
            return
        close_refs = [worker.close.remote() for worker in workers]
        _, unclosed_refs = ray.wait(
            close_refs, num_returns=len(close_refs), timeout=CLOSE_TIMEOUT_S
        )
        if unclosed_refs:
            warning_format = "%d collector workers did not close within %.0f s"
            logger.warning(warning_format, len(unclosed_refs), CLOSE_TIMEOUT_S)
        for worker in workers:
            ray.kill(worker)


def build_collector_name(number: int) -> str:
    return f"collector-{number}"


def choose_node(
    number: int, nodes: Sequence[Mapping[str, Any]], avoided_node_id: str | None = None
) -> str:
    """Return the ID of the node for collector ``number``, from the entries of ``ray.nodes()``.

    Live nodes are used in turn, those with most CPUs first. ``avoided_node_id`` is used only if no
    other node is alive. Raises ``WorkerDiedError`` if no node is alive.
    """
    live_nodes = [node for node in nodes if node["Alive"]]
    if not live_nodes:
        name = build_collector_name(number)
        raise WorkerDiedError(f"no node is left for {name}: Ray's node processes have ended")
    live_nodes = [node for node in live_nodes if node["NodeID"] != avoided_node_id] or live_nodes
    live_nodes.sort(key=lambda node: (-node["Resources"].get("CPU", 0.0), node["NodeID"]))
    return live_nodes[number % len(live_nodes)]["NodeID"]


def _merge_results(
    results: Sequence[CollectedTrajectories], trajectories: list[Trajectory]
) -> CollectedTrajectories:
    # The collectors worked concurrently, so the time of the slowest one counts.
    return _check_equal_start_states(
        CollectedTrajectories(
            trajectories=trajectories,
            rollout_s=max(result.rollout_s for result in results),
            thoughts_s=max(result.thoughts_s for result in results),
            env_restarts=sum(result.env_restarts for result in results),
            lost_collectors=sum(result.lost_collectors for result in results),
        )
    )


def _check_equal_start_states(
    collected_trajectories: CollectedTrajectories,
) -> CollectedTrajectories:
    """Return ``collected_trajectories`` unchanged, and log a warning about failed trajectories.

    Raises ``GroupMismatch`` if members of a group started from different states.
    """
    trajectories = collected_trajectories.trajectories
    assert_same_start_states(
        [t.spec.uid for t in trajectories], [t.start_state for t in trajectories]
    )
    failed_trajectories = [t for t in trajectories if t.aborted is not None]
    if failed_trajectories:
        warning_format = "%d trajectories failed; the first one: %s %s"
        logger.warning(
            warning_format,
            len(failed_trajectories),
            failed_trajectories[0].aborted,
            failed_trajectories[0].abort_detail[:300],
        )
    return collected_trajectories


def shard_by_group(specs: Sequence[RolloutSpec], num_shards: int) -> list[list[RolloutSpec]]:
    """Split ``specs`` into ``num_shards`` lists, with whole groups assigned round robin.

    Example: the uids a a b b c c in 2 shards give [a a c c] and [b b].
    """
    group_numbers: dict[str, int] = {}
    specs_by_shard: list[list[RolloutSpec]] = [[] for _ in range(num_shards)]
    for spec in specs:
        # Members of a group stay together: with ``mixed_groups``, alternative thoughts depend on
        # all returns of the group.
        group_number = group_numbers.setdefault(spec.uid, len(group_numbers))
        specs_by_shard[group_number % num_shards].append(spec)
    return specs_by_shard
