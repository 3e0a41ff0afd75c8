"""LoRA through peft: adapters are injected into the model itself, and merged again on export."""

from typing import Any

import torch
from torch import nn

ADAPTER = "default"


def add_lora(
    model: nn.Module, *, rank: int, alpha: float, target_modules: Any = "all-linear"
) -> nn.Module:
    """Freeze ``model`` and inject trainable adapters of ``rank`` with scale ``alpha / rank`` in
    place.

    ``target_modules`` is ``all-linear`` (every linear layer but the output head), a name or a list
    of names. Raises ``ModuleNotFoundError`` without peft, ``ValueError`` when no module matches.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("lora_rank > 0 needs peft (pip install peft)") from missing
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    targets = linear_names(model) if target_modules == "all-linear" else target_modules
    targets = [targets] if isinstance(targets, str) else list(targets)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, bias="none"
    )
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    return model


def linear_names(model: nn.Module) -> list[str]:
    """Last name parts of all linear layers except the output head, sorted."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    ]
    return sorted({name.rsplit(".", 1)[-1] for name in linear})


def lora_scales(model: nn.Module) -> dict[str, float]:
    """Scale ``alpha / rank`` of every adapted module by its name; empty without LoRA."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "scaling"):
            found[name] = float(module.scaling[ADAPTER])
    return found


def merge_lora(state: dict[str, torch.Tensor], scales: dict[str, float]) -> dict[str, torch.Tensor]:
    """Full state with adapters folded into the weights they adapt: ``W + scale * B @ A``, under the
    plain names.
    """
    merged = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        module, _, leaf = name.rpartition(".base_layer.")
        if not module:
            merged[name] = tensor
            continue
        if leaf == "weight":
            low = state[f"{module}.lora_A.{ADAPTER}.weight"].float()
            high = state[f"{module}.lora_B.{ADAPTER}.weight"].float()
            tensor = (tensor.float() + scales[module] * (high @ low)).to(tensor.dtype)
        merged[f"{module}.{leaf}"] = tensor
    return merged
