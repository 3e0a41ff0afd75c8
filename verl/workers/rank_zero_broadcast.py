"""Broadcast the weights that only rank 0 has read to every rank, layer by layer.

    rank 0   files ──▶ whole model on the CPU ──┐ a layer
                                                ├─broadcast──▶ device ──▶ shard, free the layer
    others   model on ``meta``, no memory ──────┘ a layer

Only the host of rank 0 holds a full copy of the model. A device holds its shards and one full
layer.
"""

import json
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from verl.models.forward_kind import decode_forward_kind, encode_forward_kind
from verl.models.policy import PackedModel
from verl.workers.collectives import broadcast_text, world_size


def check_same_model(module: nn.Module) -> None:
    """Raise ``RuntimeError`` on a rank whose model has other tensors than that of rank 0.

    Names, shapes, dtypes and ties must be equal: the broadcast identifies tensors by their order.
    """
    if world_size() == 1:
        return
    local_tensors = _describe_tensors(module)
    rank_zero_tensors = json.loads(broadcast_text(json.dumps(local_tensors)))
    if local_tensors != rank_zero_tensors:
        differing_tensors = [
            description for description in local_tensors if description not in rank_zero_tensors
        ]
        differing_tensors += [
            description for description in rank_zero_tensors if description not in local_tensors
        ]
        raise RuntimeError(
            f"the model of this rank differs from that of rank 0: {differing_tensors[:4]} are only "
            "in one of them; fix: use the same model directory and the same packages on every node"
        )


def adopt_rank_zero_forward_kind(module: PackedModel) -> None:
    """Give ``module`` the kind of forward pass (packed or row-wise) of rank 0. A collective call.

    Only rank 0 can choose it, because the choice compares log-probs and only rank 0 has weights.
    """
    if world_size() > 1:
        module.forward_kind = decode_forward_kind(
            broadcast_text(encode_forward_kind(module.forward_kind))
        )


def _describe_tensors(module: nn.Module) -> list[list[object]]:
    tensors = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    tensor_numbers: dict[torch.Tensor, int] = {}
    # Each tensor gets a number, so tied names (names of one tensor) have the same number. Ranks
    # compare the numbers, because a tied tensor is broadcast once. With other ties, a rank would
    # receive the following tensors under wrong names.
    return [
        [
            name,
            list(tensor.shape),
            str(tensor.dtype),
            tensor_numbers.setdefault(tensor, len(tensor_numbers)),
        ]
        for name, tensor in tensors
    ]


def broadcast_from_rank_zero(submodule: nn.Module, device: str) -> None:
    """Replace the unsharded tensors of ``submodule`` by copies of rank 0's values on ``device``.

    This is a collective call. Tied weights stay tied. With one rank nothing changes.
    """
    if world_size() == 1:
        return
    copies: dict[torch.Tensor, torch.Tensor] = {}
    tensor_tables: list[dict[str, Any]] = []
    for module in submodule.modules():
        tensor_tables += [module._parameters, module._buffers]
    for tensor_table in tensor_tables:
        for name, tensor in tensor_table.items():
            if tensor is None or isinstance(tensor, DTensor):
                continue
            if tensor not in copies:
                copies[tensor] = _broadcast_tensor(tensor, device)
            tensor_table[name] = copies[tensor]


def _broadcast_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if tensor.is_meta:
        received_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        received_tensor = tensor.detach().to(device).contiguous()
    dist.broadcast(received_tensor, src=0)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(received_tensor, requires_grad=tensor.requires_grad)
    return received_tensor
