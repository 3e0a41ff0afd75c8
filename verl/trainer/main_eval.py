"""Measure a policy on the validation set, without training: ``python -m verl.trainer.main_eval
[key=value ...]``.

Configs, keys and the default config are those of ``main_ppo``. The run directory is that of the
training with the suffix ``-eval``. The policy is ``actor_rollout_ref.model.path``, or a checkpoint
(``trainer.resume_mode=resume_path``,
``trainer.resume_from_path=runs/.../checkpoints/global_step_10``).
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

# Overrides of every evaluation. They come before the user's overrides, which take precedence.
EVAL_OVERRIDES = (
    "trainer.val_only=true",
    "cold_start.enable=false",
    "trainer.default_local_dir=runs/${trainer.project_name}/${trainer.experiment_name}-eval",
)


def run_evaluation(cfg: PPOConfig) -> None:
    """Measure the policy of ``cfg`` on the validation set. Slow imports happen only here."""
    from verl.trainer.launch.level_comparison import evaluate_policy

    evaluate_policy(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = [*EVAL_OVERRIDES, *(sys.argv[1:] if argv is None else argv)]
    prog = "verl.trainer.main_eval"
    preflight_functions = (collect_registered_names, run_preflight_checks, perform_dry_run)
    return cli.run(run_evaluation, choose_config_name, PPOConfig, prog, args, *preflight_functions)


if __name__ == "__main__":
    setup_logging()
    sys.exit(main())
