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
    """Reservation of ``process_on_nodes[k]`` devices on the k-th node, in rank order.

    A node is used for several entries only if there are fewer nodes than entries. ``use_gpu`` None
    means that devices are GPUs if the cluster has any. A device has ``cpus_per_worker`` CPUs for
    each of the ``max_colocate_count`` groups that may share the pool. Ray gives each of these
    groups an equal fraction of the GPU. The reservation is made on first use. As a context manager,
    the pool releases it at the end.
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
        self._groups: list[PlacementGroup] = []

    @property
    def world_size(self) -> int:
        """Number of devices, the sum of ``process_on_nodes``."""
        return sum(self.process_on_nodes)

    @property
    def use_gpu(self) -> bool:
        """True if a device is a GPU."""
        if self._use_gpu is None:
            self._use_gpu = ray.cluster_resources().get("GPU", 0) > 0
        return self._use_gpu

    def actor_resources(self) -> dict[str, float]:
        """Return the Ray resource options of one rank of one group on this pool."""
        gpus = 1.0 / self.max_colocate_count if self.use_gpu else 0
        return {"num_cpus": self.cpus_per_worker, "num_gpus": gpus}

    def reserve_slots(self) -> list[PlacementGroupSchedulingStrategy]:
        """Return the strategy that starts an actor on each rank's device; reserve on first call.

        Raises ``WorkerTimeoutError`` with the requested and the free resources if the cluster does
        not grant the reservation in ``timeout_s``.
        """
        if not self._groups:
            self._create_placement_groups()
        return [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
            for group, n in zip(self._groups, self.process_on_nodes, strict=True)
            for i in range(n)
        ]

    def shared_actor_options(self, device: int) -> dict[str, Any]:
        """Return the Ray options of an additional actor on ``device`` (without GPUs: any node)."""
        if not self.use_gpu:
            return {"scheduling_strategy": "SPREAD", **self.actor_resources()}
        return {"scheduling_strategy": self.reserve_slots()[device], **self.actor_resources()}

    def query_device_ids(self) -> list[str]:
        """Return the GPU id of every slot, as in ``CUDA_VISIBLE_DEVICES`` of its node.

        Actors that use several GPUs need these ids. A Ray task on each slot reads its id. Raises
        ``WorkerTimeoutError`` if no fraction of a slot's GPU is free for the task.
        """
        resource_share = {"num_cpus": 0, "num_gpus": self.actor_resources()["num_gpus"]}
        id_task = ray.remote(_get_device_id)
        refs = [
            id_task.options(scheduling_strategy=strategy, **resource_share).remote()
            for strategy in self.reserve_slots()
        ]
        labels = [f"{self.name_prefix}[device {index}]" for index in range(len(refs))]
        return gather_results(refs, self.timeout_s, labels)

    def _create_placement_groups(self) -> None:
        # Groups share the GPU of a device, but each group needs separate CPUs.
        bundle: dict[str, float] = {"CPU": self.cpus_per_worker * self.max_colocate_count}
        if self.use_gpu:
            bundle["GPU"] = 1.0
        deadline = time.monotonic() + self.timeout_s
        for k, count in enumerate(self.process_on_nodes):
            # One placement group per node: STRICT_PACK applies within one group.
            group = placement_group(
                [dict(bundle)] * count,
                strategy="STRICT_PACK",
                name=f"{self.name_prefix}_{k}",
                # By default Ray prefers a node that already has ranks.
                _soft_target_node_id=self._find_unused_node(bundle, count),
            )
            self._groups.append(group)
            # Wait at least 0.1 s, also after the deadline: free resources are granted at once.
            if not group.wait(timeout_seconds=max(0.1, deadline - time.monotonic())):
                available = ray.available_resources()
                free = {key: available.get(key, 0.0) for key in ("CPU", "GPU")}
                self.shutdown()
                raise WorkerTimeoutError(
                    f"resource pool {self.name_prefix!r}: {count} x {bundle} on one node not "
                    f"granted in {self.timeout_s:g} s; free in the cluster: {free}; fix: request "
                    "fewer devices, raise ray_init.num_cpus, or shut down groups that hold "
                    "resources"
                )
        logger.debug("resource pool %s: %s x %s", self.name_prefix, self.process_on_nodes, bundle)

    def _find_unused_node(self, bundle: dict[str, float], count: int) -> str | None:
        """Return the id of a node without ranks of this pool that can hold ``count`` bundles.

        Nodes without any reservation come first, then nodes with more free resources. Returns None
        if no node has enough resources.
        """
        node_ids_of_groups = [
            placement_group_table(group)["bundles_to_node_id"] for group in self._groups
        ]
        used_node_ids = {node for node_ids in node_ids_of_groups for node in node_ids.values()}
        reserved = _sum_reserved_resources()
        capacity: dict[str, tuple[bool, float]] = {}
        for node in ray.nodes():
            free_amounts = Counter(node["Resources"] if node["Alive"] else {})
            free_amounts.subtract(reserved.get(node["NodeID"], {}))
            times = min(
                free_amounts[resource] / (amount * count) for resource, amount in bundle.items()
            )
            # Tolerance for rounding, because CPU numbers may be fractions.
            if times > 1 - 1e-6 and node["NodeID"] not in used_node_ids:
                capacity[node["NodeID"]] = (node["NodeID"] not in reserved, times)
        return max(capacity, key=capacity.__getitem__, default=None)

    def shutdown(self) -> None:
        """Release the reservation; Ray ends the workers that still use it."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []

    def __enter__(self) -> "RayResourcePool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


def _sum_reserved_resources() -> dict[str, Counter[str]]:
    """Return the resources reserved by all placement groups of the cluster, by node id."""
    reserved: dict[str, Counter[str]] = defaultdict(Counter)
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            for bundle, node in group["bundles_to_node_id"].items():
                reserved[node].update(group["bundles"][bundle])
    return reserved


def _get_device_id() -> str:
    """Return the id of the GPU that Ray assigned to this process."""
    (device,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return device
