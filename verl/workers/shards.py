"""Write and read sharded tensors by torch.distributed.checkpoint (DCP), as safetensors files.

    rank 0 ──▶ shard-00001-model-0000<kind>-of-00004.safetensors ┐  every file holds the offsets of
    rank 1 ──▶ shard-00002-model-0000<kind>-of-00004.safetensors ┘  its parts in the full tensors

    any rank ◀── the parts of these files that overlap with its shards

A tensor name may end in ``|<kind>``. Each kind has a separate file per rank, because writing a file
needs memory for a second copy of its tensors.

Ranks do not communicate while they write or read. DCP could exchange plans between ranks, but it
would send pickled plans through sockets. The writing thread would also use the process group while
an update uses it. Two rules replace this exchange. The first rank with a replica of a shard writes
it. A reader checks that the parts of a tensor are complete.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from verl.workers.collectives import get_rank

# DCP warns at every call with no_dist=True, which is intended here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


class ShardWriter(HuggingFaceStorageWriter):
    """DCP writer of the shards of this rank, with one file per kind of tensor.

    ``names`` are the tensor names of all ranks. The kind is the part of a name after ``|``.
    """

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        kind_of_tensor = {name: name.partition("|")[2] for name in names}
        kinds = sorted(set(kind_of_tensor.values()))
        file_numbers = {
            name: 1 + kinds.index(tensor_kind) for name, tensor_kind in kind_of_tensor.items()
        }
        super().__init__(str(directory), file_numbers, save_distributed=True)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Complete the write plan of this rank, with the rank in its file names.

        DCP numbers the files by the position of a plan in the list. So one empty plan for each
        lower rank is inserted before it.
        """
        empty_plans = [SavePlan([])] * get_rank()
        return super().prepare_global_plan([*empty_plans, *plans])[get_rank() :]

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the tensors to host memory, so that training does not change them."""
        self.per_thread_copy_ahead = 0  # all tensors are in host memory already
        return {name: tensor.to("cpu", copy=True) for name, tensor in state_dict.items()}


def begin_writing(state: Mapping[str, torch.Tensor], directory: Path) -> Future[Any]:
    """Copy this rank's part of ``state`` and write it to ``directory`` in a thread.

    The copy is complete when this function returns. The future is done when the files are on disk.
    If writing fails, the future holds an exception (see ``unwrap_checkpoint_error``).
    """
    rank_tensors = {
        name: tensor.detach() for name, tensor in state.items() if _is_written_by_this_rank(tensor)
    }
    write_future = async_save(
        rank_tensors, storage_writer=ShardWriter(directory, state), no_dist=True
    )
    assert isinstance(write_future, Future)  # DCP returns other types for asynchronous copies only
    return write_future


def list_written_shards(directory: Path) -> list[Path]:
    """List the shard files of this rank in ``directory``. The list may be empty."""
    return list(directory.glob(f"shard-{get_rank() + 1:05}-*.safetensors"))


def _is_written_by_this_rank(tensor: torch.Tensor) -> bool:
    """Return True if this rank must write its part of ``tensor``.

    This is the case if the part is not empty and this rank is the first one with a replica of it.
    """
    if not isinstance(tensor, DTensor):
        return get_rank() == 0
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None  # every rank is part of the mesh
    mesh_dimensions = zip(coordinate, tensor.placements, strict=True)
    replica_number = sum(
        coordinate_index
        for coordinate_index, placement in mesh_dimensions
        if placement.is_replicate()
    )
    return replica_number == 0 and tensor.to_local().numel() > 0


def read_tensor_metadata(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Read the size and the stored chunks of every tensor in the safetensors files."""
    metadata = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {
        name: entry for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)
    }


def fill_from_shards(state: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Fill the tensors of ``state``, sharded or not, from the files in ``directory``.

    Raises ``ValueError`` for a tensor that is missing, has another shape, or lacks a shard.
    """
    metadata = read_tensor_metadata(directory)
    for name in state.keys() & metadata.keys():
        size = metadata[name].size
        num_stored_values = sum(math.prod(chunk.sizes) for chunk in metadata[name].chunks)
        # DCP computes the size from the stored parts. If the last part is missing, the size is
        # smaller.
        if size != state[name].shape or num_stored_values != state[name].numel():
            raise ValueError(
                f"{directory}: it holds {num_stored_values} values of '{name}' with shape "
                f"{list(size)}, but the model has shape {list(state[name].shape)}: "
                "the checkpoint is of another model, or files of some ranks are missing"
            )
    try:
        load(dict(state), storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    except CheckpointException as error:
        raise ValueError(f"{directory}: {unwrap_checkpoint_error(error)}") from error


def unwrap_checkpoint_error(error: BaseException) -> BaseException:
    """Return the original error from the ``CheckpointException`` that DCP wraps around it."""
    if not isinstance(error, CheckpointException):
        return error
    return next(iter(error.failures.values()))[0]
