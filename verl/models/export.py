"""Weights under their Hugging Face names, and whole directories that ``from_pretrained`` reads."""

import shutil
from pathlib import Path

import torch
from torch import nn

from verl.models.lora import merge_lora

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
    "added_tokens.json", "chat_template.jinja", "tokenizer.model", "generation_config.json", "preprocessor_config.json",
)  # fmt: skip


def hf_names(
    state: dict[str, torch.Tensor], prefix: str, scales: dict[str, float], tied: set[str]
) -> dict[str, torch.Tensor]:
    """Full state of a wrapper as the weights of the plain model.

    ``prefix`` ("lm.") is removed, LoRA adapters are merged (``scales`` from ``lora_scales``), and
    ``tied`` names that only repeat another weight are left out, as ``save_pretrained`` does.
    """
    plain = {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }
    merged = merge_lora(plain, scales)
    return {name: tensor for name, tensor in merged.items() if name not in tied}


def tied_names(lm: nn.Module) -> set[str]:
    """Names of weights that are the same parameter as another one that comes first, such as a tied
    ``lm_head``.
    """
    seen: dict[int, str] = {}
    repeated = set()
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            repeated.add(name)
        else:
            seen[id(parameter)] = name
    return repeated


def save_hf(
    lm: nn.Module, state: dict[str, torch.Tensor], directory: str | Path, source: str | Path | None
) -> None:
    """Write config, ``model.safetensors`` (``state``, names as ``hf_names``) and the tokenizer
    files of ``source``.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = lm.config
    attention, config._attn_implementation = config._attn_implementation, "sdpa"
    cached, config.use_cache = config.use_cache, True
    try:
        config.save_pretrained(directory)
        if getattr(lm, "generation_config", None) is not None:
            lm.generation_config.save_pretrained(directory)
    finally:
        config._attn_implementation, config.use_cache = attention, cached
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    path = directory / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors leaves it to its owner alone
    for name in TOKENIZER_FILES if source else ():
        if (Path(source) / name).is_file() and not (directory / name).exists():
            shutil.copyfile(Path(source) / name, directory / name)
