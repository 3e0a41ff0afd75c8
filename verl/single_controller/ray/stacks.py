"""Stacks of processes on other nodes of a cluster, as far as Ray reaches them."""

from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.single_controller.ray.nodes import is_lost, node_name
from verl.utils.stacks import Elsewhere, stacks_of_this_machine

NODE_S = 30.0  # for a node to start a process that asks, and for it to answer


def stacks_of_other_nodes(folder: Path) -> Elsewhere:
    """What processes of the run on all nodes but the driver's answer, node by node; a line for each
    node that does not, and which are lost. ``folder`` has to lead to the same place everywhere.
    """
    if not ray.is_initialized():
        return Elsewhere()
    here = ray.get_runtime_context().get_node_id()
    ask = ray.remote(num_cpus=0, max_retries=0)(stacks_of_this_machine)
    asked = {}
    silent = []
    for node in ray.nodes():
        name = f"node {node_name(node)}"
        if is_lost(node):
            silent.append(f"{name} is gone")
        elif node["Alive"] and node["NodeID"] != here:
            place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ref = ask.options(scheduling_strategy=place).remote(folder)
            asked[ref] = name
    if not asked:
        return Elsewhere(silent=tuple(silent))
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=NODE_S)
    told = [f"\n== {asked[ref]}\n{_answer(ref)}" for ref in done]
    told += [f"\n== {asked[ref]}\nit did not answer within {NODE_S:g} s\n" for ref in late]
    silent += [f"{asked[ref]} does not answer" for ref in late]
    return Elsewhere("".join(told), tuple(silent))


def _answer(ref: ray.ObjectRef) -> str:
    try:
        return ray.get(ref, timeout=NODE_S)
    except RayError as error:
        return f"it could not be asked: {type(error).__name__}: {error}\n"
