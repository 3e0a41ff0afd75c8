"""Collective operations on numbers, texts and models. With one rank they return their input.

Only tensors are sent, because object collectives of torch unpickle data from sockets.
"""

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

# Timeout of every collective operation. It is long, because other ranks wait while a rank loads a
# model or writes a checkpoint. The controller detects a dead rank much earlier.
TIMEOUT = timedelta(minutes=30)


def resolve_device(device: str) -> str:
    """Return ``cpu`` or ``cuda``; ``auto`` selects CUDA if it is available.

    Raises ``RuntimeError`` for ``cuda`` if PyTorch sees no CUDA device.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "device=cuda, but PyTorch sees no CUDA device; set trainer.device=cpu or auto"
        )
    return device


def get_backend(device: str) -> str:
    """Return the backend of torch.distributed for tensors on ``device`` and in host memory."""
    return "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"


def init_distributed(device: str) -> None:
    """Join the process group of ``MASTER_ADDR``, ``RANK`` and ``WORLD_SIZE``.

    A single rank gets a group that opens no network port. Does nothing if a group exists.
    """
    if dist.is_initialized():
        return
    backend = get_backend(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        # A store in memory opens no port, so a port in use cannot cause an error.
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  documented as public
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=TIMEOUT)


def make_mesh(device: str, fsdp_size: int = -1) -> DeviceMesh:
    """Create a device mesh over all ranks.

    Its dimensions are (shard,), or (replicate, shard) if ``fsdp_size`` is below the world size.
    Raises ``ValueError`` if the world size is not a multiple of ``fsdp_size``.
    """
    num_ranks = dist.get_world_size()
    if fsdp_size in (-1, 0) or fsdp_size >= num_ranks:
        return init_device_mesh(device, (num_ranks,), mesh_dim_names=("shard",))
    if num_ranks % fsdp_size:
        raise ValueError(
            f"fsdp_size={fsdp_size} does not divide the {num_ranks} ranks; allowed: -1 and the "
            f"divisors of {num_ranks}"
        )
    return init_device_mesh(
        device, (num_ranks // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard")
    )


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def _get_collective_device() -> str:
    """Return the device that tensors must be on for collectives of the default group."""
    return "cpu" if "gloo" in dist.get_backend_config() else "cuda"


def _all_reduce(values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
    if world_size() == 1 or not values:
        return [float(v) for v in values]
    # float64 represents every count below 2**53 exactly.
    tensor = torch.tensor(
        [float(v) for v in values], dtype=torch.float64, device=_get_collective_device()
    )
    dist.all_reduce(tensor, operation)
    return tensor.tolist()


def sum_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the element-wise sum over ranks, in float64."""
    return _all_reduce(values, dist.ReduceOp.SUM)


def max_over_ranks(values: Sequence[float]) -> list[float]:
    """Return the element-wise maximum over ranks."""
    return _all_reduce(values, dist.ReduceOp.MAX)


def broadcast_text(text: str) -> str:
    """Return the ``text`` of rank 0 on every rank. The argument of other ranks is ignored."""
    if world_size() == 1:
        return text
    device = _get_collective_device()
    encoded_text = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    num_bytes = torch.tensor([len(encoded_text)], device=device)
    dist.broadcast(num_bytes, src=0)
    if get_rank() > 0:
        encoded_text = torch.zeros(int(num_bytes), dtype=torch.uint8, device=device)
    dist.broadcast(encoded_text, src=0)
    return bytes(encoded_text.tolist()).decode()


def gather_texts(text: str) -> list[str]:
    """Return the ``text`` of every rank, in the order of the ranks. It must contain no NUL."""
    encoded_text = torch.tensor([*text.encode(), 0], dtype=torch.uint8)
    return bytes(gather_vectors(encoded_text).tolist()).decode().split("\0")[:-1]


def share_random_state() -> None:
    """Copy the state of the CPU random generator from rank 0 to every rank."""
    if world_size() == 1:
        return
    random_state = torch.get_rng_state().to(_get_collective_device())
    dist.broadcast(random_state, src=0)
    torch.set_rng_state(random_state.cpu())


def gather_vectors(values: torch.Tensor) -> torch.Tensor:
    """Concatenate the vectors [n_r] of all ranks. Lengths may differ, dtypes must be equal."""
    if world_size() == 1:
        return values
    device = _get_collective_device()
    lengths = torch.zeros(world_size(), dtype=torch.int64, device=device)
    lengths[get_rank()] = len(values)
    dist.all_reduce(lengths)
    # all_gather needs equal shapes, so vectors are padded before it and cut after it.
    padded_vector = torch.zeros(int(lengths.max()), dtype=values.dtype, device=device)
    padded_vector[: len(values)] = values.to(padded_vector)
    gathered_vectors = [torch.zeros_like(padded_vector) for _ in range(world_size())]
    dist.all_gather(gathered_vectors, padded_vector)
    vectors_and_lengths = zip(gathered_vectors, lengths.tolist(), strict=True)
    return torch.cat([vector[:length] for vector, length in vectors_and_lengths]).cpu()


# ---- weights that only rank 0 has read, sent layer by layer --------------------------------------
#
#     rank 0   files ──▶ whole model on the CPU ──┐ a layer
#                                                 ├─broadcast──▶ device ──▶ shard, free the layer
#     others   model on ``meta``, no memory ──────┘ a layer
#
# Only the host of rank 0 holds a full copy of the model. A device holds its shards and one full
# layer.


def check_same_model(module: nn.Module) -> None:
    """Raise ``RuntimeError`` on a rank whose model has other tensors than that of rank 0."""
    if world_size() == 1:
        return
    tensors = _describe_tensors(module)
    rank_zero_tensors = json.loads(broadcast_text(json.dumps(tensors)))
    if tensors != rank_zero_tensors:
        differing_tensors = [entry for entry in tensors if entry not in rank_zero_tensors]
        differing_tensors += [entry for entry in rank_zero_tensors if entry not in tensors]
        raise RuntimeError(
            f"the model of this rank differs from that of rank 0: {differing_tensors[:4]} are only "
            "in one of them; fix: use the same model directory and the same packages on every node"
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


def broadcast_module(submodule: nn.Module, device: str) -> None:
    """Replace the unsharded tensors of ``submodule`` by copies of rank 0's values on ``device``.

    This is a collective call. Tied weights stay tied. With one rank nothing changes.
    """
    if world_size() == 1:
        return
    copy_of_tensor: dict[torch.Tensor, torch.Tensor] = {}
    tensor_tables: list[dict[str, Any]] = []
    for module in submodule.modules():
        tensor_tables += [module._parameters, module._buffers]
    for tensor_table in tensor_tables:
        for name, tensor in tensor_table.items():
            if tensor is None or isinstance(tensor, DTensor):
                continue
            if tensor not in copy_of_tensor:
                copy_of_tensor[tensor] = _broadcast_tensor(tensor, device)
            tensor_table[name] = copy_of_tensor[tensor]


def _broadcast_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if tensor.is_meta:
        received_tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        received_tensor = tensor.detach().to(device).contiguous()
    dist.broadcast(received_tensor, src=0)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(received_tensor, requires_grad=tensor.requires_grad)
    return received_tensor
