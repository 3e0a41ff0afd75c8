"""Save and load the state of a ``TrainEngine`` without pickle.

    shard-<r>-*.safetensors  shards of the float32 weights and of the AdamW moments, named
                             ``<parameter>|exp_avg`` and so on               (every rank)
    rng_rank<r>.safetensors  random states of the rank                       (every rank)
    engine.json              optimizer steps, settings of the adapter, format (rank 0)

A checkpoint can be loaded on any number of ranks. Weights and moments are sharded again. A rank
loads the random states that were saved by the rank of the same number. If that rank saved none, the
random states stay unchanged.

This version writes format 2. Format 1 has one file of full weights and one file of full moments. It
is read like a checkpoint of one rank.
"""

import json
import logging
import math
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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

from verl.config.settings import ConfigError
from verl.models.lora import get_adapter_settings
from verl.names import ENGINE_STATE
from verl.utils.checkpoint import CheckpointError
from verl.utils.saved_state import (
    InvalidStateError,
    is_count,
    is_json_object,
    is_not_negative,
    read_state_value,
)
from verl.workers.collectives import get_rank
from verl.workers.engine import TrainEngine

logger = logging.getLogger(__name__)

# DCP warns at every call with no_dist=True, which is intended here.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")

ENGINE_STATE_FORMAT = 2
READABLE_FORMATS = (1, 2)
RANDOM_STATE_NAMES = ("cpu", "cuda")


@dataclass(frozen=True)
class EngineSave:
    """Running or finished save of one rank's part of a ``TrainEngine`` to ``directory``.

    ``write_future`` is done when all shard files are written. ``other_files`` are the small files
    of this rank, which are already written.
    """

    directory: Path
    other_files: list[Path]
    write_future: Future[Any]

    def is_done(self) -> bool:
        """Return True if all files are written or writing failed."""
        return self.write_future.done()

    def wait_for_files(self) -> list[Path]:
        """Wait until writing ends and return this rank's files, or raise ``CheckpointError``."""
        error = self.write_future.exception()
        if error is not None:
            cause = unwrap_checkpoint_error(error)
            raise CheckpointError(
                f"{self.directory}: the shards of rank {get_rank()} were not written: "
                f"{type(cause).__name__}: {cause}"
            ) from error
        shard_files = self.directory.glob(f"shard-{get_rank() + 1:05}-*.safetensors")
        return [*self.other_files, *shard_files]


def gather_full_weights(engine: TrainEngine, name_part: str = "") -> dict[str, torch.Tensor]:
    """Return the weights whose names contain ``name_part``, on the CPU of rank 0, by module name.

    Other ranks return an empty dict. Every rank must call this function. Tied weights appear once,
    under their first name.
    """
    weights: dict[str, torch.Tensor] = {}
    with engine.model_on_device():
        for name, tensor in named_weights(engine).items():
            if name_part not in name:
                continue
            full_tensor = gather_tensor(tensor)
            if get_rank() == 0:
                weights[name] = full_tensor.cpu().clone()
    return weights


def gather_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unsharded tensor on every rank, on the device of its shards. A collective call."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def save_engine(
    engine: TrainEngine,
    directory: str | Path,
    saves_optimizer: bool = True,
    saves_random_states: bool = True,
) -> EngineSave:
    """Copy the weights of ``engine`` and begin to write them to ``directory`` in a thread.

    ``saves_optimizer`` adds the AdamW moments, ``saves_random_states`` the random states. Every
    rank must call this function. The directory is complete when the ``EngineSave`` of every rank is
    done. The caller must make sure that an incomplete directory is never loaded.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    other_files: list[Path] = []
    if saves_random_states:
        other_files.append(directory / f"rng_rank{get_rank()}.safetensors")
        random_states = {"cpu": torch.get_rng_state()}
        if engine.device == "cuda":
            random_states["cuda"] = torch.cuda.get_rng_state()
        save_file(random_states, other_files[-1])
    if get_rank() == 0:
        other_files.append(directory / ENGINE_STATE)
        record: dict[str, Any] = {"format": ENGINE_STATE_FORMAT, "steps": engine.steps}
        if adapter := get_adapter_settings(engine.module):
            record["adapter"] = asdict(adapter)
        other_files[-1].write_text(json.dumps(record))
    engine.reshard_parameters()
    # Offloaded tensors are saved from host memory, because a rollout engine may occupy the GPU.
    state = named_weights(engine) | (_optimizer_moments(engine) if saves_optimizer else {})
    return EngineSave(directory, other_files, begin_writing_shards(state, directory))


def load_engine(engine: TrainEngine, directory: str | Path) -> None:
    """Load the state that ``save_engine`` wrote to ``directory``.

    Raises ``ValueError`` if the state does not fit the model.
    """
    directory = Path(directory)
    record = read_engine_record(directory)
    _require_equal_lora_alpha(engine, record, directory)
    metadata = read_tensor_metadata(directory)
    with torch.no_grad(), engine.model_on_device(training=True):
        engine.reshard_parameters()
        state = named_weights(engine)
        weight_names = set(_weight_names(metadata))
        if state.keys() != weight_names:
            differing_names = sorted(state.keys() ^ weight_names)[:5]
            raise ValueError(
                f"the weights do not fit the model: {differing_names} are only in the model or "
                "only in the checkpoint"
            )
        if engine.optimizer is not None:
            moment_names = metadata.keys() - weight_names - set(RANDOM_STATE_NAMES)
            _allocate_moments(engine, engine.optimizer, moment_names)
            state |= _optimizer_moments(engine)
            if record["steps"] and not moment_names and get_rank() == 0:
                logger.warning(
                    "%s has no AdamW moments (checkpoint.contents without 'optimizer'): training "
                    "continues with moments of 0",
                    directory,
                )
        fill_from_shards(state, directory)
        engine.steps = int(record["steps"])
        engine.check_finite_weights()
    random_states_file = directory / f"rng_rank{get_rank()}.safetensors"
    if random_states_file.is_file():
        random_states = load_file(random_states_file)
        torch.set_rng_state(random_states["cpu"])
        if engine.device == "cuda" and "cuda" in random_states:
            torch.cuda.set_rng_state(random_states["cuda"])


def _require_equal_lora_alpha(engine: TrainEngine, record: dict[str, Any], directory: Path) -> None:
    """Raise ``ValueError`` if the adapters of ``engine`` and of the checkpoint differ in alpha.

    With another scale the same weights are another policy. Earlier versions stored no alpha.
    """
    adapter = get_adapter_settings(engine.module)
    alpha = record.get("adapter", {}).get("alpha")
    if adapter and alpha is not None and alpha != adapter.alpha:
        raise ValueError(
            f"lora_alpha={adapter.alpha:g} of the {directory.name}: the adapter of the checkpoint "
            f"has another value; allowed: {alpha:g}; fix: set lora_alpha={alpha:g}, or "
            "trainer.experiment_name=ANOTHER for a new run"
        )


def has_engine_state(directory: Path) -> bool:
    """Return True if ``save_engine`` wrote to ``directory``."""
    return (directory / ENGINE_STATE).is_file()


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Read the full weights that ``save_engine`` wrote, by module name, without an engine.

    Raises ``ValueError`` for an unknown format or a missing shard.
    """
    read_engine_record(directory)
    metadata = read_tensor_metadata(directory)
    weights = {
        name: torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
        for name in _weight_names(metadata)
    }
    fill_from_shards(weights, directory)
    return weights


def read_weight_shapes(directory: Path) -> dict[str, list[int]]:
    """Return the shapes of the weights that ``save_engine`` wrote, by module name."""
    metadata = read_tensor_metadata(directory)
    return {name: list(metadata[name].size) for name in _weight_names(metadata)}


def check_engine_records(checkpoint: Path) -> None:
    """Raise ``ConfigError`` if an ``engine.json`` of ``checkpoint`` is invalid.

    The driver calls it first, because the error of a worker would arrive with a traceback.
    """
    for file in sorted(checkpoint.glob(f"**/{ENGINE_STATE}")):
        try:
            read_engine_record(file.parent)
        except ValueError as error:
            raise ConfigError(str(error), "altered_file") from error


def read_engine_record(directory: Path) -> dict[str, Any]:
    """Return the content of ``engine.json``. Raises ``ValueError`` if it is invalid."""
    file = directory / ENGINE_STATE
    try:
        record = json.loads(file.read_text())
        if read_state_value(record, "format", is_count, "an integer") not in READABLE_FORMATS:
            raise ValueError(
                f"{directory}: engine state has format {record['format']}; "
                f"allowed: {READABLE_FORMATS}; "
                "fix: use the version that wrote it (see env.json of its run)"
            )
        read_state_value(record, "steps", is_count, "an integer of at least 0")
        adapter = read_state_value(record, "adapter", is_json_object, "an object", default={})
        read_state_value(adapter, "alpha", is_not_negative, "a number of at least 0", default=None)
    except (InvalidStateError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file}: {error}; fix: use another checkpoint") from error
    return record


def named_weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Return the sharded parameters and persistent buffers by module name."""
    persistent_names = engine.module.state_dict().keys()
    buffers = {
        name: buffer for name, buffer in engine.module.named_buffers() if name in persistent_names
    }
    return dict(engine.module.named_parameters()) | buffers


def _weight_names(metadata: dict[str, TensorStorageMetadata]) -> list[str]:
    return [name for name in metadata if "|" not in name and name not in RANDOM_STATE_NAMES]


def _optimizer_moments(engine: TrainEngine) -> dict[str, torch.Tensor]:
    if engine.optimizer is None:
        return {}
    state = engine.optimizer.state
    return {
        f"{name}|{key}": value
        for name, parameter in engine.module.named_parameters()
        for key, value in state.get(parameter, {}).items()
    }


def _allocate_moments(engine: TrainEngine, optimizer: torch.optim.AdamW, names: set[str]) -> None:
    """Allocate zero moments for ``names`` in ``optimizer``, sharded like their parameters."""
    optimizer.state.clear()
    parameters = dict(engine.module.named_parameters())
    for name in sorted(names):  # in the same order on all ranks
        parameter_name, moment_name = name.rsplit("|", 1)
        if parameter_name not in parameters:
            raise ValueError(
                f"the optimizer state has the parameter '{parameter_name}', which the model lacks"
            )
        weight = parameters[parameter_name]
        # AdamW keeps its step counter on the CPU. The fused AdamW keeps it on the parameter's
        # device.
        device = weight.device if optimizer.defaults["fused"] else "cpu"
        moment = (
            torch.zeros((), device=device) if moment_name == "step" else torch.zeros_like(weight)
        )
        optimizer.state[weight][moment_name] = moment


# ---- sharded tensors in safetensors files, by torch.distributed.checkpoint (DCP) -----------------
#
#     rank 0 ──▶ shard-00001-model-0000<kind>-of-00004.safetensors ┐  each file holds the offsets
#     rank 1 ──▶ shard-00002-model-0000<kind>-of-00004.safetensors ┘  of its parts in the tensors
#
#     any rank ◀── the parts of these files that overlap with its shards
#
# A tensor name may end in ``|<kind>``. Each kind has a separate file per rank, because writing a
# file needs memory for a second copy of its tensors.
#
# Ranks do not communicate while they write or read. DCP could exchange plans between ranks, but it
# would send pickled plans through sockets. The writing thread would also use the process group
# while an update uses it. Two rules replace this exchange. The first rank with a replica of a shard
# writes it. A reader checks that the parts of a tensor are complete.


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

        DCP numbers files by the position of a plan, so an empty plan is inserted for each lower
        rank.
        """
        empty_plans = [SavePlan([])] * get_rank()
        return super().prepare_global_plan([*empty_plans, *plans])[get_rank() :]

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy the tensors to host memory, so that training does not change them."""
        self.per_thread_copy_ahead = 0  # all tensors are in host memory already
        return {name: tensor.to("cpu", copy=True) for name, tensor in state_dict.items()}


def begin_writing_shards(state: Mapping[str, torch.Tensor], directory: Path) -> Future[Any]:
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


def _is_written_by_this_rank(tensor: torch.Tensor) -> bool:
    """Return True if this rank has a part of ``tensor`` that no lower rank has."""
    if not isinstance(tensor, DTensor):
        return get_rank() == 0
    mesh_coordinate = tensor.device_mesh.get_coordinate()
    assert mesh_coordinate is not None  # every rank is part of the mesh
    coordinates_and_placements = zip(mesh_coordinate, tensor.placements, strict=True)
    replica_number = sum(
        coordinate_index
        for coordinate_index, placement in coordinates_and_placements
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
        stored_shape = metadata[name].size
        num_stored_values = sum(math.prod(chunk.sizes) for chunk in metadata[name].chunks)
        # DCP computes the size from the stored parts. If the last part is missing, the size is
        # smaller.
        if stored_shape != state[name].shape or num_stored_values != state[name].numel():
            raise ValueError(
                f"{directory}: it holds {num_stored_values} values of '{name}' with shape "
                f"{list(stored_shape)}, but the model has shape {list(state[name].shape)}: "
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
