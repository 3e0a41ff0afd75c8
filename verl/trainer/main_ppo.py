"""Train a policy with an algorithm of the PPO family: ``python -m verl.trainer.main_ppo [key=value
...]``.

The default config is ``configs/quickstart.yaml``, which trains on any device. It is ``ppo_trainer``
if the overrides name a policy or data files.
"""

import sys
from collections.abc import Sequence

from verl.config.schema import PPOConfig
from verl.trainer import cli
from verl.trainer.launch.extensions import (
    choose_config_name,
    collect_registered_names,
    perform_dry_run,
    run_preflight_checks,
)
from verl.utils.logging import setup_logging


def train(cfg: PPOConfig) -> None:
    """Start the run of ``cfg``. Slow imports happen only here."""
    from verl.trainer.launch.ppo import run_ppo

    run_ppo(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    preflight_functions = (collect_registered_names, run_preflight_checks, perform_dry_run)
    return cli.run(
        train, choose_config_name, PPOConfig, "verl.trainer.main_ppo", argv, *preflight_functions
    )


if __name__ == "__main__":
    setup_logging()
    sys.exit(main())
