"""Nodes that a cluster has lost: what their processes leave behind are errors of many kinds, none
of which says that it was the node.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from verl.single_controller.base.errors import WorkerError

# Ray remembers every node that a cluster ever had: these were gone before this process joined it.
_gone_before: set[str] = set()
NOTICED_S = 30.0  # Ray asks a node several times before it gives it up
LOOK_S = 1.0


def node_name(node: Mapping[str, Any]) -> str:
    """What a node of ``ray.nodes()`` is called in messages."""
    return f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"


def is_lost(node: Mapping[str, Any]) -> bool:
    """Whether this node of ``ray.nodes()`` is gone and was not when ``naming_lost_nodes`` began."""
    return not node["Alive"] and node["NodeID"] not in _gone_before


def lost_nodes(within_s: float = NOTICED_S) -> list[str]:
    """The nodes that are lost, once Ray says so of any, or none after ``within_s``; at once where
    there is but one.
    """
    deadline = time.monotonic() + within_s
    while True:
        nodes = ray.nodes()
        gone = [node for node in nodes if is_lost(node)]
        alive = sum(node["Alive"] for node in nodes)
        if gone or alive < 2 or time.monotonic() > deadline:
            return [node_name(node) for node in gone]
        time.sleep(LOOK_S)


@contextlib.contextmanager
def naming_lost_nodes() -> Iterator[None]:
    """A block whose errors of workers say which nodes the cluster has lost since it began."""
    _gone_before.clear()
    _gone_before.update(node["NodeID"] for node in ray.nodes() if not node["Alive"])
    try:
        yield
    except (WorkerError, RayError) as error:
        # Where the control server is gone as well, the error stays as it is.
        with contextlib.suppress(RayError):
            for node in lost_nodes():
                error.add_note(f"the node {node} of the cluster is gone")
        raise
