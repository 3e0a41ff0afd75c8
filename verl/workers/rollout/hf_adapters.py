"""LoRA adapters of the engine ``hf``: layers of peft, with one adapter per row of a batch."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from verl.models.adapters import AdapterShape
from verl.names import BASE_MODEL
from verl.workers.rollout.base import EngineError

NO_ADAPTER = "__base__"  # peft's name for rows without an adapter
MAX_SHOWN_NAMES = 3  # largest number of tensor names in an error message


class HFAdapters:
    """Adapters with ``shapes`` (by name) in ``model``, which is changed in place.

    Initially they change nothing. Raises ``ValueError`` for modules that cannot be adapted.
    """

    def __init__(self, model: nn.Module, shapes: Mapping[str, AdapterShape]) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        self.names = tuple(shapes)
        self._model = model
        self._mixed_names: list[str] | None = None  # names by row, if rows have different adapters
        self._active_names: list[str] | None = None
        for name, shape in shapes.items():
            config = LoraConfig(
                r=shape.rank,
                lora_alpha=shape.rank,  # the scale is a factor of B
                target_modules=list(shape.targets),
                lora_dropout=0.0,
                bias="none",
            )
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Already found a `peft_config`")
                inject_adapter_in_model(config, model, adapter_name=name)
        self._layers: list[Any] = [
            module for module in model.modules() if hasattr(module, "lora_A")
        ]
        for layer in self._layers:
            layer.register_forward_pre_hook(self._pass_names, with_kwargs=True)

    def _pass_names(
        self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._mixed_names is None:
            return None
        return args, kwargs | {"adapter_names": self._mixed_names}

    def select(self, models: Sequence[str]) -> None:
        """Let row b of the next batch use the adapter ``models[b]``; ``base`` means none."""
        names = [NO_ADAPTER if name == BASE_MODEL else name for name in models]
        self._mixed_names = names if len(set(names)) > 1 else None
        active_names = [name for name in names[:1] if name != NO_ADAPTER]
        # Layers without rows in their inputs (experts) work only with one adapter for all rows.
        if self._mixed_names is None and active_names != self._active_names:
            for layer in self._layers:
                layer.set_adapter(active_names, inference_mode=True)
            self._active_names = active_names

    def replace(self, name: str, adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy ``adapter`` into the adapter ``name`` of the engine, and return its tensors.

        Raises ``EngineError`` if the names of the tensors differ.
        """
        part = f".{name}."
        tensors = {
            tensor_name.replace(part, "."): tensor
            for tensor_name, tensor in self._model.named_parameters()
            if ".lora_" in tensor_name and part in tensor_name
        }
        differing_names = sorted(tensors.keys() ^ adapter.keys())
        if differing_names or not tensors:
            raise EngineError(
                f"adapter {name!r} does not fit the engine: {len(differing_names)} tensors are "
                f"only in one of them: {', '.join(differing_names[:MAX_SHOWN_NAMES])}"
            )
        with torch.no_grad():
            for tensor_name, value in adapter.items():
                tensors[tensor_name].copy_(value)
        return tensors
