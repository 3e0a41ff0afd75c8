"""Roles, resource pools and the worker groups of one training run."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from verl.models.forward_kind import PACKED_SETTINGS, ForwardSettings
from verl.protocol import DataProto
from verl.records import WeightFingerprints, WrittenFiles
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.calls import gather_results
from verl.trainer.ppo.minibatch_sharding import (
    FORWARD_COLUMNS,
    SCORE_REQUEST_COLUMNS,
    call_with_balanced_rows,
    select_columns,
)
from verl.workers.rollout.base import EnginePart
from verl.workers.weight_transfer import SYNC_TIMEOUT_S, call_engines

logger = logging.getLogger(__name__)
WRITE_TIMEOUT_S = 3600.0  # timeout until all ranks have written their shards
POLL_INTERVAL_S = 0.2  # time between two polls of the ranks
MAX_SHOWN_NAMES = 3  # largest number of tensor names in a message


class WeightSyncError(RuntimeError):
    """Error: engines received other weights than were sent, or an update changed no weight."""


class Role(Enum):
    """Role of a worker group; values are verl's role names."""

    Actor = "actor"
    Rollout = "rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "reward_model"


@dataclass
class ResourcePoolManager:
    """Manager of named pools of devices. Roles in the same pool share its devices.

    ``resource_pool_spec`` has the processes per node of each pool: ``{"global_pool": [8, 8]}``.
    ``mapping`` assigns each role to a pool.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    use_gpu: bool = False
    cpus_per_worker: float = 1.0
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Create all pools. Ray reserves the devices of a pool when its first worker starts."""
        for pool_name, processes_per_node in self.resource_pool_spec.items():
            num_roles = sum(pool == pool_name for pool in self.mapping.values())
            self.resource_pool_dict[pool_name] = RayResourcePool(
                process_on_nodes=processes_per_node,
                use_gpu=self.use_gpu,
                name_prefix=pool_name,
                max_colocate_count=max(1, num_roles),
                cpus_per_worker=self.cpus_per_worker,
            )

    def reserve_pools(self) -> None:
        """Reserve all pools now, first those with the most devices on one node."""
        pools = self.resource_pool_dict.values()
        for pool in sorted(pools, key=lambda pool: max(pool.process_on_nodes), reverse=True):
            pool.reserve_slots()

    def is_pool_shared(self, *roles: Role) -> bool:
        """Return True if all ``roles`` are in the same pool."""
        return len({self.mapping[role] for role in roles}) == 1

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """Return the pool to which ``role`` is assigned."""
        return self.resource_pool_dict[self.mapping[role]]

    def shutdown(self) -> None:
        """Release the reservations of all pools."""
        for pool in self.resource_pool_dict.values():
            pool.shutdown()


@dataclass(eq=False)
class TrainingWorkers:
    """Worker groups and rollout engines of a run, and the calls of the trainer to them.

    Args:
        is_balanced: assign the rows of forward passes to ranks by their numbers of tokens.
        weight_transfer: transport of the weights to the engines: ``store``, ``ipc`` or ``nccl``.
        engines_sleep: the engines share devices with the groups, so they sleep during training.
        sends_adapter: a weight sync sends only the LoRA adapter. The first one also sends the
            weights of the base model.
        actor_computes_reference: the reference policy is the actor without its LoRA adapter.
        actor_forward: settings of the forward passes of actor and reference, by which the tokens
            to compute for a row are counted.
        critic_forward: settings of the forward passes of the critic.
    """

    actor_group: RayWorkerGroup
    rollout_workers: Sequence[Any]
    reference_group: RayWorkerGroup | None = None
    critic_group: RayWorkerGroup | None = None
    is_balanced: bool = True
    reward_group: RayWorkerGroup | None = None
    weight_transfer: str = "store"
    engines_sleep: bool = True
    sends_adapter: bool = False
    actor_computes_reference: bool = False
    actor_forward: ForwardSettings = PACKED_SETTINGS
    critic_forward: ForwardSettings = PACKED_SETTINGS
    _engine_totals: dict[str, float] = field(default_factory=dict, init=False)
    _are_engines_asleep: bool = field(default=False, init=False)
    _last_sent_fingerprints: WeightFingerprints | None = field(default=None, init=False)
    _is_base_sent: bool = field(default=False, init=False)  # base weights, without adapter

    @classmethod
    def start(
        cls,
        specs: Mapping[Role, RayClassWithInitArgs],
        pools: ResourcePoolManager,
        rollout_workers: Sequence[Any],
        is_balanced: bool = True,
        weight_transfer: str = "store",
        sends_adapter: bool = False,
        actor_computes_reference: bool = False,
    ) -> "TrainingWorkers":
        """Start the groups of ``specs``, load their models one after another, and wait for engines.

        Roles that share processes start as one group. Engines that share GPUs with the groups load
        before the groups. Other engines load at the same time as the groups.
        """
        engines_share_devices = pools.is_pool_shared(Role.Actor, Role.Rollout)
        should_load_engines_first = engines_share_devices and pools.use_gpu
        if should_load_engines_first:
            # An engine measures the free memory of its device while it loads. No group may
            # allocate memory in the meantime.
            call_engines(rollout_workers, "wait_until_ready")
            call_engines(rollout_workers, "sleep", _get_sleep_level(sends_adapter))
        groups: dict[Role, RayWorkerGroup] = {}
        for role, spec in specs.items():
            group = RayWorkerGroup(pools.get_resource_pool(role), spec, name_prefix=role.value)
            subgroups = group.spawn(spec.role_names)
            groups |= {Role(name): subgroups[name] for name in subgroups} or {role: group}
        # Load one group at a time: rank 0 has a whole model in host memory while it loads.
        for group in groups.values():
            group.submit("init_model").get()
        call_engines(rollout_workers, "wait_until_ready")
        workers = cls(
            groups[Role.Actor],
            rollout_workers,
            groups.get(Role.RefPolicy),
            groups.get(Role.Critic),
            is_balanced,
            groups.get(Role.RewardModel),
            weight_transfer,
            engines_sleep=engines_share_devices,
            sends_adapter=sends_adapter,
            actor_computes_reference=actor_computes_reference,
            actor_forward=groups[Role.Actor].get_forward_settings()[0],
        )
        if workers.critic_group is not None:
            workers.critic_forward = workers.critic_group.get_forward_settings()[0]
        workers._are_engines_asleep = should_load_engines_first
        return workers

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks among which rows are split."""
        return self.actor_group.world_size

    @property
    def has_reference(self) -> bool:
        """True if the run has a reference policy."""
        return self.actor_computes_reference or self.reference_group is not None

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return old log-probs and entropies of rows, and the results of their score requests."""
        columns = select_columns(data, FORWARD_COLUMNS, SCORE_REQUEST_COLUMNS)
        return self._call_on_ranks(self.actor_group.compute_log_prob, columns, self.actor_forward)

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Return log-probs under the reference policy. Raise ``ValueError`` if there is none."""
        group = self.actor_group if self.actor_computes_reference else self.reference_group
        if group is None:
            raise ValueError("this run has no reference policy")
        columns = select_columns(data, FORWARD_COLUMNS, ())
        return self._call_on_ranks(group.compute_ref_log_prob, columns, self.actor_forward)

    def compute_values(self, data: DataProto) -> DataProto:
        """Return values of the tokens of rows. Raise ``ValueError`` if there is no critic."""
        if self.critic_group is None:
            raise ValueError("this run has no critic")
        columns = select_columns(data, FORWARD_COLUMNS, ())
        return self._call_on_ranks(self.critic_group.compute_values, columns, self.critic_forward)

    def _call_on_ranks(
        self,
        compute_on_ranks: Callable[[DataProto], DataProto],
        data: DataProto,
        forward_settings: ForwardSettings,
    ) -> DataProto:
        return call_with_balanced_rows(
            compute_on_ranks, data, self.data_parallel_size, self.is_balanced, forward_settings
        )

    def sleep_engines(self) -> None:
        """Free the device memory of the engines if they share devices with the groups."""
        if self._are_engines_asleep or not self.engines_sleep:
            return
        call_engines(self.rollout_workers, "sleep", _get_sleep_level(self.sends_adapter))
        self._are_engines_asleep = True

    def wake_engines(self) -> None:
        """Allocate the memory for weights in sleeping engines."""
        self._wake_engine_part("weights")

    def sync_weights(self, version: int, is_updated: bool = False) -> dict[str, float]:
        """Send the actor's weights to the engines as version ``version``, not through the driver.

        ``is_updated`` states that the optimizer took a step with a gradient since the last sync.
        Returns ``perf/weight_sync_bytes``: the bytes that each engine received.

        Raises:
            WeightSyncError: an engine did not receive all weights, or the weights did not change
                since the last sync although ``is_updated`` is True.
        """
        num_bytes = 0
        if self.sends_adapter and not self._is_base_sent:
            num_bytes = self._send_and_verify(self._send_weights, version).num_bytes
            self._is_base_sent = True
        send_method = self._send_adapter if self.sends_adapter else self._send_weights
        sent_fingerprints = self._send_and_verify(send_method, version)
        num_bytes += sent_fingerprints.num_bytes
        self._wake_engine_part("kv_cache")
        self._are_engines_asleep = False
        if is_updated:
            verify_weights_changed(self._last_sent_fingerprints, sent_fingerprints, version)
        self._last_sent_fingerprints = sent_fingerprints
        return {"perf/weight_sync_bytes": float(num_bytes)}

    def _send_and_verify(
        self, send_method: Callable[[int], list[dict[str, int]]], version: int
    ) -> WeightFingerprints:
        """Send weights, verify that engines received them, and return the sent fingerprints."""
        received_checksums = send_method(version)
        fingerprint_refs = self.actor_group.call_for_refs("get_sent_fingerprints")[:1]
        result_labels = ["fingerprints of the weights"]
        sent_fingerprints: WeightFingerprints = gather_results(
            fingerprint_refs, SYNC_TIMEOUT_S, result_labels
        )[0]
        verify_weights_received(sent_fingerprints, received_checksums, version)
        return sent_fingerprints

    def _send_weights(self, version: int) -> list[dict[str, int]]:
        """Send all weights by the transport of the run (``weight_transfer``).

        In a run whose weight syncs send only the LoRA adapter, these are the weights of the base
        model, which the first sync sends.
        """
        if self.weight_transfer == "store":
            return self._send_by_object_store("export_weights", "update_weights", version)
        send_refs = self.actor_group.call_for_refs("send_weights", self.rollout_workers, version)
        result_labels = ["sending of the weights"] * len(send_refs)
        return gather_results(send_refs, SYNC_TIMEOUT_S, result_labels)[0]

    def _send_adapter(self, version: int) -> list[dict[str, int]]:
        # An adapter is small, so it goes through the object store with every transport.
        return self._send_by_object_store("export_adapter", "load_adapter", version)

    def _send_by_object_store(
        self, export_method: str, load_method: str, version: int
    ) -> list[dict[str, int]]:
        """Send weights to the engines through Ray's object store; return the received checksums."""
        weights_ref, *other_refs = self.actor_group.call_for_refs(export_method)
        received_checksums = call_engines(self.rollout_workers, load_method, weights_ref, version)
        # The other ranks take part in gathering and return nothing. Raise their errors here.
        gather_results(other_refs, SYNC_TIMEOUT_S, ["export of the weights"] * len(other_refs))
        return received_checksums

    def _wake_engine_part(self, engine_part: EnginePart) -> None:
        if self._are_engines_asleep:
            call_engines(self.rollout_workers, "wake", engine_part)

    def pop_engine_metrics(self) -> dict[str, float]:
        """Return ``perf/engine_*`` since the last call, summed over all engines."""
        stats_by_engine = call_engines(self.rollout_workers, "get_stats")
        stat_keys = ("tokens", "steps", "busy_s")
        engine_totals = {
            key: float(sum(engine_stats[key] for engine_stats in stats_by_engine))
            for key in stat_keys
        }
        # The counts of engines begin at their start, so subtract the counts of the last call.
        num_tokens, num_engine_steps, busy_s = (
            engine_totals[key] - self._engine_totals.get(key, 0.0) for key in stat_keys
        )
        self._engine_totals = engine_totals
        return {
            "perf/engine_tokens": num_tokens,
            "perf/engine_busy_s": busy_s,
            "perf/engine_throughput": num_tokens / max(busy_s, 1e-9),
            "perf/engine_batch": num_tokens / max(num_engine_steps, 1.0),  # tokens per engine step
        }

    def save_checkpoint(self, directory: Path) -> Callable[[], list[WrittenFiles]]:
        """Copy the state of actor and critic, and start to write it below ``directory``.

        The returned function waits for all ranks and returns the files that each rank wrote.
        """
        self.actor_group.save_checkpoint(str(directory / "actor"))
        if self.critic_group is not None:
            self.critic_group.save_checkpoint(str(directory / "critic"))
        return self._wait_for_files

    def _wait_for_files(self) -> list[WrittenFiles]:
        # This method runs in another thread and polls the ranks. A remote call that waits for the
        # write would block the rank, which has to train at the same time.
        groups = [group for group in (self.actor_group, self.critic_group) if group is not None]
        deadline = time.monotonic() + WRITE_TIMEOUT_S
        while True:
            files_by_rank = [rank_files for group in groups for rank_files in group.written_files()]
            written_files = [rank_files for rank_files in files_by_rank if rank_files is not None]
            if len(written_files) == len(files_by_rank):
                return written_files
            if time.monotonic() > deadline:
                writer_names = ", ".join(files.writer for files in written_files) or "none"
                raise TimeoutError(
                    f"{len(files_by_rank) - len(written_files)} of {len(files_by_rank)} ranks "
                    f"still write a checkpoint after {WRITE_TIMEOUT_S:g} s; done: {writer_names}"
                )
            time.sleep(POLL_INTERVAL_S)

    def load_checkpoint(self, directory: Path) -> None:
        """Load the checkpoint that ``save_checkpoint`` wrote below ``directory``."""
        self.actor_group.load_checkpoint(str(directory / "actor"))
        if self.critic_group is not None:
            self.critic_group.load_checkpoint(str(directory / "critic"))

    def shutdown(self, timeout_s: float = 5.0) -> None:
        """End all groups. Busy groups have ``timeout_s`` in total to finish their calls."""
        deadline = time.monotonic() + timeout_s
        for group in (self.actor_group, self.reference_group, self.critic_group, self.reward_group):
            if group is not None:
                group.shutdown(max(0.1, deadline - time.monotonic()))


def _get_sleep_level(sends_adapter: bool) -> int:
    # Level 2 of vLLM's sleep mode discards the weights, level 1 keeps them. Engines with an adapter
    # get the base weights only once, so they must keep them.
    return 1 if sends_adapter else 2


# ---- checks after every weight sync. A failed check ends the run: if the rollout engines had other
# ---- weights than the trainer, all later results would be wrong without any other sign.


def verify_weights_received(
    fingerprints: WeightFingerprints, received_checksums: Sequence[Mapping[str, int]], version: int
) -> None:
    """Raise ``WeightSyncError`` unless every engine received the weights that were sent.

    ``received_checksums`` has, for each engine, the checksums of the received tensors by name.
    """
    for worker_number, checksums in enumerate(received_checksums):
        sent_weights = fingerprints.sent_weights
        differing_names = [
            name for name in sent_weights if checksums.get(name) != sent_weights[name]
        ]
        if differing_names:
            raise WeightSyncError(
                f"rollout worker {worker_number} did not receive version {version} of the weights: "
                f"{len(differing_names)} of {len(sent_weights)} are missing or differ "
                "from those that were sent, for example "
                f"{', '.join(differing_names[:MAX_SHOWN_NAMES])}; it would generate with an older "
                "policy"
            )


def verify_weights_changed(
    fingerprints_before: WeightFingerprints | None,
    fingerprints_after: WeightFingerprints,
    version: int,
) -> None:
    """Raise ``WeightSyncError`` if an update that must have changed weights changed none.

    With ``fingerprints_before`` None, nothing is checked. The error message names the weights by
    ``version``.
    """
    if (
        fingerprints_before is not None
        and fingerprints_before.master_weights == fingerprints_after.master_weights
    ):
        raise WeightSyncError(
            f"the optimizer took a step with a gradient before version {version}, but no weight "
            "of the rollout engines has changed: the step, the adapters or the learning rate have "
            "no effect; see actor/grad_norm and actor/lr"
        )


def has_updated_weights(metrics: Mapping[str, float]) -> bool:
    """Return True if the policy update with these metrics must have changed weights.

    At least one optimizer step was neither skipped nor without gradient, and the learning rate is
    not 0.
    """
    num_steps = metrics.get("actor/optimizer_steps", 0.0)
    num_skipped_steps = metrics.get("actor/skipped_steps", 0.0)
    num_zero_steps = metrics.get("actor/zero_steps", 0.0)
    has_learning_rate = metrics.get("actor/lr", 0.0) > 0.0
    return num_steps > num_skipped_steps + num_zero_steps and has_learning_rate
