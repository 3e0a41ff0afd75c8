"""Nodes of a Ray cluster: detection of lost nodes, and collection of stacks from other nodes.

If a node is lost, calls fail with errors of many kinds, which do not name the node.
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
_nodes_dead_before_run: set[str] = set()
DETECTION_TIMEOUT_S = 30.0  # Ray declares a node dead after several failed health checks
POLL_S = 1.0  # time between two checks of the nodes
STACKS_TIMEOUT_S = 30.0  # maximum time in which a node collects and returns its stacks


def format_node_name(node: Mapping[str, Any]) -> str:
    """Return the name of ``node``, an entry of ``ray.nodes()``: host name and short id."""
    return f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"


def is_lost(node: Mapping[str, Any]) -> bool:
    """Return True if ``node``, an entry of ``ray.nodes()``, has died during this run."""
    return not node["Alive"] and node["NodeID"] not in _nodes_dead_before_run


def find_lost_nodes() -> list[str]:
    """Return the names of the nodes that have died during this run.

    If there is none yet, wait up to ``DETECTION_TIMEOUT_S``, because Ray detects a loss late. Do
    not wait if only the driver's node is alive.
    """
    deadline = time.monotonic() + DETECTION_TIMEOUT_S
    while True:
        nodes = ray.nodes()
        lost_nodes = [node for node in nodes if is_lost(node)]
        num_alive = sum(node["Alive"] for node in nodes)
        if lost_nodes or num_alive < 2 or time.monotonic() > deadline:
            return [format_node_name(node) for node in lost_nodes]
        time.sleep(POLL_S)


@contextlib.contextmanager
def add_lost_nodes_to_errors() -> Iterator[None]:
    """Add a note for each lost node to a Ray or worker error that the ``with`` block raises."""
    _nodes_dead_before_run.clear()
    _nodes_dead_before_run.update(node["NodeID"] for node in ray.nodes() if not node["Alive"])
    try:
        yield
    except (WorkerError, RayError) as error:
        # If Ray's control server (GCS) does not answer either, raise the error without notes.
        with contextlib.suppress(RayError):
            for node in find_lost_nodes():
                error.add_note(f"the node {node} of the cluster is gone")
        raise


def collect_stacks_of_other_nodes(folder: Path) -> RemoteStacks:
    """Collect the stacks of the run's processes on all nodes except the driver's node.

    The result also names the nodes that are lost or do not answer in time. ``folder`` is the
    directory of the stack files; all nodes must share it.
    """
    if not ray.is_initialized():
        return RemoteStacks()
    driver_node_id = ray.get_runtime_context().get_node_id()
    stacks_task = ray.remote(num_cpus=0, max_retries=0)(collect_local_stacks)
    node_name_by_ref = {}
    silent_node_messages = []
    for node in ray.nodes():
        node_name = f"node {format_node_name(node)}"
        if is_lost(node):
            silent_node_messages.append(f"{node_name} is gone")
        elif node["Alive"] and node["NodeID"] != driver_node_id:
            strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ref = stacks_task.options(scheduling_strategy=strategy).remote(folder)
            node_name_by_ref[ref] = node_name
    if not node_name_by_ref:
        return RemoteStacks(silent_nodes=tuple(silent_node_messages))
    answered_refs, late_refs = ray.wait(
        list(node_name_by_ref), num_returns=len(node_name_by_ref), timeout=STACKS_TIMEOUT_S
    )
    node_reports = [f"\n== {node_name_by_ref[ref]}\n{_get_stacks(ref)}" for ref in answered_refs]
    node_reports += [
        f"\n== {node_name_by_ref[ref]}\nit did not answer within {STACKS_TIMEOUT_S:g} s\n"
        for ref in late_refs
    ]
    silent_node_messages += [f"{node_name_by_ref[ref]} does not answer" for ref in late_refs]
    return RemoteStacks("".join(node_reports), tuple(silent_node_messages))


def _get_stacks(ref: ray.ObjectRef) -> str:
    try:
        return ray.get(ref, timeout=STACKS_TIMEOUT_S)
    except RayError as error:
        return f"its stacks could not be collected: {type(error).__name__}: {error}\n"
