"""Measure a policy on the validation panel, without training: ``python -m verl.trainer.main_eval [key=value ...]``.

Configs and keys are those of ``main_ppo``; the run directory is that of the training with ``-eval`` behind it. The
policy is ``actor_rollout_ref.model.path``, or a checkpoint (``trainer.resume_mode=resume_path``,
``trainer.resume_from_path=runs/.../checkpoints/global_step_10``).
"""

import sys
from collections.abc import Sequence

from verl.trainer.config import cli
from verl.trainer.config.schema import PPOConfig
from verl.trainer.registered import registered_names, start_problems

# Before the user's words, so that those win. A directory of its own: metrics of the training are not touched.
EVAL_OVERRIDES = (
    "trainer.val_only=true",
    "cold_start.enable=false",
    "trainer.default_local_dir=runs/${trainer.project_name}/${trainer.experiment_name}-eval",
)


def evaluate(cfg: PPOConfig) -> None:
    """Start the run that ``cfg`` describes; everything heavy is imported from here on."""
    from verl.trainer.launch import run_ppo

    run_ppo(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    words = [*EVAL_OVERRIDES, *(sys.argv[1:] if argv is None else argv)]
    return cli.run(evaluate, "quickstart", PPOConfig, "verl.trainer.main_eval", words, registered_names, start_problems)


if __name__ == "__main__":
    sys.exit(main())
