"""Train a policy on episodes by supervised learning: ``python -m verl.trainer.main_sft [key=value
...]``.

Without arguments the cold-start policy of the quickstart is made (``configs/quickstart_sft.yaml``).
"""

import sys
from collections.abc import Sequence

from verl.config.schema import SFTConfig
from verl.trainer import cli
from verl.trainer.launch.extensions import environment_names, sft_start_problems
from verl.utils.logging import setup_logging


def train(cfg: SFTConfig) -> None:
    """Start the run that ``cfg`` describes; everything heavy is imported from here on."""
    from verl.trainer.launch.sft import run_sft

    run_sft(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    asked = (environment_names, sft_start_problems)
    return cli.run(train, "quickstart_sft", SFTConfig, "verl.trainer.main_sft", argv, *asked)


if __name__ == "__main__":
    setup_logging()
    sys.exit(main())
