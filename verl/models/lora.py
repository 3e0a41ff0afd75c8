"""LoRA through peft: adapters are injected into the model in place, and merged on export."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from verl.config.adapter_files import AdapterSettings

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

ADAPTER_NAME = "default"
# Parts of tensor names that peft adds. A name that still contains one of them after ``merge_lora``
# belongs to a tensor that was not merged.
ADAPTER_NAME_PARTS = (".lora_", ".modules_to_save.", ".original_module.")
# Subclasses of ``nn.Linear`` with another ``forward`` that computes the same function.
_EQUIVALENT_LINEAR_CLASSES = ("FalconLinear",)
# Linear layers, by class of the parent module. The parent can read their weight without calling the
# layer, as fused Mamba kernels do. Then the trainer ignores an adapter that the engine applies.
_UNCALLED_LAYERS = {
    "MambaMixer": ("x_proj", "dt_proj", "out_proj"),
    "FalconMambaMixer": ("x_proj", "dt_proj", "out_proj"),
    "JambaMambaMixer": ("dt_proj",),
    "Mamba2Mixer": ("out_proj",),
    "NemotronHMamba2Mixer": ("out_proj",),
    "BambaMixer": ("out_proj",),
    "GraniteMoeHybridMambaLayer": ("out_proj",),
    "Zamba2MambaMixer": ("out_proj",),
    "FalconH1Mixer": ("out_proj",),
    "LongcatFlashTopkRouter": ("classifier",),
}
_LORA_CONFIG_ATTRIBUTE = "_verl_adapter_config"


class UnsupportedTargetsError(ValueError):
    """Error for LoRA target modules that cannot be adapted.

    ``unknown_target`` is the target name that matches no module. It is None for other problems.
    """

    def __init__(self, why: str, unknown_target: object = None) -> None:
        super().__init__(why)
        self.unknown_target = unknown_target


def add_lora(
    model: "PreTrainedModel",
    *,
    rank: int,
    alpha: float,
    target_modules: str | Sequence[str] = "all-linear",
) -> "PreTrainedModel":
    """Freeze ``model`` and inject trainable adapters of ``rank`` with scale ``alpha / rank``.

    The model is changed in place and returned. ``target_modules`` is ``all-linear`` (every linear
    layer that can be adapted, except the output head), a name or a list of names. Raises
    ``UnsupportedTargetsError`` for names that match no module, for modules that cannot be adapted,
    and if peft adapts other modules than these.
    """
    from peft import LoraConfig

    for problem in target_problems(model, target_modules):
        raise problem
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    # No dropout, because it would change the log-probs of a row from one forward pass to the next.
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # pyright: ignore[reportArgumentType]  peft computes with fractions too
        # peft adapts each module whose name ends in one of these names.
        target_modules=expand_target_modules(model, target_modules),
        lora_dropout=0.0,
        bias="none",
    )
    target_names = find_target_module_names(model, target_modules)
    inject_adapter(model, config, ADAPTER_NAME)
    differing_names = sorted(target_names ^ {*lora_scales(model)})
    if differing_names:
        raise UnsupportedTargetsError(
            f"peft adapts other modules of {model.config.model_type} than the "
            f"{len(target_names)} targets; the first difference is {differing_names[0]}"
        )
    # peft stores its configs on a wrapper module, which is not used here.
    setattr(model, _LORA_CONFIG_ATTRIBUTE, config)
    return model


def inject_adapter(model: nn.Module, config: Any, adapter_name: str) -> None:
    """Inject an adapter of the ``LoraConfig`` ``config`` into ``model``, in place.

    peft gets ``model`` in a plain container. If peft saw the config of a model with fused experts,
    it would replace the targets ``gate_proj``, ``up_proj`` and ``down_proj`` by the experts.
    """
    from peft import inject_adapter_in_model

    inject_adapter_in_model(config, nn.ModuleDict({"model": model}), adapter_name=adapter_name)


def target_problems(
    model: "PreTrainedModel", target_modules: object
) -> Iterator[UnsupportedTargetsError]:
    """Yield an error for each target that cannot be adapted.

    A target must match at least one module, and all matches must be linear layers whose weight is
    not tied to another module. Adapters of other modules can be neither merged nor sent.
    """
    model_family = model.config.model_type
    targets = expand_target_modules(model, target_modules)
    if not targets:
        yield UnsupportedTargetsError(f"the list of target modules of {model_family} is empty")
    modules = dict(model.named_modules())
    obstacles = _find_obstacles(model)
    for target in targets:
        matching_names = [name for name in modules if target and f".{name}".endswith(f".{target}")]
        if not matching_names:
            yield UnsupportedTargetsError(f"{model_family} has no module {target!r}", target)
        for name in matching_names:
            if name in obstacles:
                yield UnsupportedTargetsError(f"{name} of {model_family} {obstacles[name]}")
                break  # one error per target is enough


def _find_obstacles(model: "PreTrainedModel") -> dict[str, str]:
    """Return the reason for each module that cannot be adapted, by name."""
    modules = dict(model.named_modules())
    first_weight_names = {id(weight): name for name, weight in model.named_parameters()}
    obstacles: dict[str, str] = {}
    for name, module in modules.items():
        parent_name, _, last_name = name.rpartition(".")
        parent_class = type(modules[parent_name]).__name__
        if not _is_linear(module):
            class_name = type(module).__name__
            obstacles[name] = f"is a {class_name}: only adapters of linear layers can be merged"
        elif last_name in _UNCALLED_LAYERS.get(parent_class, ()):
            obstacles[name] = f"is not called: {parent_class} reads its weight, not its adapter"
        elif first_weight_names[id(module.weight)] != f"{name}.weight":
            tied_name = first_weight_names[id(module.weight)]
            obstacles[name] = (
                f"shares its weight with {tied_name}: only one of the two would be adapted"
            )
    return obstacles


def expand_target_modules(model: "PreTrainedModel", target_modules: object) -> list[Any]:
    """Return ``target_modules`` as a list, with the names that ``all-linear`` stands for."""
    if target_modules == "all-linear":
        return linear_names(model)
    if isinstance(target_modules, Sequence) and not isinstance(target_modules, str):
        return list(target_modules)
    return [target_modules]


def find_target_module_names(model: "PreTrainedModel", target_modules: object) -> set[str]:
    """Return the full names of the modules that match ``target_modules`` (see ``add_lora``)."""
    name_endings = tuple(f".{target}" for target in expand_target_modules(model, target_modules))
    return {name for name, _ in model.named_modules() if f".{name}".endswith(name_endings)}


def adapter_config(model: "PreTrainedModel") -> Any:
    """Return the peft config of the adapters that ``add_lora`` injected, None without adapters."""
    return getattr(model, _LORA_CONFIG_ATTRIBUTE, None)


def linear_names(model: "PreTrainedModel") -> list[str]:
    """Return the last part of the name (``q_proj``) of each linear layer but the output head.

    A name is omitted if a module of this name cannot be adapted.
    """
    output_head = model.get_output_embeddings()
    obstacles = _find_obstacles(model)
    names_by_eligibility: dict[bool, set[str]] = {True: set(), False: set()}
    for name, module in model.named_modules():
        names_by_eligibility[name not in obstacles and module is not output_head].add(
            name.rpartition(".")[2]
        )
    return sorted(names_by_eligibility[True] - names_by_eligibility[False])


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return True if ``module`` computes ``W x + b``. Some subclasses of ``nn.Linear`` do not."""
    return isinstance(module, nn.Linear) and (
        type(module).forward is nn.Linear.forward
        or type(module).__name__ in _EQUIVALENT_LINEAR_CLASSES
    )


def lora_scales(model: nn.Module) -> dict[str, float]:
    """Return the scale ``alpha / rank`` of every adapted module by name; empty without LoRA."""
    scales: dict[str, float] = {}
    for name, module in model.named_modules():
        scaling = getattr(module, "scaling", None)  # peft stores the scales on the layer
        if hasattr(module, "lora_A") and isinstance(scaling, Mapping):
            scales[name] = float(scaling[ADAPTER_NAME])
    return scales


def get_adapter_settings(model: nn.Module) -> AdapterSettings | None:
    """Return rank, alpha and modules of the adapters of ``model``; None without adapters."""
    layers: dict[str, Any] = {
        name: module for name, module in model.named_modules() if hasattr(module, "lora_A")
    }
    if not layers:
        return None
    layer = next(iter(layers.values()))
    alpha = float(layer.lora_alpha[ADAPTER_NAME])
    return AdapterSettings(layer.r[ADAPTER_NAME], alpha, tuple(sorted(layers)))


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Let ``model`` compute without its adapters during the context: as the base model.

    The switch of peft is not used, because it also changes ``requires_grad``, which FSDP reads.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def get_adapted_module_name(name: str) -> str:
    """Return the name of the adapted module that a tensor belongs to.

    The name of a tensor outside of adapted modules is returned unchanged. Example:
    ``q_proj.lora_A.default.weight`` and ``q_proj.base_layer.weight`` both give ``q_proj``.
    """
    return re.split(r"\.base_layer\.|\.lora_", name, maxsplit=1)[0]


def get_merged_name(name: str) -> str:
    """Return the name of the weight, such as ``q_proj.weight``, that a tensor is merged into."""
    is_adapter = ".lora_" in name
    return f"{get_adapted_module_name(name)}.weight" if is_adapter else _remove_base_layer(name)


def _remove_base_layer(name: str) -> str:
    return name.replace(".base_layer.", ".")


def drop_lora(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights without LoRA adapters, under the names of a model without LoRA."""
    return {
        _remove_base_layer(name): tensor for name, tensor in state.items() if ".lora_" not in name
    }


def merge_lora(state: dict[str, torch.Tensor], scales: dict[str, float]) -> dict[str, torch.Tensor]:
    """Return the full state with adapters merged into their weights: ``W + scale * B @ A``.

    Names in the result are those of the model without adapters. Raises ``ValueError`` if an adapter
    or its weight is missing, and for tensors that cannot be merged.
    """
    merged_state: dict[str, torch.Tensor] = {}
    merged_adapter_names: set[str] = set()
    for name, tensor in state.items():
        module, _, parameter_name = name.rpartition(".base_layer.")
        if not module:
            merged_state[name] = tensor
            continue
        if parameter_name == "weight":
            adapter_names = [f"{module}.lora_{suffix}.{ADAPTER_NAME}.weight" for suffix in "AB"]
            if module not in scales or not state.keys() >= set(adapter_names):
                raise ValueError(f"{name}: the weight has an adapter, but its tensors are missing")
            # Merge in float32: the change by an adapter is often below the precision of bfloat16.
            # lora_a is [rank, in], lora_b is [out, rank].
            lora_a, lora_b = (state[adapter_name].float() for adapter_name in adapter_names)
            tensor = (tensor.float() + scales[module] * (lora_b @ lora_a)).to(tensor.dtype)
            merged_adapter_names.update(adapter_names)
        merged_state[f"{module}.{parameter_name}"] = tensor
    merged_state = {
        name: tensor for name, tensor in merged_state.items() if name not in merged_adapter_names
    }
    unmerged_names = [
        name for name in merged_state if any(part in name for part in ADAPTER_NAME_PARTS)
    ]
    if unmerged_names:
        raise ValueError(
            f"{len(unmerged_names)} adapter tensors have no matching weight or cannot be merged; "
            f"the first is {unmerged_names[0]}"
        )
    return merged_state
