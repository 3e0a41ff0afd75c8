"""Export a checkpoint as a Hugging Face directory, which transformers and vLLM can load:
``python -m verl.trainer.main_export checkpoint=runs/.../checkpoints/global_step_N target=DIR
[lora=adapters]``.
"""

import sys
from collections.abc import Sequence

from verl.config.schema.tools import ExportConfig
from verl.trainer.command import run_command


def export(cfg: ExportConfig) -> None:
    """Export the checkpoint of ``cfg``. Slow imports happen only here."""
    from verl.trainer.launch.export import export_checkpoint

    export_checkpoint(cfg)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    required_keys = ("checkpoint", "target")
    return run_command(export, ExportConfig, required_keys, "verl.trainer.main_export", argv)


if __name__ == "__main__":
    sys.exit(main())
