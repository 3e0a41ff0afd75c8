"""Train a policy on episodes by supervised learning: ``python -m verl.trainer.main_sft [key=value
...]``.

The default config is ``configs/quickstart_sft.yaml``, which trains the initial policy of the
quickstart. If the command line names a policy (``model.path``) or data files
(``data.train_files``), it is ``sft_trainer``.
"""

import sys
from collections.abc import Sequence

from verl.config.schema import SFTConfig
from verl.trainer import cli
from verl.trainer.launch.extensions import choose_sft_config_name, run_sft_preflight_checks
from verl.utils.logging import setup_logging


def train(cfg: SFTConfig) -> None:
    """Start the run of ``cfg``. Slow imports happen only here."""
    from verl.trainer.launch.sft import run_sft

    run_sft(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    prog = "verl.trainer.main_sft"
    return cli.run(
        train,
        choose_sft_config_name,
        SFTConfig,
        prog,
        argv,
        preflight_check=run_sft_preflight_checks,
    )


if __name__ == "__main__":
    setup_logging()
    sys.exit(main())
