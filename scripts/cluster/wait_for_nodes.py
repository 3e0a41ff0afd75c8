"""Wait until a Ray cluster has the nodes that a job asked for.

    RAY_ADDRESS=head:6379 python scripts/cluster/wait_for_nodes.py NODES [SECONDS]

If nodes are missing after SECONDS (default: 300), the exit status is 1 and a line has the number of
nodes that joined. The exit status is 2 for invalid arguments.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence

import ray

POLL_INTERVAL_S = 5.0  # seconds between two counts of the nodes


def main(argv: Sequence[str]) -> str | None:
    """Return None once all nodes have joined, or an error message after the deadline."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("nodes", type=int)
    parser.add_argument("seconds", type=float, nargs="?", default=300.0)
    args = parser.parse_args(argv)
    num_nodes, timeout_s = args.nodes, args.seconds
    if num_nodes < 1 or not (math.isfinite(timeout_s) and timeout_s >= 0):
        parser.error(
            f"nodes={num_nodes} seconds={timeout_s:g}; allowed: at least 1 node, 0 s or more"
        )
    deadline = time.monotonic() + timeout_s
    num_alive_nodes = 0
    while True:
        try:
            ray.init(address="auto", log_to_driver=False)
            num_alive_nodes = sum(node["Alive"] for node in ray.nodes())
        except (ConnectionError, RuntimeError):
            num_alive_nodes = 0  # the head node has not started yet
        finally:
            ray.shutdown()
        if num_alive_nodes >= num_nodes:
            return None
        if time.monotonic() > deadline:
            return (
                f"{num_alive_nodes} of {num_nodes} nodes joined the Ray cluster "
                f"within {timeout_s:g} s"
            )
        time.sleep(POLL_INTERVAL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
