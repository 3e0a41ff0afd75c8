"""LoRA adapters of the engine ``hf``: layers of peft, with one adapter per row of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from verl.models.adapters import AdapterShape
from verl.models.lora import inject_adapter
from verl.names import BASE_MODEL
from verl.workers.rollout.base import EngineError

NO_ADAPTER = "__base__"  # peft's name for rows without an adapter
# Prefix of the names in peft. Without it an adapter ``eval`` or ``values`` would replace a method
# of the ``ModuleDict`` with the adapters of a layer.
NAME_PREFIX = "adapter_"


class HFAdapters:
    """LoRA adapters of the given ``shapes``, which are added to ``model`` in place."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, AdapterShape]) -> None:
        from peft import LoraConfig

        self.names = tuple(shapes)
        self._model = model
        self._row_adapter_names: list[str] = []
        # Adapter of each token of the present pass, row by row.
        self._token_adapter_names: list[str] = []
        for name, shape in shapes.items():
            # alpha = r gives LoRA scale 1, because the trainer sends B multiplied by its scale.
            target_modules = list(shape.targets)
            config = LoraConfig(r=shape.rank, lora_alpha=shape.rank, target_modules=target_modules)
            inject_adapter(model, config, NAME_PREFIX + name)
        self._layers: list[Any] = [
            module for module in model.modules() if hasattr(module, "lora_A")
        ]
        model.register_forward_pre_hook(self._set_token_adapters, with_kwargs=True)
        for layer in self._layers:
            layer.register_forward_pre_hook(self._add_adapter_names, with_kwargs=True)

    def set_row_adapters(self, models: Sequence[str]) -> None:
        """Let row b of the next batch use the adapter ``models[b]``; ``base`` means none."""
        adapter_names = [
            NO_ADAPTER if name == BASE_MODEL else NAME_PREFIX + name for name in models
        ]
        # If all rows use one adapter, activate it in the layers. Layers of experts, which get only
        # some of the tokens, support only this case.
        if len(set(adapter_names)) == 1 and set(adapter_names) != set(self._row_adapter_names):
            for layer in self._layers:
                layer.set_adapter(
                    [n for n in adapter_names[:1] if n != NO_ADAPTER], inference_mode=True
                )
        self._row_adapter_names = adapter_names

    def _add_adapter_names(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        adapter_names = self._row_adapter_names
        if len(set(adapter_names)) == 1:
            return None
        # A shared expert gets the tokens of all rows in one dimension, row by row.
        if len(args[0]) == len(self._token_adapter_names):
            adapter_names = self._token_adapter_names
        return args, kwargs | {"adapter_names": adapter_names}

    def _set_token_adapters(
        self, _: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        row_length = kwargs["input_ids"].shape[1]
        self._token_adapter_names = [
            name for name in self._row_adapter_names for _ in range(row_length)
        ]

    def replace_adapter(
        self, name: str, adapter: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """Copy ``adapter`` into the model's adapter ``name``, and return the model's tensors."""
        # End of tensor names such as q_proj.lora_A.adapter_judge.weight.
        name_suffix = f".{NAME_PREFIX}{name}.weight"
        model_tensors = {
            f"{tensor_name.removesuffix(name_suffix)}.weight": tensor
            for tensor_name, tensor in self._model.named_parameters()
            if tensor_name.endswith((f".lora_A{name_suffix}", f".lora_B{name_suffix}"))
        }
        differing_names = sorted(model_tensors.keys() ^ adapter.keys())
        if differing_names or not model_tensors:
            raise EngineError(f"adapter {name!r} does not fit the engine: {differing_names[:3]}")
        with torch.no_grad():
            for tensor_name, value in adapter.items():
                model_tensors[tensor_name].copy_(value)
        return model_tensors
