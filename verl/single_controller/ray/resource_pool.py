"""RayResourcePool: devices reserved on nodes, as Ray placement groups, before any worker starts."""

import logging
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.single_controller.base.errors import WorkerTimeoutError
from verl.single_controller.ray.calls import gather

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Slot:
    """Room for one rank: bundle ``bundle`` of ``group``."""

    group: PlacementGroup
    bundle: int

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """The Ray option that puts an actor here."""
        return PlacementGroupSchedulingStrategy(
            self.group, placement_group_bundle_index=self.bundle
        )


class RayResourcePool:
    """Reserves ``process_on_nodes[k]`` devices on the k-th node; rank order is node order. A node
    counts several times only where there are fewer of them.

    A device is a GPU where ``use_gpu`` (None: where the cluster has any), plus ``cpus_per_worker``
    CPUs for each of the ``max_colocate_count`` groups that may share the pool; each such group gets
    an equal share of the GPU. The reservation is made on first use. A context manager; leaving it
    gives the reservation back.
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
        """Number of devices."""
        return sum(self.process_on_nodes)

    @property
    def use_gpu(self) -> bool:
        """Whether a device is a GPU."""
        if self._use_gpu is None:
            self._use_gpu = ray.cluster_resources().get("GPU", 0) > 0
        return self._use_gpu

    def actor_resources(self) -> dict[str, float]:
        """Ray options of one rank of one group on this pool."""
        gpus = 1.0 / self.max_colocate_count if self.use_gpu else 0
        return {"num_cpus": self.cpus_per_worker, "num_gpus": gpus}

    def slots(self) -> list[Slot]:
        """One slot per rank. Reserves on the first call.

        Raises ``WorkerTimeoutError`` saying what was asked for and what is free when the cluster
        cannot give it.
        """
        if not self._groups:
            self._reserve()
        return [
            Slot(group, i)
            for group, n in zip(self._groups, self.process_on_nodes, strict=True)
            for i in range(n)
        ]

    def guest_options(self, device: int) -> dict[str, Any]:
        """Ray options of a single actor that shares device number ``device`` with the groups on
        this pool.

        Without GPUs there is no device to share, and it may run anywhere: where there is most room.
        """
        if not self.use_gpu:
            return {"scheduling_strategy": "SPREAD", **self.actor_resources()}
        return {"scheduling_strategy": self.slots()[device].strategy, **self.actor_resources()}

    def device_ids(self) -> list[str]:
        """The GPU behind every slot, as ``CUDA_VISIBLE_DEVICES`` of its node names it: for those
        who use more than the one that they were started on.

        Raises ``WorkerTimeoutError`` where a slot has no share left to look from.
        """
        share = {"num_cpus": 0, "num_gpus": self.actor_resources()["num_gpus"]}
        look = ray.remote(_own_device)
        slots = self.slots()
        looks = [look.options(scheduling_strategy=slot.strategy, **share) for slot in slots]
        labels = [f"{self.name_prefix}[device {number}]" for number in range(len(slots))]
        return gather([each.remote() for each in looks], self.timeout_s, labels)

    def _reserve(self) -> None:
        # CPUs are not shared as the GPU is: every group that may come needs its own.
        bundle: dict[str, float] = {"CPU": self.cpus_per_worker * self.max_colocate_count}
        if self.use_gpu:
            bundle["GPU"] = 1.0
        deadline = time.monotonic() + self.timeout_s
        for k, count in enumerate(self.process_on_nodes):
            # One placement group per node, because Ray packs bundles strictly only within a group.
            group = placement_group(
                [dict(bundle)] * count,
                strategy="STRICT_PACK",
                name=f"{self.name_prefix}_{k}",
                # Ray would rather fill a node that holds ranks already.
                _soft_target_node_id=self._unused_node(bundle, count),
            )
            self._groups.append(group)
            # A moment even past the deadline: what is free is granted almost at once.
            if not group.wait(timeout_seconds=max(0.1, deadline - time.monotonic())):
                free = _readable(ray.available_resources())
                self.shutdown()
                raise WorkerTimeoutError(
                    f"resource pool {self.name_prefix!r}: {count} x {bundle} on one node not "
                    f"granted in {self.timeout_s:g} s; free in the cluster: {free}. "
                    "Ask for fewer devices, raise ray_init.num_cpus, or shut down groups that "
                    "hold resources"
                )
        logger.debug("resource pool %s: %s x %s", self.name_prefix, self.process_on_nodes, bundle)

    def _unused_node(self, bundle: dict[str, float], count: int) -> str | None:
        """A node with room for ``count`` bundles that holds no rank of this pool: one of which
        nobody has a part, where there is any, and with most room. None where none has room.
        """
        own = [placement_group_table(group)["bundles_to_node_id"] for group in self._groups]
        used = {node for places in own for node in places.values()}
        taken = _reserved()
        room: dict[str, tuple[bool, float]] = {}
        for node in ray.nodes():
            has = Counter(node["Resources"] if node["Alive"] else {})
            has.subtract(taken.get(node["NodeID"], {}))
            times = min(has[kind] / (amount * count) for kind, amount in bundle.items())
            # A hair's breadth: shares of CPUs add up with rounding.
            if times > 1 - 1e-6 and node["NodeID"] not in used:
                room[node["NodeID"]] = (node["NodeID"] not in taken, times)
        return max(room, key=room.__getitem__, default=None)

    def shutdown(self) -> None:
        """Give the reservation back; workers still on it are ended by Ray."""
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []

    def __enter__(self) -> "RayResourcePool":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


def _reserved() -> dict[str, Counter[str]]:
    """What all placement groups of the cluster hold, by node."""
    taken: dict[str, Counter[str]] = defaultdict(Counter)
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            for bundle, node in group["bundles_to_node_id"].items():
                taken[node].update(group["bundles"][bundle])
    return taken


def _readable(resources: dict[str, Any]) -> dict[str, float]:
    return {key: resources.get(key, 0.0) for key in ("CPU", "GPU")}


def _own_device() -> str:
    """The GPU of which this process has a share."""
    (device,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return device
