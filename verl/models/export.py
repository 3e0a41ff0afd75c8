"""Weights under their Hugging Face names, and whole directories that ``from_pretrained`` reads."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import nn

from verl.models.lora import ADAPTER, adapter_config, merge_lora

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "generation_config.json",
    "preprocessor_config.json",
)


def hf_names(
    state: dict[str, torch.Tensor], prefix: str, scales: dict[str, float], tied: set[str]
) -> dict[str, torch.Tensor]:
    """Full state of a wrapper as the weights of the plain model.

    ``prefix`` ("lm.") is removed, LoRA adapters are merged (``scales`` from ``lora_scales``), and
    ``tied`` names that only repeat another weight are left out, as ``save_pretrained`` does. Raises
    ``ValueError`` for a name without ``prefix``, and for adapters that cannot be merged.
    """
    other = [name for name in state if not name.startswith(prefix)]
    if other:
        raise ValueError(f"{len(other)} weights are not below {prefix!r}; the first is {other[0]}")
    plain = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    merged = merge_lora(plain, scales)
    return {name: tensor for name, tensor in merged.items() if name not in tied}


def tied_names(lm: nn.Module) -> set[str]:
    """Names of weights that are the same parameter as another one that comes first, such as a tied
    ``lm_head``.
    """
    seen: set[int] = set()
    repeated: set[str] = set()
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        # Identity and not equality: fresh layers can hold equal values without being tied.
        if id(parameter) in seen:
            repeated.add(name)
        seen.add(id(parameter))
    return repeated


def save_hf(
    lm: "PreTrainedModel",
    state: dict[str, torch.Tensor],
    directory: str | Path,
    source: str | Path | None,
) -> None:
    """Write config, ``model.safetensors`` (``state``, names as ``hf_names``) and the tokenizer
    files of ``source``.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _save_config(lm, directory)
    # cloned: safetensors refuses tensors that share memory
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    path = directory / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves it to its owner alone
    if source:
        _copy_tokenizer(Path(source), directory)


def save_adapters(
    lm: "PreTrainedModel",
    state: dict[str, torch.Tensor],
    prefix: str,
    directory: str | Path,
    source: str | Path,
) -> None:
    """Write the LoRA adapters of ``lm`` alone as peft and vLLM load them: ``adapter_config.json``,
    ``adapter_model.safetensors`` and the tokenizer files of ``source``, the model they belong to.

    ``state`` is the full state of a wrapper, which keeps the model below ``prefix``. Raises
    ``ValueError`` where the model has no adapters.
    """
    config = adapter_config(lm)
    if config is None:
        raise ValueError("the model has no LoRA adapters")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config.base_model_name_or_path = str(source)
    config.inference_mode = True
    config.task_type = "CAUSAL_LM"
    config.save_pretrained(str(directory))
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            # peft names no adapter in its files, and has a wrapper of its own around the model.
            plain = name.removeprefix(prefix).replace(f".{ADAPTER}.", ".")
            found[f"base_model.model.{plain}"] = tensor.detach().cpu().contiguous().clone()
    path = directory / "adapter_model.safetensors"
    save_file(found, path, metadata={"format": "pt"})
    path.chmod(0o644)
    _copy_tokenizer(Path(source), directory)


def _save_config(lm: "PreTrainedModel", directory: Path) -> None:
    """Write the model's config as other programs want it: with neither our attention, which they
    do not know, nor the cache switched off.
    """
    config = lm.config
    attention = config._attn_implementation
    cached = config.use_cache
    config._attn_implementation = "sdpa"
    config.use_cache = True
    try:
        config.save_pretrained(directory)
        if lm.generation_config is not None:
            lm.generation_config.save_pretrained(directory)
    finally:
        config._attn_implementation = attention
        config.use_cache = cached


def _copy_tokenizer(source: Path, directory: Path) -> None:
    for name in TOKENIZER_FILES:
        # The config of generation has just been written, and is newer than the source's.
        if (source / name).is_file() and not (directory / name).exists():
            shutil.copyfile(source / name, directory / name)
