"""Whether the nodes of a Ray cluster have what a run asks for, by what Ray says of them.

The driver may stand on a machine without a GPU: what PyTorch sees there says nothing about the
cluster.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.trainer.config.checks.places import cpu_problems, engine_problems
from verl.trainer.config.problems import problem
from verl.trainer.config.schema import PPOConfig

DEVICE = "trainer.device"
RANKS = "trainer.n_gpus_per_node"
NODES = "trainer.nnodes"


@dataclass(frozen=True)
class Node:
    """A machine of the cluster and what Ray may hand out of it."""

    name: str
    cpus: float
    gpus: float


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


def placement_problems(
    cfg: PPOConfig, nodes: Sequence[Node], groups: int, cpus_per_worker: float
) -> Iterator[str]:
    """What ``nodes`` cannot hold of ``groups`` worker groups (the engines are one), each of whose
    workers asks for ``cpus_per_worker``.
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
    cpus = trainer.n_gpus_per_node * groups * cpus_per_worker
    gpus = trainer.n_gpus_per_node if device == "cuda" else 0
    # Room beside what stands there: a node may hold the ranks of several.
    room = sum(_times(node, cpus, gpus) for node in nodes)
    if room < trainer.nnodes:
        key = NODES if room else RANKS
        why = (
            f"{trainer.nnodes} x ({gpus} GPUs and {cpus:g} CPUs on one node) are needed, and there "
            f"is room for {room}: {_listed(nodes)}"
        )
        allowed = "what the nodes of the cluster have"
        fix = "fewer devices or nodes, more nodes, or trainer.device=cpu" if gpus else "fewer ranks"
        yield problem(cfg, key, why, allowed, f"{fix}; more CPUs: ray_init.num_cpus, `ray start`")


def _times(node: Node, cpus: float, gpus: int) -> int:
    """How often ``cpus`` and ``gpus`` together are on ``node``."""
    # A hair's breadth: shares of CPUs add up with rounding.
    by_cpus = int((node.cpus + 1e-6) // cpus)
    return min(by_cpus, int(node.gpus // gpus)) if gpus else by_cpus


def _listed(nodes: Sequence[Node]) -> str:
    return ", ".join(f"{n.name} has {n.gpus:g} GPUs, {n.cpus:g} CPUs" for n in nodes) or "no node"
