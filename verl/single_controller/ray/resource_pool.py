"""RayResourcePool: devices of nodes, reserved as Ray placement groups before workers start."""

import logging
import time
from collections import Counter, defaultdict
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.single_controller.base.worker_group import WorkerTimeoutError
from verl.single_controller.ray.calls import gather_results

logger = logging.getLogger(__name__)


class RayResourcePool:
    """Reservation of ``process_on_nodes[k]`` devices on the k-th node; ranks are numbered by node.

    Two entries of ``process_on_nodes`` use the same node only if the cluster has fewer nodes than
    entries. With ``use_gpu=None``, devices are GPUs if the cluster has any. Up to
    ``max_colocate_count`` worker groups can share the pool. On each device, every group gets
    ``cpus_per_worker`` CPUs and an equal fraction of the GPU. The reservation is made on first use.
    """

    def __init__(
        self,
        process_on_nodes: list[int] | None = None,
        use_gpu: bool | None = None,
        name_prefix: str = "pool",
        max_colocate_count: int = 1,
        cpus_per_worker: float = 1.0,
        timeout_s: float = 60.0,
    ) -> None:
        self.process_on_nodes = list(process_on_nodes or [1])
        if min(self.process_on_nodes) < 1 or max_colocate_count < 1 or cpus_per_worker <= 0:
            raise ValueError(
                "process_on_nodes and max_colocate_count must be at least 1 and cpus_per_worker "
                f"positive, got {self.process_on_nodes}, {max_colocate_count}, {cpus_per_worker}"
            )
        self.name_prefix = name_prefix
        self.max_colocate_count = max_colocate_count
        self.cpus_per_worker = cpus_per_worker
        self.timeout_s = timeout_s
        self._use_gpu = use_gpu
        self._placement_groups: list[PlacementGroup] = []

    @property
    def world_size(self) -> int:
        """Return the number of devices, the sum of ``process_on_nodes``."""
        return sum(self.process_on_nodes)

    @property
    def use_gpu(self) -> bool:
        """Return True if the devices are GPUs, False if they are CPUs."""
        if self._use_gpu is None:
            self._use_gpu = ray.cluster_resources().get("GPU", 0) > 0
        return self._use_gpu

    def actor_resources(self) -> dict[str, float]:
        """Return the Ray options ``num_cpus`` and ``num_gpus`` of one rank of a worker group."""
        gpus_per_rank = 1.0 / self.max_colocate_count if self.use_gpu else 0
        return {"num_cpus": self.cpus_per_worker, "num_gpus": gpus_per_rank}

    def reserve_slots(self) -> list[PlacementGroupSchedulingStrategy]:
        """Reserve the devices on the first call. Return a scheduling strategy for each rank.

        Raises ``WorkerTimeoutError`` if the cluster does not grant the reservation in
        ``timeout_s``.
        """
        if not self._placement_groups:
            self._create_placement_groups()
        return [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            for group, num_devices in zip(
                self._placement_groups, self.process_on_nodes, strict=True
            )
            for i in range(num_devices)
        ]

    def shared_actor_options(self, device: int) -> dict[str, Any]:
        """Return the Ray options of an actor that shares ``device`` with the pool's ranks.

        ``device`` is the index of the device in the pool. Without GPUs the actor can run on any
        node.
        """
        if not self.use_gpu:
            return {"scheduling_strategy": "SPREAD", **self.actor_resources()}
        return {"scheduling_strategy": self.reserve_slots()[device], **self.actor_resources()}

    def query_device_ids(self) -> list[str]:
        """Return the GPU id of every device, as in ``CUDA_VISIBLE_DEVICES`` of its node.

        A Ray task on each device reads the id. Raises ``WorkerTimeoutError`` if other actors use a
        GPU completely, so that the task cannot start.
        """
        task_resources = {"num_cpus": 0, "num_gpus": self.actor_resources()["num_gpus"]}
        device_id_task = ray.remote(_get_device_id)
        refs = [
            device_id_task.options(scheduling_strategy=strategy, **task_resources).remote()
            for strategy in self.reserve_slots()
        ]
        labels = [f"{self.name_prefix}[device {index}]" for index in range(len(refs))]
        return gather_results(refs, self.timeout_s, labels)

    def _create_placement_groups(self) -> None:
        # Worker groups share the GPU of a device, but each group needs its own CPUs.
        bundle: dict[str, float] = {"CPU": self.cpus_per_worker * self.max_colocate_count}
        if self.use_gpu:
            bundle["GPU"] = 1.0
        deadline = time.monotonic() + self.timeout_s
        for node_index, num_devices in enumerate(self.process_on_nodes):
            # Create one placement group per node: STRICT_PACK puts a whole group on one node.
            group = placement_group(
                [dict(bundle)] * num_devices,
                strategy="STRICT_PACK",
                name=f"{self.name_prefix}_{node_index}",
                # Ray would prefer a node that already has ranks of this pool.
                _soft_target_node_id=self._find_unused_node(bundle, num_devices),
            )
            self._placement_groups.append(group)
            # Wait at least 0.1 s, even after the deadline. This is enough if resources are free.
            if not group.wait(timeout_seconds=max(0.1, deadline - time.monotonic())):
                available_resources = ray.available_resources()
                free_resources = {key: available_resources.get(key, 0.0) for key in ("CPU", "GPU")}
                self.shutdown()
                raise WorkerTimeoutError(
                    f"resource pool {self.name_prefix!r}: {num_devices} x {bundle} on one node not "
                    f"granted in {self.timeout_s:g} s; free in the cluster: {free_resources}; fix: "
                    "request fewer devices, raise ray_init.num_cpus, or shut down groups that hold "
                    "resources"
                )
        logger.debug("resource pool %s: %s x %s", self.name_prefix, self.process_on_nodes, bundle)

    def _find_unused_node(self, bundle: dict[str, float], num_bundles: int) -> str | None:
        """Return the id of a node that can hold ``num_bundles`` and has no ranks of this pool.

        A node without any reservation is preferred, then the node with most free resources. Return
        None if no node suffices.
        """
        node_ids_of_groups = [
            placement_group_table(group)["bundles_to_node_id"] for group in self._placement_groups
        ]
        used_node_ids = {node for node_ids in node_ids_of_groups for node in node_ids.values()}
        reserved_by_node = _sum_reserved_resources()
        rating_by_node: dict[str, tuple[bool, float]] = {}
        for node in ray.nodes():
            free_amounts = Counter(node["Resources"] if node["Alive"] else {})
            free_amounts.subtract(reserved_by_node.get(node["NodeID"], {}))
            capacity_ratio = min(
                free_amounts[resource] / (amount * num_bundles)
                for resource, amount in bundle.items()
            )
            # 1e-6 tolerates rounding errors: numbers of CPUs can be fractions.
            if capacity_ratio > 1 - 1e-6 and node["NodeID"] not in used_node_ids:
                rating_by_node[node["NodeID"]] = (
                    node["NodeID"] not in reserved_by_node,
                    capacity_ratio,
                )
        return max(rating_by_node, key=rating_by_node.__getitem__, default=None)

    def shutdown(self) -> None:
        """Release the reservation. Ray then kills the workers that still use it."""
        for group in self._placement_groups:
            remove_placement_group(group)
        self._placement_groups = []


def _sum_reserved_resources() -> dict[str, Counter[str]]:
    """Return a dict node id -> resources that placement groups have reserved on this node."""
    reserved_by_node: dict[str, Counter[str]] = defaultdict(Counter)
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            for bundle, node in group["bundles_to_node_id"].items():
                reserved_by_node[node].update(group["bundles"][bundle])
    return reserved_by_node


def _get_device_id() -> str:
    """Return the id of the GPU that Ray assigned to this process."""
    (device_id,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return device_id
