"""Ray cluster of two nodes on this machine.

The first node has the control server and no CPUs, so all actors of a run are on the second node.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import psutil

from verl.single_controller.ray.local import LOOPBACK_VARIABLE
from verl.utils.processes import wait_and_kill

NUM_CPUS = 4  # CPUs that Ray assigns on the second node


@dataclass(frozen=True)
class TwoNodeCluster:
    """Address of the cluster, and the raylet process of its second node."""

    address: str
    raylet: psutil.Process


@contextlib.contextmanager
def run_two_nodes(environ: Mapping[str, str]) -> Iterator[TwoNodeCluster]:
    """Run the cluster during the ``with`` block.

    ``environ``: environment variables of the processes of the cluster.
    """
    env_variables = {LOOPBACK_VARIABLE: "0", "RAY_USAGE_STATS_ENABLED": "0", **environ}
    with patch.dict(os.environ, env_variables), _start_cluster() as cluster:
        yield cluster


@contextlib.contextmanager
def _start_cluster() -> Iterator[TwoNodeCluster]:
    from ray.cluster_utils import Cluster  # reads LOOPBACK_VARIABLE when it is imported

    head_node_args: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head_node_args)
    try:
        node = cluster.add_node(num_cpus=NUM_CPUS)
        cluster.wait_for_nodes()
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        yield TwoNodeCluster(str(cluster.address), raylet)
    finally:
        child_processes = psutil.Process().children(recursive=True)
        cluster.shutdown()
        # A node that was stopped by SIGSTOP does not react to the shutdown, so kill its processes.
        wait_and_kill(child_processes, 0.0)
        psutil.wait_procs(child_processes, timeout=10)
