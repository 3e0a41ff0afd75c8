"""Nodes of a Ray cluster: detection of lost ones, and the stacks of processes on the others.

The loss of a node causes errors of many kinds in its processes, which do not name the node.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.single_controller.base.worker_group import WorkerError
from verl.utils.stacks import RemoteStacks, collect_local_stacks

# Ids of the nodes that were already dead when add_lost_nodes_to_errors was entered. They are not
# reported, because Ray lists all former nodes.
_dead_before: set[str] = set()
DETECTION_TIMEOUT_S = 30.0  # Ray declares a node dead after several failed health checks
POLL_S = 1.0
STACKS_TIMEOUT_S = 30.0  # time for a node to start the collecting task and return its result


def format_node_name(node: Mapping[str, Any]) -> str:
    """Return the name of a node of ``ray.nodes()`` for messages: host name and short id."""
    return f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"


def is_lost(node: Mapping[str, Any]) -> bool:
    """Return true if this node of ``ray.nodes()`` died since ``add_lost_nodes_to_errors`` began."""
    return not node["Alive"] and node["NodeID"] not in _dead_before


def find_lost_nodes(within_s: float = DETECTION_TIMEOUT_S) -> list[str]:
    """Return the names of the lost nodes; wait for the first one if several nodes are alive."""
    deadline = time.monotonic() + within_s
    while True:
        nodes = ray.nodes()
        lost = [node for node in nodes if is_lost(node)]
        alive = sum(node["Alive"] for node in nodes)
        if lost or alive < 2 or time.monotonic() > deadline:
            return [format_node_name(node) for node in lost]
        time.sleep(POLL_S)


@contextlib.contextmanager
def add_lost_nodes_to_errors() -> Iterator[None]:
    """Add a note about each lost node to Ray and worker errors raised in the ``with`` block."""
    _dead_before.clear()
    _dead_before.update(node["NodeID"] for node in ray.nodes() if not node["Alive"])
    try:
        yield
    except (WorkerError, RayError) as error:
        # If Ray's control server is also down, raise the error without notes.
        with contextlib.suppress(RayError):
            for node in find_lost_nodes():
                error.add_note(f"the node {node} of the cluster is gone")
        raise


def collect_stacks_of_other_nodes(folder: Path) -> RemoteStacks:
    """Collect the stacks of the run's processes on all nodes except the driver's.

    The result names the nodes that are lost or do not answer in time. ``folder`` must be the same
    shared directory on all nodes.
    """
    if not ray.is_initialized():
        return RemoteStacks()
    driver_node = ray.get_runtime_context().get_node_id()
    stacks_task = ray.remote(num_cpus=0, max_retries=0)(collect_local_stacks)
    node_names = {}
    silent = []
    for node in ray.nodes():
        name = f"node {format_node_name(node)}"
        if is_lost(node):
            silent.append(f"{name} is gone")
        elif node["Alive"] and node["NodeID"] != driver_node:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ref = stacks_task.options(scheduling_strategy=strategy).remote(folder)
            node_names[ref] = name
    if not node_names:
        return RemoteStacks(silent_nodes=tuple(silent))
    answered_refs, late_refs = ray.wait(
        list(node_names), num_returns=len(node_names), timeout=STACKS_TIMEOUT_S
    )
    sections = [f"\n== {node_names[ref]}\n{_get_stacks(ref)}" for ref in answered_refs]
    sections += [
        f"\n== {node_names[ref]}\nit did not answer within {STACKS_TIMEOUT_S:g} s\n"
        for ref in late_refs
    ]
    silent += [f"{node_names[ref]} does not answer" for ref in late_refs]
    return RemoteStacks("".join(sections), tuple(silent))


def _get_stacks(ref: ray.ObjectRef) -> str:
    try:
        return ray.get(ref, timeout=STACKS_TIMEOUT_S)
    except RayError as error:
        return f"its stacks could not be collected: {type(error).__name__}: {error}\n"
