"""Whether the nodes of a Ray cluster have what a run asks for, by what Ray says of them.

The driver may stand on a machine without a GPU: what PyTorch sees there says nothing about the
cluster.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.config.checks.hardware_and_paths import cpu_problems, engine_problems
from verl.config.derive import engine_gpus, have_own_gpus
from verl.config.problems import problem
from verl.config.schema import PPOConfig
from verl.trainer.ppo.resources import ResourcePoolManager, Role

DEVICE = "trainer.device"
RANKS = "trainer.n_gpus_per_node"
NODES = "trainer.nnodes"
ENGINE_GPUS = "actor_rollout_ref.rollout.n_gpus_per_node"
ENGINE_NODES = "actor_rollout_ref.rollout.nnodes"
# Of a CPU per worker: on CPU, thread counts bound what workers use, not Ray's accounting.
CPU_SHARE = 0.1


@dataclass(frozen=True)
class Node:
    """A machine of the cluster and what Ray may hand out of it."""

    name: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Need:
    """What a pool takes of each of ``nodes`` machines, and the keys that say so."""

    nodes: int
    cpus: float
    gpus: int
    keys: tuple[str, str]  # of the machines, and of the devices on each


def nodes_of(described: Sequence[Mapping[str, Any]]) -> list[Node]:
    """The machines that are alive among those that ``ray.nodes()`` describes."""
    alive = [node for node in described if node["Alive"]]
    return [
        Node(
            node.get("NodeManagerHostname") or node["NodeManagerAddress"],
            node["Resources"].get("CPU", 0.0),
            node["Resources"].get("GPU", 0.0),
        )
        for node in alive
    ]


def device_of(asked: str, nodes: Sequence[Node]) -> str:
    """``cpu`` or ``cuda``: ``auto`` takes GPUs where the cluster has any."""
    if asked != "auto":
        return asked
    return "cuda" if any(node.gpus >= 1 for node in nodes) else "cpu"


def cpus_per_worker(device: str) -> float:
    """What a worker asks of Ray beside its device."""
    return 1.0 if device == "cuda" else CPU_SHARE


def pools_of(cfg: PPOConfig, device: str, roles: Iterable[Role]) -> ResourcePoolManager:
    """Return the devices of the training ``roles`` and of the engines, which may have their own."""
    trainer = cfg.trainer
    spec = {"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes}
    mapping = dict.fromkeys([*roles, Role.Rollout], "global_pool")
    if have_own_gpus(cfg, device):
        spec["rollout_pool"] = engine_gpus(cfg)
        mapping[Role.Rollout] = "rollout_pool"
    pools = ResourcePoolManager(spec, mapping, device == "cuda", cpus_per_worker(device))
    pools.create_resource_pool()
    return pools


def placement_problems(
    cfg: PPOConfig, nodes: Sequence[Node], groups: int, cpus: float
) -> Iterator[str]:
    """What ``nodes`` cannot hold of ``groups`` worker groups (the engines are one), each of whose
    workers asks for ``cpus``.
    """
    trainer = cfg.trainer
    device = device_of(trainer.device, nodes)
    if device == "cuda":
        if not any(node.gpus >= 1 for node in nodes):
            why = f"no node of the cluster has a GPU to give ({_listed(nodes)})"
            yield problem(cfg, DEVICE, why, "cpu", f"{DEVICE}=cpu, or `ray start --num-gpus=N`")
            return
        yield from engine_problems(cfg)
    else:
        yield from cpu_problems(cfg)
    own = have_own_gpus(cfg, device)
    ranks = trainer.n_gpus_per_node
    on_a_rank = (groups - 1 if own else groups) * cpus
    gpus = ranks if device == "cuda" else 0
    needs = [Need(trainer.nnodes, ranks * on_a_rank, gpus, (NODES, RANKS))]
    if own:
        each = engine_gpus(cfg)
        keys = (
            ENGINE_NODES,
            ENGINE_GPUS if cfg.actor_rollout_ref.rollout.n_gpus_per_node else RANKS,
        )
        needs.append(Need(len(each), each[0] * cpus, each[0], keys))
    nodes = list(nodes)
    left = nodes
    # In the order in which they are reserved.
    for need in sorted(needs, key=lambda need: need.gpus, reverse=True):
        yield from _room_problems(cfg, need, nodes, left)
        left = _without(nodes, left, need)


def _room_problems(
    cfg: PPOConfig, need: Need, nodes: Sequence[Node], left: Sequence[Node]
) -> Iterator[str]:
    # Room beside what stands there: a node may hold the ranks of several.
    room = sum(int(_times(node, need)) for node in left)
    if room < need.nodes:
        key = need.keys[0 if any(_times(node, need) >= 1 for node in nodes) else 1]
        others = "training ranks" if ENGINE_NODES in need.keys else "engines"
        beside = "" if left == nodes else f" beside the {others}"
        why = (
            f"{need.nodes} x ({need.gpus} GPUs and {need.cpus:g} CPUs on one node) are needed, and "
            f"there is room for {room}{beside}: {_listed(nodes)}"
        )
        allowed = "what the nodes of the cluster have"
        fewer = "fewer devices or nodes, more nodes, or trainer.device=cpu"
        fix = fewer if need.gpus else "fewer ranks"
        yield problem(cfg, key, why, allowed, f"{fix}; more CPUs: ray_init.num_cpus, `ray start`")


def _without(nodes: Sequence[Node], left: Sequence[Node], need: Need) -> list[Node]:
    """What is ``left`` of ``nodes``, less what ``need`` takes of that: of each once, of those first
    that nobody else has a part of, and that have most room; again only where there are fewer.
    """
    left = list(left)
    untouched = set(range(len(left)))
    for _ in range(need.nodes):
        fits = {k for k, node in enumerate(left) if _times(node, need) >= 1}
        if not fits:
            break
        # As RayResourcePool chooses.
        k = max(
            fits & untouched or fits, key=lambda k: (left[k] == nodes[k], _times(left[k], need))
        )
        untouched.discard(k)
        node = left[k]
        left[k] = replace(node, cpus=node.cpus - need.cpus, gpus=node.gpus - need.gpus)
    return left


def _times(node: Node, need: Need) -> float:
    """How often what ``need`` takes of a machine is on ``node``."""
    # A hair's breadth: shares of CPUs add up with rounding.
    by_cpus = (node.cpus + 1e-6) / need.cpus
    return min(by_cpus, node.gpus / need.gpus) if need.gpus else by_cpus


def _listed(nodes: Sequence[Node]) -> str:
    return ", ".join(f"{n.name} has {n.gpus:g} GPUs, {n.cpus:g} CPUs" for n in nodes) or "no node"
