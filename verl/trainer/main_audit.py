"""Ask a finished run whether its credit per step is real: ``python -m verl.trainer.main_audit
RUN_DIR [key=value ...]``.

Tasks of the validation split are played with the newest policy of the run. From some of their steps
every choice that the method gives credit for is forced and played on with; what these plays earn is
compared with what every score said beforehand. Keys are those of ``main_ppo``, beginning with the
run's own configuration; results go to ``RUN_DIR/audit``.
"""

import sys
from collections.abc import Sequence

from verl.config.schema import PPOConfig
from verl.trainer import cli
from verl.trainer.launch.audit import audit_words, inspect_audit, run_audit
from verl.trainer.launch.extensions import inspect_calls as rehearsal_problems
from verl.trainer.launch.extensions import registered_names
from verl.utils.logging import setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        words = audit_words(words)
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return cli.run(
        run_audit,
        "ppo_trainer",
        PPOConfig,
        "verl.trainer.main_audit",
        words,
        registered_names,
        inspect_audit,
        rehearsal_problems,
    )


if __name__ == "__main__":
    setup_logging()
    sys.exit(main())
