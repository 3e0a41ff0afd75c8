"""Train a policy with an algorithm of the PPO family: ``python -m verl.trainer.main_ppo [key=value
...]``.

Without arguments the embedded default (``configs/quickstart.yaml``) is trained on whatever device
there is; a command line that names its own policy or files starts from the neutral
``ppo_trainer``.
"""

import logging
import sys
from collections.abc import Sequence

from verl.trainer.config import cli
from verl.trainer.config.derive import is_placeholder
from verl.trainer.config.schema import PPOConfig
from verl.trainer.launch.extensions import (
    registered_names,
    rehearsal_problems,
    start_problems,
)
from verl.utils.logging import setup_logging

logger = logging.getLogger(__name__)
MODEL_PATH = "actor_rollout_ref.model.path"
TRAIN_FILES = "data.train_files"


def default_config_name(overrides: Sequence[str]) -> str:
    """``quickstart``, or ``ppo_trainer`` where the overrides name a policy or files to train on."""
    written = dict(word.lstrip("+").split("=", 1) for word in overrides if "=" in word)
    files = [file.strip("[]'\" ") for file in written.get(TRAIN_FILES, "").split(",")]
    names_files = any(files) and not is_placeholder(files)
    return "ppo_trainer" if names_files or MODEL_PATH in written else "quickstart"


def train(cfg: PPOConfig) -> None:
    """Start the run that ``cfg`` describes; everything heavy is imported from here on."""
    from verl.trainer.launch.ppo import run_ppo

    run_ppo(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    asked = (registered_names, start_problems, rehearsal_problems)
    return cli.run(train, default_config_name, PPOConfig, "verl.trainer.main_ppo", argv, *asked)


if __name__ == "__main__":
    setup_logging()
    sys.exit(main())
