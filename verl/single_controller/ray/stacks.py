"""Collection of the stacks of processes on other nodes of a Ray cluster."""

from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.single_controller.ray.nodes import format_node_name, is_lost
from verl.utils.stacks import RemoteStacks, collect_local_stacks

NODE_TIMEOUT_S = 30.0  # time for a node to start the collecting task and return its result


def collect_stacks_of_other_nodes(folder: Path) -> RemoteStacks:
    """Collect the stacks of the run's processes on all nodes except the driver's.

    The result names the nodes that are lost or do not answer within ``NODE_TIMEOUT_S``. ``folder``
    must be the same shared directory on all nodes.
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
        list(node_names), num_returns=len(node_names), timeout=NODE_TIMEOUT_S
    )
    sections = [f"\n== {node_names[ref]}\n{_get_stacks(ref)}" for ref in answered_refs]
    sections += [
        f"\n== {node_names[ref]}\nit did not answer within {NODE_TIMEOUT_S:g} s\n"
        for ref in late_refs
    ]
    silent += [f"{node_names[ref]} does not answer" for ref in late_refs]
    return RemoteStacks("".join(sections), tuple(silent))


def _get_stacks(ref: ray.ObjectRef) -> str:
    try:
        return ray.get(ref, timeout=NODE_TIMEOUT_S)
    except RayError as error:
        return f"its stacks could not be collected: {type(error).__name__}: {error}\n"
