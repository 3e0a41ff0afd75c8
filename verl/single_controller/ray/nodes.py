"""Detection of nodes that a cluster has lost.

The loss of a node causes errors of many kinds in its processes, which do not name the node.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from verl.single_controller.base.errors import WorkerError

# Ids of the nodes that were already dead when add_lost_nodes_to_errors was entered. They are not
# reported, because Ray lists all former nodes.
_dead_before: set[str] = set()
DETECTION_TIMEOUT_S = 30.0  # Ray declares a node dead after several failed health checks
POLL_S = 1.0


def format_node_name(node: Mapping[str, Any]) -> str:
    """Return the name of a node of ``ray.nodes()`` for messages: host name and short id."""
    return f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"


def is_lost(node: Mapping[str, Any]) -> bool:
    """Return true if this node of ``ray.nodes()`` died since ``add_lost_nodes_to_errors`` began."""
    return not node["Alive"] and node["NodeID"] not in _dead_before


def find_lost_nodes(within_s: float = DETECTION_TIMEOUT_S) -> list[str]:
    """Return the names of the lost nodes, waiting up to ``within_s`` seconds for the first one.

    Does not wait if at most one node is alive.
    """
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
