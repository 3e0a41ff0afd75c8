"""LoRA adapters separate from their model: tensors for rollout engines, and files of peft.

A rollout engine gets an adapter as tensors ``<module>.lora_A.weight`` [rank, in] and
``<module>.lora_B.weight`` [out, rank]. It computes ``y = W x + B A x``, so the LoRA scale is
already multiplied into B.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file
from torch import nn

from verl.config.adapter_files import (
    PEFT_PREFIX,
    WEIGHTS_FILE,
    find_adapter_file,
    list_adapter_tensors,
    read_adapter_settings,
)
from verl.config.schema.model import ModelConfig
from verl.models.lora import (
    ADAPTER_NAME,
    expand_target_modules,
    get_adapted_module_name,
    lora_scales,
    target_problems,
)
from verl.models.weights import find_non_finite
from verl.names import POLICY_MODEL

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Rank of a LoRA adapter and the modules that it adapts, as full names or ends of names."""

    rank: int
    targets: tuple[str, ...]


def convert_adapter_for_engine(
    state: Mapping[str, torch.Tensor], prefix: str, scales: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """Return the LoRA tensors in ``state``, with the scale multiplied into ``lora_B``.

    ``prefix`` is removed from the names in ``state``. ``scales`` maps each adapted module to its
    scale ``alpha / rank``. Raises ``ValueError`` unless exactly these modules have both ``lora_A``
    and ``lora_B``.
    """
    adapter: dict[str, torch.Tensor] = {}
    for full_name, tensor in state.items():
        name = full_name.removeprefix(prefix).replace(f".{ADAPTER_NAME}.", ".")
        if ".lora_" in name:
            adapter[name] = (
                tensor * scales[get_adapted_module_name(name)] if ".lora_B." in name else tensor
            )
    differing_names = sorted(adapter.keys() ^ list_adapter_tensors(scales))
    if differing_names:
        raise ValueError(f"the adapter lacks tensors or has unknown ones: {differing_names[0]}")
    return adapter


def read_adapter(directory: str | Path) -> dict[str, torch.Tensor]:
    """Read the LoRA tensors of peft in ``directory``, with the scale multiplied into ``lora_B``.

    Raises ``ValueError`` if files are missing or damaged, or for adapters other than plain LoRA.
    """
    settings = read_adapter_settings(directory)
    scale = settings.alpha / settings.rank
    return {
        name: tensor * scale if ".lora_B." in name else tensor
        for name, tensor in _read_tensors(directory).items()
    }


def _read_tensors(directory: str | Path) -> dict[str, torch.Tensor]:
    path = find_adapter_file(directory, WEIGHTS_FILE)
    tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in load_file(path).items()}
    invalid_names = find_non_finite(tensors.items())
    if invalid_names:
        raise ValueError(f"{invalid_names[0]} is NaN or infinite")
    return tensors


def load_adapter(model: nn.Module, directory: str | Path) -> None:
    """Copy the adapter in ``directory`` into the adapters of ``model``, without rounding.

    Raises ``ValueError`` unless it has the modules, shapes and scales of the adapters of ``model``.
    """
    settings, tensors = read_adapter_settings(directory), _read_tensors(directory)
    adapter_parameters = {
        name.replace(f".{ADAPTER_NAME}.", "."): weight
        for name, weight in model.named_parameters()
        if ".lora_" in name
    }
    model_shapes, file_shapes = (
        {(name, tuple(tensor.shape)) for name, tensor in adapter.items()}
        for adapter in (adapter_parameters, tensors)
    )
    has_equal_scale = {*lora_scales(model).values()} == {settings.alpha / settings.rank}
    if model_shapes != file_shapes or not has_equal_scale:
        why = sorted(model_shapes ^ file_shapes)[0] if has_equal_scale else "its scale differs"
        raise ValueError(f"the adapter in {str(directory)!r} does not fit the model: {why}")
    with torch.no_grad():
        for name, weight in adapter_parameters.items():
            weight.copy_(tensors[name])


def require_adapter_fits(adapter: Mapping[str, torch.Tensor], model: "PreTrainedModel") -> None:
    """Raise ``ValueError`` for an adapter of layers or shapes that ``model`` does not have."""
    for problem in target_problems(
        model, list(dict.fromkeys(map(get_adapted_module_name, adapter)))
    ):
        raise problem
    rank = get_lora_rank(adapter)
    for name, tensor in adapter.items():
        size_out, size_in = model.get_parameter(f"{get_adapted_module_name(name)}.weight").shape
        shape = (rank, size_in) if ".lora_A." in name else (size_out, rank)
        if tensor.shape != shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)}, not {list(shape)}")


def list_adapter_shapes(config: ModelConfig, model: "PreTrainedModel") -> dict[str, AdapterShape]:
    """Return rank and target modules of a run's LoRA adapters by name, the policy's first.

    The other adapters are not trained. ``model`` is the model without adapters, which may be on
    ``meta``.
    """
    targets = tuple(map(str, expand_target_modules(model, config.target_modules)))
    shapes_by_name = {POLICY_MODEL: AdapterShape(config.lora_rank, targets)}
    for name, directory in config.adapters.items():
        adapter = read_adapter(directory)
        targets = tuple(dict.fromkeys(map(get_adapted_module_name, adapter)))
        shapes_by_name[name] = AdapterShape(get_lora_rank(adapter), targets)
    return shapes_by_name


def get_lora_rank(adapter: Mapping[str, torch.Tensor]) -> int:
    return max(tensor.shape[0] for name, tensor in adapter.items() if ".lora_A." in name)
