"""Compare the credit that estimators give to decisions with measured returns: ``python -m
verl.trainer.main_audit RUN_DIR [key=value ...]``.

Generate trajectories of validation tasks with the newest policy of the run, or replay trajectories
of a file. A policy may choose a level (1 to 4) of reasoning in each turn. At some turns execute
every level, or several actions if the policy chooses no level. Continue each of these trajectories
to the end. Compare their returns with the credit of the level or action. Keys are those of
``main_ppo``; their defaults are the configuration of the run. Results are written to
``RUN_DIR/audit``.
"""

import sys
from collections.abc import Sequence

from verl.config.schema import PPOConfig
from verl.trainer import cli
from verl.trainer.launch.audit import build_audit_args, run_audit, run_audit_preflight_checks
from verl.trainer.launch.extensions import collect_registered_names, perform_dry_run
from verl.utils.logging import setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        args = build_audit_args(args)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    preflight_functions = (collect_registered_names, run_audit_preflight_checks, perform_dry_run)
    return cli.run(
        run_audit, "ppo_trainer", PPOConfig, "verl.trainer.main_audit", args, *preflight_functions
    )


if __name__ == "__main__":
    setup_logging()
    sys.exit(main())
