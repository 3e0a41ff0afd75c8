"""LoRA adapters apart from their model: as rollout engines hold them, and as files of peft.

An engine knows an adapter as tensors ``<module>.lora_A.weight`` [rank, in] and
``<module>.lora_B.weight`` [out, rank] with ``y = W x + B A x``: the scale alpha / rank is a factor
of B. So an engine needs no alpha, and its tensors can be compared with those that were sent.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from verl.config.schema.model import ModelConfig
from verl.models.lora import ADAPTER_NAME, adapted_module, list_targets
from verl.names import POLICY_MODEL

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

PEFT_PREFIX = "base_model.model."
CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
# Options of peft that change what an adapter computes. Engines apply plain LoRA.
UNSUPPORTED_OPTIONS = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
)


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Rank of an adapter, and the names, or ends of names, of the modules that it adapts."""

    rank: int
    targets: tuple[str, ...]


def to_engine_adapter(
    state: Mapping[str, torch.Tensor], prefix: str, scales: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """Return the adapter in ``state`` (weights of a ``PolicyModel``) as engines hold it.

    ``prefix`` is removed from the names; ``scales`` are those of ``lora_scales``. Raises
    ``ValueError`` unless each module of ``scales`` has both of its tensors.
    """
    adapter: dict[str, torch.Tensor] = {}
    for full_name, tensor in state.items():
        name = full_name.removeprefix(prefix)
        if ".lora_" not in name:
            continue
        scale = scales[adapted_module(name)] if ".lora_B." in name else 1.0
        adapter[name.replace(f".{ADAPTER_NAME}.", ".")] = tensor if scale == 1.0 else tensor * scale
    expected_names = {f"{module}.lora_{part}.weight" for module in scales for part in "AB"}
    if adapter.keys() != expected_names:
        differing_names = sorted(adapter.keys() ^ expected_names)
        raise ValueError(
            f"adapter tensors are missing or unknown; the first is {differing_names[0]}"
        )
    return adapter


def read_adapter(directory: str | Path) -> dict[str, torch.Tensor]:
    """Read the adapter that peft saved in ``directory``, as engines hold it.

    Raises ``ValueError`` if files are missing or damaged, or for adapters other than plain LoRA.
    """
    directory = Path(directory)
    try:
        config: dict[str, Any] = json.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(directory / TENSOR_FILE)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ValueError(f"cannot read {CONFIG_FILE} and {TENSOR_FILE}: {error}") from error
    options = [name for name in UNSUPPORTED_OPTIONS if config.get(name)]
    options += ["bias"] if config.get("bias", "none") != "none" else []
    if options:
        raise ValueError(f"it is not plain LoRA: {', '.join(options)} of {CONFIG_FILE} is set")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    adapter = {
        name.removeprefix(PEFT_PREFIX): tensor * scale if ".lora_B." in name else tensor
        for name, tensor in tensors.items()
    }
    modules = {adapted_module(name) for name in adapter}
    expected_names = {f"{module}.lora_{part}.weight" for module in modules for part in "AB"}
    ranks = {tensor.shape[0] for name, tensor in adapter.items() if ".lora_A." in name}
    if adapter.keys() != expected_names or ranks != {rank}:
        raise ValueError(f"the tensors of {TENSOR_FILE} are not pairs A and B of rank {rank}")
    return adapter


def find_misfits(adapter: Mapping[str, torch.Tensor], model: "PreTrainedModel") -> Iterator[str]:
    """Yield the name of each tensor of ``adapter`` that does not fit its layer of ``model``."""
    for name, tensor in adapter.items():
        weight = model.get_submodule(adapted_module(name)).get_parameter("weight")
        dimension = 1 if ".lora_A." in name else 0
        if tensor.shape[dimension] != weight.shape[dimension]:
            yield name


def list_adapter_shapes(config: ModelConfig, model: "PreTrainedModel") -> dict[str, AdapterShape]:
    """Return the shapes of all adapters of a run by name, first that of the trained policy.

    ``model`` is the model without adapters, which may be on ``meta``.
    """
    targets = tuple(map(str, list_targets(model, config.target_modules)))
    shapes = {POLICY_MODEL: AdapterShape(config.lora_rank, targets)}
    for name, directory in config.adapters.items():
        adapter = read_adapter(directory)
        modules = dict.fromkeys(map(adapted_module, adapter))
        rank = next(tensor.shape[0] for key, tensor in adapter.items() if ".lora_A." in key)
        shapes[name] = AdapterShape(rank, tuple(modules))
    return shapes
