"""Make a Hugging Face directory of a checkpoint: ``python -m verl.trainer.main_export
checkpoint=runs/.../checkpoints/global_step_N target=DIR [lora=adapters]``.

transformers and vLLM load what is written.
"""

import sys
from collections.abc import Sequence

from verl.config.schema.tools import ExportConfig
from verl.trainer.command import run_command

PROG = "verl.trainer.main_export"
REQUIRED = ("checkpoint", "target")


def export(cfg: ExportConfig) -> None:
    """Write what ``cfg`` asks for; everything heavy is imported from here on."""
    from verl.trainer.launch.export import export_checkpoint

    export_checkpoint(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit status."""
    return run_command(export, ExportConfig, REQUIRED, PROG, argv)


if __name__ == "__main__":
    sys.exit(main())
