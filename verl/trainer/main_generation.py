"""Sample answers to a file of prompts: ``python -m verl.trainer.main_generation
model.path=DIR data.path=FILE [key=value ...]``.

The file is jsonl or parquet; the answers are written beside it, in a further column.
"""

import sys
from collections.abc import Sequence

from verl.config.schema.tools import GenerationConfig
from verl.trainer.command import run_command
from verl.utils.logging import setup_logging

PROG = "verl.trainer.main_generation"
REQUIRED = ("model.path", "data.path")


def generate(cfg: GenerationConfig) -> None:
    """Sample what ``cfg`` asks for; everything heavy is imported from here on."""
    from verl.trainer.launch.generation import run_generation

    run_generation(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    return run_command(generate, GenerationConfig, REQUIRED, PROG, argv)


if __name__ == "__main__":
    setup_logging()
    sys.exit(main())
