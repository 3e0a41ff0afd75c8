"""Sample answers to a file of prompts: ``python -m verl.trainer.main_generation model.path=DIR
data.path=FILE [key=value ...]``.

The file is jsonl or parquet. The output is written next to it, with a column of answers.
"""

import sys
from collections.abc import Sequence

from verl.config.schema.tools import GenerationConfig
from verl.trainer.command import run_command
from verl.utils.logging import setup_logging


def generate(cfg: GenerationConfig) -> None:
    """Sample answers to the prompts in ``cfg.data.path``. Slow imports happen only here."""
    from verl.trainer.launch.generation import run_generation

    run_generation(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    prog = "verl.trainer.main_generation"
    return run_command(generate, GenerationConfig, ("model.path", "data.path"), prog, argv)


if __name__ == "__main__":
    setup_logging()
    sys.exit(main())
