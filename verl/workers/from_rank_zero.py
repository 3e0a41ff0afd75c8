"""Weights that rank 0 alone has read, on every rank, part by part.

    rank 0   files ──▶ whole model on the CPU ──┐ a block
                                                ├─broadcast──▶ device ──▶ shard, forget the block
    others   model on ``meta``, no memory ──────┘ a block

All hosts together hold one copy of the model while it is placed, a device one block of it besides
its shards.
"""

import json
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from verl.workers.collectives import broadcast_text, world_size


def check_same_model(module: nn.Module) -> None:
    """Raise ``RuntimeError`` on a rank whose model has other tensors than that of rank 0.

    What is broadcast afterwards has no names: it goes by the order of the tensors.
    """
    if world_size() == 1:
        return
    own = _described(module)
    first = json.loads(broadcast_text(json.dumps(own)))
    if own != first:
        odd = [entry for entry in (*own, *first) if entry not in own or entry not in first]
        raise RuntimeError(
            f"this rank builds another model than rank 0, which reads its files: {odd[:4]} are on "
            "one side only; fix: the same model directory and the same packages on every node"
        )


def _described(module: nn.Module) -> list[list[object]]:
    tensors = chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    number: dict[torch.Tensor, int] = {}
    # Numbered, because two names that are tied on one rank have to be tied on all.
    return [
        [name, list(tensor.shape), str(tensor.dtype), number.setdefault(tensor, len(number))]
        for name, tensor in tensors
    ]


def take_from_rank_zero(part: nn.Module, device: str) -> None:
    """Give those tensors of ``part`` that are not sharded yet the values that they have on rank 0,
    on ``device``; a collective call. Tied weights stay tied. One rank keeps what it has.
    """
    if world_size() == 1:
        return
    taken: dict[torch.Tensor, torch.Tensor] = {}
    for module in part.modules():
        _replace(module._parameters, taken, device)
        _replace(module._buffers, taken, device)


def _replace(held: dict[str, Any], taken: dict[torch.Tensor, torch.Tensor], device: str) -> None:
    for name, tensor in held.items():
        if tensor is None or isinstance(tensor, DTensor):
            continue
        if tensor not in taken:
            taken[tensor] = _received(tensor, device)
        held[name] = taken[tensor]


def _received(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if tensor.is_meta:
        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        there = tensor.detach().to(device).contiguous()
    dist.broadcast(there, src=0)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(there, requires_grad=tensor.requires_grad)
    return there
