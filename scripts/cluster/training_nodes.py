"""How many of a job's nodes train: all but those that its configuration has for engines alone.

python scripts/cluster/training_nodes.py NODES CONFIG [key=value ...]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from verl.trainer.config.schema import PPOConfig
from verl.trainer.launch.extensions import load_config
from verl.utils.settings import ConfigError


def main(argv: Sequence[str]) -> int:
    """The number; of a configuration with mistakes, which the run will name, all nodes."""
    nodes, config, *words = argv
    try:
        cfg = load_config(config, words)
    except ConfigError:
        return int(nodes)
    if not isinstance(cfg, PPOConfig):
        return int(nodes)
    return max(1, int(nodes) - cfg.actor_rollout_ref.rollout.nnodes)


if __name__ == "__main__":
    sys.stdout.write(f"{main(sys.argv[1:])}\n")
