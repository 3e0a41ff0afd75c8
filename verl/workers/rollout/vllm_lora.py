"""LoRA adapters in vLLM: start arguments, and adapters that are loaded from memory and verified.

vLLM reads adapters from directories only. ``load_adapter`` gives tensors to its adapter manager in
the worker process of each device. A request names an adapter by a ``LoRARequest``, whose id is then
already known, so that the path in it is never read.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch
from vllm.config.lora import MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from verl.models.adapters import PEFT_PREFIX, AdapterShape
from verl.workers.rollout.weight_receipt import verify_adapter

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.v1.worker.worker_base import WorkerBase


def add_lora_arguments(
    arguments: Mapping[str, Any], shapes: Mapping[str, AdapterShape]
) -> dict[str, Any]:
    """Return ``arguments`` of ``EngineArgs`` with those for adapters of ``shapes``.

    There is one slot more than adapters: where vLLM reads the last slot for requests without an
    adapter, that slot must be empty. Raises ``ValueError`` if ``arguments`` set too few slots.
    """
    slots = arguments.get("max_loras", len(shapes) + 1)
    if slots <= len(shapes):
        raise ValueError(
            f"actor_rollout_ref.rollout.engine_kwargs.max_loras={slots}: requests without an "
            f"adapter would get the last of {len(shapes)} adapters; allowed: {len(shapes) + 1} or "
            "more; fix: remove the key"
        )
    rank = max(shape.rank for shape in shapes.values())
    targets = {target.rpartition(".")[2] for shape in shapes.values() for target in shape.targets}
    return {
        "enable_lora": True,
        "max_loras": len(shapes) + 1,
        "max_lora_rank": min(allowed for allowed in get_args(MaxLoRARanks) if allowed >= rank),
        "lora_target_modules": sorted(targets),
    } | dict(arguments)


def create_requests(shapes: Mapping[str, AdapterShape]) -> dict[str, LoRARequest]:
    """Return the ``LoRARequest`` of each adapter, by name."""
    return {
        name: LoRARequest(name, adapter_id, lora_path=f"memory:{name}")
        for adapter_id, name in enumerate(shapes, start=1)
    }


def load_adapter(
    worker: "WorkerBase", adapter_id: int, adapter: Mapping[str, torch.Tensor]
) -> None:
    """Replace the adapter ``adapter_id`` in the process of ``worker``, and verify it.

    Called by vLLM's ``collective_rpc``. Raises ``EngineError`` if the layers of this device do not
    hold ``adapter`` afterwards.
    """
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    lora_manager = worker.model_runner.lora_manager  # pyright: ignore[reportAttributeAccessIssue]
    manager: LoRAModelManager = lora_manager._adapter_manager
    model: Any = manager.model
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    rank = max(tensor.shape[0] for name, tensor in adapter.items() if ".lora_A." in name)
    # alpha = r: the scale is a factor of the tensors.
    options = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    tensors = {f"{PEFT_PREFIX}{name}": tensor for name, tensor in adapter.items()}
    lora_model = LoRAModel.from_lora_tensors(
        adapter_id, tensors, options, device="cpu", weights_mapper=mapper
    )
    manager.remove_adapter(adapter_id)
    manager.add_adapter(lora_model)
    manager.activate_adapter(adapter_id)
    engine_names = {
        name: parse_fine_tuned_lora_name(f"{PEFT_PREFIX}{name}", mapper)[0] for name in adapter
    }
    held = read_slot(manager, adapter_id, adapter, engine_names)
    device_index, num_devices = (
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
    )
    verify_adapter(adapter, held, device_index, num_devices)


def read_slot(
    manager: "LoRAModelManager",
    adapter_id: int,
    adapter: Mapping[str, torch.Tensor],
    engine_names: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    """Return the tensors that the layers apply for ``adapter_id``, cut to the sizes of ``adapter``.

    ``engine_names`` maps tensor names to the module names of vLLM. Tensors of modules that vLLM
    does not adapt are missing, and so are those that it splits in a way that is not known here.
    """
    slot = manager.lora_index_to_id.index(adapter_id)
    # Name of a module -> its layer, its number among the modules that the layer fuses, their count.
    places: dict[str, tuple[Any, int, int]] = {}
    for layer_name, layer in manager.modules.items():
        parts = manager.packed_modules.get(layer_name, [layer_name])
        places |= {part: (layer, number, len(parts)) for number, part in enumerate(parts)}
    held: dict[str, torch.Tensor] = {}
    for name, tensor in adapter.items():
        if engine_names[name] not in places:
            continue
        layer, number, count = places[engine_names[name]]
        is_a = ".lora_A." in name
        stacked = layer.lora_a_stacked if is_a else layer.lora_b_stacked
        slices = [stacked] if isinstance(stacked, torch.Tensor) else list(stacked)
        if len(slices) == count:
            value = slices[number][slot, 0]
        elif count == 1:  # a fused module of the checkpoint: A is in every slice, B is split
            value = slices[0][slot, 0] if is_a else torch.cat([part[slot, 0] for part in slices])
        else:
            continue
        held[name] = value[: tensor.shape[0], : tensor.shape[1]]
    return held
