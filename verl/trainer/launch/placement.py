"""Checks that the nodes of a Ray cluster have the devices and CPUs that a run needs.

The checks use the resources that Ray reports, not those that PyTorch sees: the driver may run on a
machine without a GPU.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.config.checks.hardware_and_paths import cpu_problems, engine_problems
from verl.config.derive import engine_gpus_by_node, engines_have_separate_gpus
from verl.config.problems import build_problem
from verl.config.schema import PPOConfig
from verl.trainer.ppo.resources import ResourcePoolManager, Role

DEVICE = "trainer.device"
RANKS = "trainer.n_gpus_per_node"
NODES = "trainer.nnodes"
ENGINE_GPUS = "actor_rollout_ref.rollout.n_gpus_per_node"
ENGINE_NODES = "actor_rollout_ref.rollout.nnodes"
# CPUs that a worker reserves in Ray with trainer.device=cpu. The number of threads per process
# already limits the use of CPUs, so a small reservation suffices.
CPU_SHARE = 0.1


@dataclass(frozen=True)
class ClusterNode:
    """Node of the cluster and the resources that Ray can assign on it."""

    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class PoolNeed:
    """CPUs and GPUs of a pool on each of ``nodes`` nodes, and the config keys that set them."""

    nodes: int
    cpus: float
    gpus: int
    keys: tuple[str, str]  # config key of the number of nodes, config key of the devices per node


def list_live_nodes(described: Sequence[Mapping[str, Any]]) -> list[ClusterNode]:
    """Return the live nodes among the result ``described`` of ``ray.nodes()``."""
    alive = [node for node in described if node["Alive"]]
    return [
        ClusterNode(
            node.get("NodeManagerHostname") or node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in alive
    ]


def choose_device(configured: str, nodes: Sequence[ClusterNode]) -> str:
    """Return ``cpu`` or ``cuda``. ``auto`` is ``cuda`` if the cluster has a GPU."""
    if configured != "auto":
        return configured
    return "cuda" if any(node.gpus >= 1 for node in nodes) else "cpu"


def get_worker_cpus(device: str) -> float:
    """Return the number of CPUs that a worker reserves in Ray."""
    return 1.0 if device == "cuda" else CPU_SHARE


def create_pools(cfg: PPOConfig, device: str, roles: Iterable[Role]) -> ResourcePoolManager:
    """Return the pools of the training ``roles`` and of the engines, which may be separate."""
    trainer = cfg.trainer
    spec = {"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes}
    mapping = dict.fromkeys([*roles, Role.Rollout], "global_pool")
    if engines_have_separate_gpus(cfg, device):
        spec["rollout_pool"] = engine_gpus_by_node(cfg)
        mapping[Role.Rollout] = "rollout_pool"
    pools = ResourcePoolManager(spec, mapping, device == "cuda", get_worker_cpus(device))
    pools.create_resource_pool()
    return pools


def find_placement_problems(
    cfg: PPOConfig, nodes: Sequence[ClusterNode], groups: int, cpus: float
) -> Iterator[str]:
    """Yield problems if ``groups`` worker groups, engines included, do not fit on ``nodes``."""
    trainer = cfg.trainer
    device = choose_device(trainer.device, nodes)
    if device == "cuda":
        if not any(node.gpus >= 1 for node in nodes):
            why = f"no node of the cluster has a GPU ({_format_nodes(nodes)})"
            yield build_problem(
                cfg, DEVICE, why, "cpu", f"{DEVICE}=cpu, or `ray start --num-gpus=N`"
            )
            return
        yield from engine_problems(cfg)
    else:
        yield from cpu_problems(cfg)
    has_separate_engines = engines_have_separate_gpus(cfg, device)
    ranks = trainer.n_gpus_per_node
    cpus_per_rank = (groups - 1 if has_separate_engines else groups) * cpus
    gpus = ranks if device == "cuda" else 0
    needs = [PoolNeed(trainer.nnodes, ranks * cpus_per_rank, gpus, (NODES, RANKS))]
    if has_separate_engines:
        node_gpus = engine_gpus_by_node(cfg)
        keys = (
            ENGINE_NODES,
            ENGINE_GPUS if cfg.actor_rollout_ref.rollout.n_gpus_per_node else RANKS,
        )
        needs.append(PoolNeed(len(node_gpus), node_gpus[0] * cpus, node_gpus[0], keys))
    nodes = list(nodes)
    free_nodes = nodes
    # Same order as ``ResourcePoolManager.reserve_pools``.
    for need in sorted(needs, key=lambda need: need.gpus, reverse=True):
        yield from _find_capacity_problems(cfg, need, nodes, free_nodes)
        free_nodes = _subtract_need(nodes, free_nodes, need)


def _find_capacity_problems(
    cfg: PPOConfig, need: PoolNeed, nodes: Sequence[ClusterNode], free: Sequence[ClusterNode]
) -> Iterator[str]:
    # One node may have enough resources for several of the ``need.nodes`` parts of the pool.
    capacity = sum(int(_count_fits(node, need)) for node in free)
    if capacity < need.nodes:
        key = need.keys[0 if any(_count_fits(node, need) >= 1 for node in nodes) else 1]
        other_workers = "training ranks" if ENGINE_NODES in need.keys else "engines"
        in_addition = "" if free == nodes else f" in addition to the {other_workers}"
        why = (
            f"{need.nodes} x ({need.gpus} GPUs and {need.cpus:g} CPUs on one node) are needed, but "
            f"only {capacity} fit{in_addition}: {_format_nodes(nodes)}"
        )
        allowed = "at most the resources of the nodes of the cluster"
        fewer = "fewer devices or nodes, more nodes, or trainer.device=cpu"
        fix = fewer if need.gpus else "fewer ranks"
        yield build_problem(
            cfg, key, why, allowed, f"{fix}; more CPUs: ray_init.num_cpus, `ray start`"
        )


def _subtract_need(
    nodes: Sequence[ClusterNode], free: Sequence[ClusterNode], need: PoolNeed
) -> list[ClusterNode]:
    """Return the free resources of each node after the pool ``need`` was placed as Ray would.

    ``nodes`` have the total resources, ``free`` those without the pools that were placed before.
    Each part of the pool gets another node if possible. Nodes without other pools are preferred,
    then those with the most free resources.
    """
    free = list(free)
    unused_indices = set(range(len(free)))
    for _ in range(need.nodes):
        fits = {k for k, node in enumerate(free) if _count_fits(node, need) >= 1}
        if not fits:
            break
        # Same choice as in RayResourcePool.
        k = max(
            fits & unused_indices or fits,
            key=lambda k: (free[k] == nodes[k], _count_fits(free[k], need)),
        )
        unused_indices.discard(k)
        node = free[k]
        free[k] = replace(node, cpus=node.cpus - need.cpus, gpus=node.gpus - need.gpus)
    return free


def _count_fits(node: ClusterNode, need: PoolNeed) -> float:
    """Return the resources of ``node`` divided by the resources per node of ``need``."""
    # Tolerance: sums of CPU shares have rounding errors.
    by_cpus = (node.cpus + 1e-6) / need.cpus
    return min(by_cpus, node.gpus / need.gpus) if need.gpus else by_cpus


def _format_nodes(nodes: Sequence[ClusterNode]) -> str:
    return ", ".join(f"{n.name} has {n.gpus:g} GPUs, {n.cpus:g} CPUs" for n in nodes) or "no node"
