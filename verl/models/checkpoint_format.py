"""Conversion between the weights of a transformers model and those of its checkpoint files.

transformers renames some weights when it loads a model, and fuses or splits others. For example,
two experts with the matrices w1 and w3 of shape [I, H]::

    checkpoint   layers.0.block_sparse_moe.experts.{0,1}.{w1,w3}.weight   4 weights [I, H]
    model        layers.0.mlp.experts.gate_up_proj                        1 weight [2, 2 * I, H]

Other programs, such as vLLM, know only the weights of the checkpoint.
"""

import copy
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from verl.models.lora import drop_lora

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightTransform


@dataclass
class WeightConversion:
    """Conversion of one or several weights into one or several weights of other names.

    ``patterns`` maps the name of each input to the pattern of ``converter`` that it matches.
    Without ``converter`` the only input is renamed to ``target``.
    """

    target: str  # name of the first result, before the converter inserts the indices of experts
    converter: "WeightConverter | None" = None
    patterns: dict[str, str | None] = field(default_factory=dict)

    def convert(
        self, model: "PreTrainedModel", inputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the results by name. ``inputs`` are the weights named in ``patterns``."""
        if self.converter is None:
            [name] = self.patterns
            return {self.target: inputs[name]}
        converter = copy.deepcopy(self.converter)  # it stores the tensors
        for name, pattern in self.patterns.items():
            assert pattern is not None
            converter.add_tensor(self.target, name, pattern, inputs[name])  # pyright: ignore[reportArgumentType]  tensors are allowed too
        results = converter.convert(self.target, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in results.items()
        }


def plan_conversions(
    model: "PreTrainedModel", names: Collection[str], *, to_checkpoint: bool
) -> list[WeightConversion]:
    """Return the conversions between the weights of ``model`` and those of its checkpoint.

    With ``to_checkpoint``, ``names`` are weights of the model. Otherwise they are weights of the
    checkpoint. Each name is an input of exactly one conversion. The checkpoint has the weights that
    ``save_pretrained`` writes, with the names of the files from which the model was loaded.
    """
    from transformers import core_model_loading as loading

    transforms = _get_transforms(model)
    if not transforms:
        return [WeightConversion(name, None, {name: None}) for name in names]
    if to_checkpoint:
        transforms = [transform.reverse_transform() for transform in reversed(transforms)]
    renamings = [entry for entry in transforms if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, loading.WeightConverter)]
    converter_by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    model_weights = {} if to_checkpoint else drop_lora(model.state_dict())
    base_model_prefix = None if to_checkpoint else model.base_model_prefix
    conversions: dict[str, WeightConversion] = {}
    # Experts are stacked in this order, and some transforms of transformers rely on it.
    for name in sorted(names, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(
            name, renamings, converters, base_model_prefix, model_weights, reverse=to_checkpoint
        )
        if target not in model_weights and name in model_weights:
            target, pattern = name, None
        converter = None if pattern is None else converter_by_pattern[pattern]
        conversion = conversions.setdefault(target, WeightConversion(target, converter))
        conversion.patterns[name] = pattern
    return list(conversions.values())


def convert_to_checkpoint(
    model: "PreTrainedModel", weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the weights of the checkpoint for all ``weights`` of ``model``."""
    converted_weights: dict[str, torch.Tensor] = {}
    for conversion in plan_conversions(model, weights.keys(), to_checkpoint=True):
        converted_weights |= conversion.convert(model, weights)
    return converted_weights


def describe_transforms(model: "PreTrainedModel") -> list[str]:
    """Return a description of each weight transform with which ``model`` was loaded."""
    return [_describe(transform) for transform in _get_transforms(model)]


def set_transforms(model: "PreTrainedModel", descriptions: Collection[str]) -> None:
    """Give ``model``, built without weight files, the weight transforms with ``descriptions``.

    They convert the names and tensors of a checkpoint to those of the modules, and back.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    all_transforms = get_model_conversion_mapping(model)
    used_transforms = [entry for entry in all_transforms if _describe(entry) in descriptions]
    model._weight_conversions = used_transforms  # pyright: ignore[reportArgumentType]


def _get_transforms(model: "PreTrainedModel") -> "list[WeightTransform]":
    """Return the transforms with which ``model`` was loaded, or those of its architecture."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    transforms = getattr(model, "_weight_conversions", None)
    if transforms is not None:
        return transforms
    # Omit PrefixChange, as ``save_pretrained`` does: without files it is unknown if it is used.
    defaults = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in defaults if not isinstance(transform, PrefixChange)]


def _describe(transform: "WeightTransform") -> str:
    return f"{transform.scope_prefix} {transform!r}"
