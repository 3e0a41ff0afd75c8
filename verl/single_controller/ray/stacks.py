"""Collection of the stacks of processes on other nodes of a Ray cluster."""

from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.single_controller.ray.nodes import is_lost, node_name
from verl.utils.stacks import Elsewhere, stacks_of_this_machine

NODE_S = 30.0  # time for a node to start the collecting task and return its result


def stacks_of_other_nodes(folder: Path) -> Elsewhere:
    """Collect the stacks of the run's processes on all nodes except the driver's.

    The result names the nodes that are lost or do not answer within ``NODE_S``. ``folder`` must be
    the same shared directory on all nodes.
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
        return f"its stacks could not be collected: {type(error).__name__}: {error}\n"
