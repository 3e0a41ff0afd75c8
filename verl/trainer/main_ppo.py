"""Train a policy with an algorithm of the PPO family: ``python -m verl.trainer.main_ppo [key=value
...]``.

Without arguments the embedded default (``configs/quickstart.yaml``) is trained on whatever device
there is; a command line that names its own policy or files starts from the neutral
``ppo_trainer``.
"""

import sys
from collections.abc import Sequence

from verl.config.schema import PPOConfig
from verl.trainer import cli
from verl.trainer.launch.extensions import (
    default_config_name,
    inspect_calls,
    inspect_start,
    registered_names,
)
from verl.utils.logging import setup_logging


def train(cfg: PPOConfig) -> None:
    """Start the run that ``cfg`` describes; everything heavy is imported from here on."""
    from verl.trainer.launch.ppo import run_ppo

    run_ppo(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    asked = (registered_names, inspect_start, inspect_calls)
    return cli.run(train, default_config_name, PPOConfig, "verl.trainer.main_ppo", argv, *asked)


if __name__ == "__main__":
    setup_logging()
    sys.exit(main())
