"""Tensors of all ranks in one directory: torch.distributed.checkpoint (DCP), in safetensors.

    rank 0 ──▶ shard-00001-model-0000<kind>-of-00004.safetensors ┐  every file says at which offsets
    rank 1 ──▶ shard-00002-model-0000<kind>-of-00004.safetensors ┘  of the whole tensors its own lie

    any ranks ◀── the parts of those files that overlap with their shards

A name may end in ``|<kind>``. Every kind has a file of its own, because a file is in memory a
second time while it is written.

Ranks neither write nor read with a word to each other. DCP's own agreement pickles plans through
sockets, and a thread that writes while an update runs must not use the sockets of the update. What
the agreement would bring is done here: the first of those that hold the same values writes them,
and a reader asks whether the parts make up the whole.
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

from verl.workers.collectives import rank

# Said by DCP at every call without its agreement, which is what is asked for here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


class ShardWriter(HuggingFaceStorageWriter):
    """Writes the shards of this rank into files of its own; ``names`` are those of all ranks."""

    def __init__(self, directory: Path, names: Iterable[str]) -> None:
        kind_of = {name: name.partition("|")[2] for name in names}
        kinds = sorted(set(kind_of.values()))
        files = {name: 1 + kinds.index(kind) for name, kind in kind_of.items()}
        super().__init__(str(directory), files, save_distributed=True)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number this rank's plan as if those of the ranks before it were known, for the number
        is in the names of its files.
        """
        others = [SavePlan([])] * rank()
        return super().prepare_global_plan([*others, *plans])[rank() :]

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the tensors to host memory, where training does not change them."""
        self.per_thread_copy_ahead = 0  # nothing is left to be fetched from a device
        return {name: tensor.to("cpu", copy=True) for name, tensor in state_dict.items()}


def begin_writing(state: Mapping[str, torch.Tensor], directory: Path) -> Future[Any]:
    """Copy this rank's part of ``state`` and write it into ``directory`` in a thread.

    The copy is made on return. The future is done when the files are on disk; it may hold an
    exception (see ``reason``).
    """
    mine = {name: tensor.detach() for name, tensor in state.items() if _is_written_here(tensor)}
    write = async_save(mine, storage_writer=ShardWriter(directory, state), no_dist=True)
    assert isinstance(write, Future)  # the other kind of answer is for copies made in a thread
    return write


def shards_written(directory: Path) -> list[Path]:
    """The files in ``directory`` with the shards of this rank; none where it holds nothing."""
    return list(directory.glob(f"shard-{rank() + 1:05}-*.safetensors"))


def _is_written_here(tensor: torch.Tensor) -> bool:
    """Whether this rank is the first of those that hold the same part, and the part not empty."""
    if not isinstance(tensor, DTensor):
        return rank() == 0
    place = tensor.device_mesh.get_coordinate()
    assert place is not None  # every rank is part of the mesh
    pairs = zip(place, tensor.placements, strict=True)
    copy = sum(index for index, placement in pairs if placement.is_replicate())
    return copy == 0 and tensor.to_local().numel() > 0


def stored(directory: Path) -> dict[str, TensorStorageMetadata]:
    """Size and parts of every tensor in the safetensors files of ``directory``."""
    found = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {
        name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)
    }


def read_into(state: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Fill the tensors of ``state``, sharded over any number of ranks or not at all.

    Raises ``ValueError`` for a tensor that is not in ``directory``, is of another shape, or lacks
    a part.
    """
    found = stored(directory)
    for name in state.keys() & found.keys():
        _require_whole(name, found[name], state[name], directory)
    try:
        load(dict(state), storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    except CheckpointException as error:
        raise ValueError(f"{directory}: {reason(error)}") from error


def _require_whole(
    name: str, entry: TensorStorageMetadata, target: torch.Tensor, directory: Path
) -> None:
    parts = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    # The size is only known from the parts: without the last of them it is smaller.
    if entry.size != target.shape or parts != target.numel():
        raise ValueError(
            f"{directory}: it holds {parts} numbers of '{name}' {list(entry.size)}, the model has "
            f"{list(target.shape)}: it is of another model, or the files of some ranks are missing"
        )


def reason(error: BaseException) -> BaseException:
    """What went wrong: DCP wraps it once more, for each rank of an agreement."""
    if not isinstance(error, CheckpointException):
        return error
    return next(iter(error.failures.values()))[0]
