"""Print the number of training nodes of a job: all nodes, minus those for rollout engines only
(``actor_rollout_ref.rollout.nnodes``).

python scripts/cluster/count_training_nodes.py NODES GPUS CONFIG [key=value ...]

GPUS is the number of GPUs per node of the allocation. If it is 0 and the configuration needs GPUs,
the exit status is 2 and a line names the missing option of sbatch.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError
from verl.trainer.launch.extensions import load_config
from verl.utils.commands import UsageError, parse_positive_int, run_and_report_mistakes


def compute_training_nodes(argv: Sequence[str]) -> int:
    """Return the number of nodes with training ranks, at least 1.

    All nodes count for imitation learning, and for an invalid configuration, whose mistakes the run
    itself reports. Raises ``UsageError`` if the configuration needs GPUs and there are none.
    """
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("nodes", type=parse_positive_int)
    parser.add_argument("gpus", type=int)
    parser.add_argument("config")
    parser.add_argument("words", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args(argv)
    num_nodes: int = args.nodes
    try:
        cfg = load_config(args.config, args.words)
    except ConfigError:
        return num_nodes
    if not isinstance(cfg, PPOConfig):
        return num_nodes
    if cfg.trainer.device == "cuda" and args.gpus < 1:
        num_gpus = cfg.trainer.n_gpus_per_node
        raise UsageError(
            f"trainer.device=cuda with {num_gpus} GPUs per node, and the allocation has none; "
            f"fix: sbatch --gpus-per-node={num_gpus} ...",
            "does_not_fit",
        )
    return max(1, num_nodes - cfg.actor_rollout_ref.rollout.nnodes)


def _print_nodes() -> None:
    sys.stdout.write(f"{compute_training_nodes(sys.argv[1:])}\n")


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(_print_nodes))
