"""Measure a policy on the validation panel, without training: ``python -m verl.trainer.main_eval
[key=value ...]``.

Configs and keys are those of ``main_ppo``, and so is the config that is taken where none is named.
The run directory is that of the training with ``-eval`` behind it. The policy is
``actor_rollout_ref.model.path``, or a checkpoint (``trainer.resume_mode=resume_path``,
``trainer.resume_from_path=runs/.../checkpoints/global_step_10``).
"""

import sys
from collections.abc import Sequence

from verl.config.schema import PPOConfig
from verl.trainer import cli
from verl.trainer.launch.evaluate import EVAL_OVERRIDES, run_evaluation
from verl.trainer.launch.extensions import (
    default_config_name,
    inspect_calls,
    inspect_start,
    registered_names,
)
from verl.utils.logging import setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    words = [*EVAL_OVERRIDES, *(sys.argv[1:] if argv is None else argv)]
    return cli.run(
        run_evaluation,
        default_config_name,
        PPOConfig,
        "verl.trainer.main_eval",
        words,
        registered_names,
        inspect_start,
        inspect_calls,
    )


if __name__ == "__main__":
    setup_logging()
    sys.exit(main())
