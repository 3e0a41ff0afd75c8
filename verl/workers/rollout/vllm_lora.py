"""LoRA adapters in vLLM: start arguments, and adapters that are loaded from memory and verified.

vLLM reads adapters from directories only. ``load_adapter`` gives tensors to its adapter manager in
the worker process of each device. A request names an adapter by a ``LoRARequest`` whose id is then
already known, so that the path in it is never read.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch
from vllm.config.lora import MaxLoRARanks
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

from verl.config.adapter_files import PEFT_PREFIX
from verl.config.schema.model import ModelConfig
from verl.models.adapters import get_lora_rank, list_adapter_shapes
from verl.models.loader import build_meta_model, read_config
from verl.workers.rollout.weight_receipt import verify_adapter

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.v1.worker.worker_base import WorkerBase


def make_lora_arguments(
    arguments: Mapping[str, Any], lora: ModelConfig
) -> tuple[dict[str, Any], dict[str, LoRARequest]]:
    """Add LoRA arguments to ``arguments``; also return the ``LoRARequest`` of each adapter by name.

    vLLM gets one adapter slot more than there are adapters. Some of its kernels read the last slot
    for requests without an adapter, so this slot must stay empty. Raises ``ValueError`` if
    ``arguments`` set too few slots.
    """
    config = read_config(arguments["model"], lora.trust_remote_code)
    shapes = list_adapter_shapes(lora, build_meta_model(config, lora.trust_remote_code))
    rank = max(shape.rank for shape in shapes.values())
    lora_arguments = {
        "enable_lora": True,
        "max_loras": len(shapes) + 1,
        "max_lora_rank": min(
            allowed_rank for allowed_rank in get_args(MaxLoRARanks) if allowed_rank >= rank
        ),
        "lora_target_modules": sorted(
            {name.rpartition(".")[2] for shape in shapes.values() for name in shape.targets}
        ),
    } | dict(arguments)
    if lora_arguments["max_loras"] <= len(shapes):
        raise ValueError(
            f"rollout.engine_kwargs.max_loras={lora_arguments['max_loras']}: requests without an "
            f"adapter would get the last of {len(shapes)} adapters; allowed: {len(shapes) + 1} or "
            "more; fix: remove the key"
        )
    numbered_names = enumerate(shapes, start=1)
    return lora_arguments, {name: LoRARequest(name, i, "memory") for i, name in numbered_names}


def load_adapter(
    worker: "WorkerBase", adapter_id: int, adapter: Mapping[str, torch.Tensor]
) -> dict[str, int]:
    """Replace the adapter ``adapter_id`` in the process of ``worker``; return its checksums.

    Called by vLLM's ``collective_rpc``. Raises ``EngineError`` if the layers do not hold it.
    """
    model_runner: Any = worker.model_runner
    manager: LoRAModelManager = model_runner.lora_manager._adapter_manager
    name_mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    name_mapper = None if name_mapper is None else name_mapper.get_rename_mapper()
    rank = get_lora_rank(adapter)
    # alpha = r gives LoRA scale 1, because the trainer sends B multiplied by its scale.
    peft_helper = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    peft_tensors = {f"{PEFT_PREFIX}{name}": tensor for name, tensor in adapter.items()}
    lora_model = LoRAModel.from_lora_tensors(
        adapter_id, peft_tensors, peft_helper, device="cpu", weights_mapper=name_mapper
    )
    manager.remove_adapter(adapter_id)
    manager.add_adapter(lora_model)
    manager.activate_adapter(adapter_id)
    module_of_tensor = {
        name: parse_fine_tuned_lora_name(f"{PEFT_PREFIX}{name}", name_mapper)[0] for name in adapter
    }
    held_tensors = read_adapter_slot(manager, adapter_id, adapter, module_of_tensor)
    device_index_and_count = (
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
    )
    return verify_adapter(adapter, held_tensors, *device_index_and_count)


def read_adapter_slot(
    manager: "LoRAModelManager",
    adapter_id: int,
    adapter: Mapping[str, torch.Tensor],
    module_of_tensor: Mapping[str, str],
) -> dict[str, torch.Tensor]:
    """Return the LoRA tensors that vLLM's layers apply for the adapter ``adapter_id``, by name.

    They are cut to the sizes of ``adapter``. ``module_of_tensor`` maps tensor names to the module
    names of vLLM. The result lacks tensors of modules that vLLM does not adapt, and of fused
    modules whose parts in vLLM differ from its own table of fused modules.
    """
    slot = manager.lora_index_to_id.index(adapter_id)
    held_tensors: dict[str, torch.Tensor] = {}
    for layer_name, layer in manager.modules.items():
        part_names = manager.packed_modules.get(layer_name, [layer_name])
        for name in (name for name, module in module_of_tensor.items() if module in part_names):
            is_lora_a = ".lora_A." in name
            stacked_matrices: Any = layer.lora_a_stacked if is_lora_a else layer.lora_b_stacked
            slice_matrices = (
                [stacked_matrices]
                if isinstance(stacked_matrices, torch.Tensor)
                else stacked_matrices
            )
            if len(slice_matrices) == len(part_names):
                matrix = slice_matrices[part_names.index(module_of_tensor[name])][slot, 0]
            elif len(part_names) == 1:  # fused module: A is the same in all slices, B is split
                matrix = (
                    slice_matrices[0][slot, 0]
                    if is_lora_a
                    else torch.cat([b[slot, 0] for b in slice_matrices])
                )
            else:
                continue
            held_tensors[name] = matrix[: adapter[name].shape[0], : adapter[name].shape[1]]
    return held_tensors
