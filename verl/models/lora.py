"""LoRA through peft: adapters are injected into the model itself, and merged again on export."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel

ADAPTER = "default"
# What peft adds to a module and is no plain adapter; nothing here can merge it.
UNMERGED = (".lora_", ".modules_to_save.", ".original_module.")
_CONFIG = "_verl_adapter_config"


class UnsupportedTargets(ValueError):
    """Modules that LoRA cannot adapt here; ``unknown`` is the name that no module has, if any."""

    def __init__(self, why: str, unknown: object = None) -> None:
        super().__init__(why)
        self.unknown = unknown


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
    of names. Raises ``ModuleNotFoundError`` without peft, ``UnsupportedTargets`` for names that no
    module has, and for modules whose adapters cannot be merged.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("lora_rank > 0 needs peft (pip install peft)") from missing
    targets = check_targets(model, target_modules)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
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


def check_targets(model: "PreTrainedModel", target_modules: object) -> list[Any]:
    """The names of the modules to adapt, as peft reads them: a module has a name if its own ends
    with it.

    Raises ``UnsupportedTargets`` for the first of ``target_problems``.
    """
    for problem in target_problems(model, target_modules):
        raise problem
    return _targets(model, target_modules)


def target_problems(
    model: "PreTrainedModel", target_modules: object
) -> Iterator[UnsupportedTargets]:
    """Names that no module has, and modules that are no linear layer with a weight of its own: only
    the adapters of such layers can be merged and sent.
    """
    kind = model.config.model_type
    targets = _targets(model, target_modules)
    if not targets:
        yield UnsupportedTargets(f"no module of {kind} is named")
    modules = dict(model.named_modules())
    first = {id(weight): name for name, weight in model.named_parameters()}
    for target in targets:
        matches = [name for name in modules if target and f".{name}".endswith(f".{target}")]
        if not matches:
            yield UnsupportedTargets(f"{kind} has no module {target!r}", target)
        for name in matches:
            module = modules[name]
            if not isinstance(module, nn.Linear):
                what = (
                    f"is a {type(module).__name__}: adapters of linear layers alone can be merged"
                )
            elif first[id(module.weight)] != f"{name}.weight":
                tied = first[id(module.weight)]
                what = f"has no weight of its own, which is {tied}: one use alone would be adapted"
            else:
                continue
            yield UnsupportedTargets(f"{name} of {kind} {what}")
            break  # of all layers, one


def _targets(model: "PreTrainedModel", target_modules: object) -> list[Any]:
    if target_modules == "all-linear":
        return linear_names(model)
    if isinstance(target_modules, Sequence) and not isinstance(target_modules, str):
        return list(target_modules)
    return [target_modules]


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

    Raises ``ValueError`` for an adapter without the weight it adapts, or of another kind: without
    it the merged weights would be those of another policy.
    """
    merged: dict[str, torch.Tensor] = {}
    folded: set[str] = set()
    for name, tensor in state.items():
        module, _, leaf = name.rpartition(".base_layer.")
        if not module:
            merged[name] = tensor
            continue
        if leaf == "weight":
            names = [f"{module}.lora_{part}.{ADAPTER}.weight" for part in "AB"]
            if module not in scales or not state.keys() >= set(names):
                raise ValueError(f"{name}: the weight is adapted, and its adapter is missing")
            # In float32: an adapter's update is often smaller than what bfloat16 rounds away.
            low, high = (state[part].float() for part in names)  # [rank, in], [out, rank]
            tensor = (tensor.float() + scales[module] * (high @ low)).to(tensor.dtype)
            folded.update(names)
        merged[f"{module}.{leaf}"] = tensor
    merged = {name: tensor for name, tensor in merged.items() if name not in folded}
    left = [name for name in merged if any(mark in name for mark in UNMERGED)]
    if left:
        raise ValueError(
            f"{len(left)} tensors of adapters have no weight that they adapt, or are of a kind "
            f"that cannot be merged; the first is {left[0]}"
        )
    return merged
