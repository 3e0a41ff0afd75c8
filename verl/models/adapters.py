"""LoRA adapters separate from their model: tensors for rollout engines, and files of peft.

A rollout engine gets an adapter as tensors ``<module>.lora_A.weight`` [rank, in] and
``<module>.lora_B.weight`` [out, rank]. It computes ``y = W x + B A x``, so the LoRA scale is
already multiplied into B.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.config.schema.model import ModelConfig
from verl.models.lora import ADAPTER_NAME, adapted_module, list_targets, target_problems
from verl.names import POLICY_MODEL

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

PEFT_PREFIX = "base_model.model."
# Options of peft that change what an adapter computes. Engines apply plain LoRA.
OPTIONS = ("bias", "use_dora", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Rank of an adapter, and the names, or ends of names, of the modules that it adapts."""

    rank: int
    targets: tuple[str, ...]


def to_engine_adapter(
    state: Mapping[str, torch.Tensor], prefix: str, scales: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """Return the LoRA tensors in ``state``, with the scale multiplied into ``lora_B``.

    Rollout engines load this form. ``prefix`` is removed from the names in ``state``. ``scales``
    maps each adapted module to its scale ``alpha / rank``. Raises ``ValueError`` unless exactly
    these modules have both ``lora_A`` and ``lora_B``.
    """
    adapter: dict[str, torch.Tensor] = {}
    for full_name, tensor in state.items():
        name = full_name.removeprefix(prefix).replace(f".{ADAPTER_NAME}.", ".")
        if ".lora_" in name:
            adapter[name] = tensor * scales[adapted_module(name)] if ".lora_B." in name else tensor
    differing_names = sorted(adapter.keys() ^ _list_tensors(scales))
    if differing_names:
        raise ValueError(f"the adapter lacks tensors or has unknown ones: {differing_names[0]}")
    return adapter


def read_adapter(directory: str | Path) -> dict[str, torch.Tensor]:
    """Read the LoRA tensors that peft saved in ``directory``.

    The scale is multiplied into ``lora_B``, because rollout engines apply no scale. Raises
    ``ValueError`` if files are missing or damaged, or for adapters other than plain LoRA.
    """
    from peft import LoraConfig
    from peft.utils import load_peft_weights

    files = ("adapter_config.json", "adapter_model.safetensors")
    # Without these files peft would ask the model hub, or load pickled weights.
    if not all((Path(directory) / name).is_file() for name in files):
        raise ValueError(f"it does not hold {files[0]} and {files[1]}")
    try:
        config: Any = LoraConfig.from_pretrained(str(directory))
        tensors = load_peft_weights(str(directory), device="cpu")
    except Exception as error:  # boundary: peft raises many types for damaged files
        raise ValueError(f"peft cannot read it: {error}") from error
    plain = LoraConfig(r=config.r, lora_alpha=config.lora_alpha)
    options = [name for name in OPTIONS if getattr(config, name) != getattr(plain, name)]
    if options:
        raise ValueError(f"it is not plain LoRA: its config sets {', '.join(options)}")
    scale = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    adapter = {
        name.removeprefix(PEFT_PREFIX): tensor * scale if ".lora_B." in name else tensor
        for name, tensor in tensors.items()
    }
    has_pairs = adapter.keys() == _list_tensors(map(adapted_module, adapter))
    if not has_pairs or get_rank(adapter) != config.r:
        raise ValueError(f"its tensors are not pairs lora_A and lora_B of rank {config.r}")
    return adapter


def _list_tensors(modules: Iterable[str]) -> set[str]:
    return {f"{module}.lora_{part}.weight" for module in modules for part in "AB"}


def require_fit(adapter: Mapping[str, torch.Tensor], model: "PreTrainedModel") -> None:
    """Raise ``ValueError`` for an adapter of layers or shapes that ``model`` does not have."""
    for problem in target_problems(model, list(dict.fromkeys(map(adapted_module, adapter)))):
        raise problem
    rank = get_rank(adapter)
    for name, tensor in adapter.items():
        size_out, size_in = model.get_parameter(f"{adapted_module(name)}.weight").shape
        shape = (rank, size_in) if ".lora_A." in name else (size_out, rank)
        if tensor.shape != shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)}, not {list(shape)}")


def list_adapter_shapes(config: ModelConfig, model: "PreTrainedModel") -> dict[str, AdapterShape]:
    """Return rank and target modules of a run's LoRA adapters by name, the policy's first.

    ``model`` is the model without adapters, which may be on ``meta``.
    """
    targets = tuple(map(str, list_targets(model, config.target_modules)))
    shapes = {POLICY_MODEL: AdapterShape(config.lora_rank, targets)}
    for name, directory in config.adapters.items():
        adapter = read_adapter(directory)
        targets = tuple(dict.fromkeys(map(adapted_module, adapter)))
        shapes[name] = AdapterShape(get_rank(adapter), targets)
    return shapes


def get_rank(adapter: Mapping[str, torch.Tensor]) -> int:
    """Return the rank of ``adapter``."""
    return max(tensor.shape[0] for name, tensor in adapter.items() if ".lora_A." in name)
