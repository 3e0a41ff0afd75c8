"""LoRA through peft: adapters are injected into the model itself, and merged again on export."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

ADAPTER = "default"
_CONFIG = "_verl_adapter_config"


def add_lora(
    model: "PreTrainedModel",
    *,
    rank: int,
    alpha: float,
    target_modules: str | Sequence[str] = "all-linear",
) -> "PreTrainedModel":
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
    if target_modules == "all-linear":
        targets = linear_names(model)
    else:
        targets = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    # no dropout: log-probs of one row would differ from pass to pass
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  peft computes with fractions too
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
    )
    inject_adapter_in_model(config, model, adapter_name=ADAPTER)
    # peft hangs its configs on a wrapper, which there is none of here.
    setattr(model, _CONFIG, config)
    return model


def adapter_config(model: "PreTrainedModel") -> Any:
    """The peft configuration of the adapters that ``add_lora`` injected; None without any."""
    return getattr(model, _CONFIG, None)


def linear_names(model: "PreTrainedModel") -> list[str]:
    """Last name parts of all linear layers except the output head, sorted."""
    head = model.get_output_embeddings()
    found: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            found.add(name.rsplit(".", 1)[-1])
    return sorted(found)


def lora_scales(model: nn.Module) -> dict[str, float]:
    """Scale ``alpha / rank`` of every adapted module by its name; empty without LoRA."""
    found: dict[str, float] = {}
    for name, module in model.named_modules():
        scaling = getattr(module, "scaling", None)  # what peft puts beside the adapter matrices
        if hasattr(module, "lora_A") and isinstance(scaling, Mapping):
            found[name] = float(scaling[ADAPTER])
    return found


def adapted_module(name: str) -> str:
    """What a weight belongs to: the module that its adapters adapt, or the weight alone."""
    for mark in (".base_layer.", ".lora_"):
        module, found, _ = name.partition(mark)
        if found:
            return module
    return name


def merge_lora(state: dict[str, torch.Tensor], scales: dict[str, float]) -> dict[str, torch.Tensor]:
    """Full state with adapters folded into the weights they adapt: ``W + scale * B @ A``, under the
    plain names.
    """
    merged: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        module, _, leaf = name.rpartition(".base_layer.")
        if not module:
            merged[name] = tensor
            continue
        if leaf == "weight":
            # In float32: an adapter's update is often smaller than what bfloat16 rounds away.
            low = state[f"{module}.lora_A.{ADAPTER}.weight"].float()  # [rank, in]
            high = state[f"{module}.lora_B.{ADAPTER}.weight"].float()  # [out, rank]
            tensor = (tensor.float() + scales[module] * (high @ low)).to(tensor.dtype)
        merged[f"{module}.{leaf}"] = tensor
    return merged
