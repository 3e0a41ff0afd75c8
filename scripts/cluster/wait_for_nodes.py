"""Wait until a Ray cluster has the nodes that a job asked for.

    RAY_ADDRESS=head:6379 python scripts/cluster/wait_for_nodes.py NODES [SECONDS]

Exit status 1, and a line that says how many came, where they are not all there after SECONDS (300).
"""

import sys
import time
from collections.abc import Sequence

import ray

PAUSE_S = 5.0


def main(argv: Sequence[str]) -> str | None:
    """What went wrong; None when all nodes are there."""
    wanted = int(argv[0])
    patience_s = float(argv[1]) if len(argv) > 1 else 300.0
    deadline = time.monotonic() + patience_s
    found = 0
    while True:
        try:
            ray.init(address="auto", log_to_driver=False)
            found = sum(node["Alive"] for node in ray.nodes())
        except (ConnectionError, RuntimeError):
            found = 0  # the head is not there yet
        finally:
            ray.shutdown()
        if found >= wanted:
            return None
        if time.monotonic() > deadline:
            return f"{found} of {wanted} nodes joined the Ray cluster within {patience_s:g} s"
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
