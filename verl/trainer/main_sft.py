"""Train a policy on episodes by supervised learning: ``python -m verl.trainer.main_sft [key=value ...]``.

Without arguments the cold-start policy of the quickstart is made (``configs/quickstart_sft.yaml``).
"""

import logging
import sys
from collections.abc import Sequence

from verl.trainer.config import cli
from verl.trainer.config.problems import Names
from verl.trainer.config.schema import SFTConfig

logger = logging.getLogger(__name__)


def names() -> Names:
    """Names of the registered environments."""
    from agent_system.environments.registry import REGISTRY

    return Names(environments=REGISTRY.keys())


def train(cfg: SFTConfig) -> None:
    """Start the run that ``cfg`` describes; everything heavy is imported from here on."""
    from verl.trainer.launch_sft import run_sft

    run_sft(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    return cli.run(train, "quickstart_sft", SFTConfig, "verl.trainer.main_sft", argv, names)


if __name__ == "__main__":
    sys.exit(main())
