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
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from verl.models.lora import get_adapter_settings
from verl.names import ENGINE_STATE
from verl.utils.checkpoint import CheckpointError
from verl.utils.saved_state import (
    InvalidState,
    is_count,
    is_not_negative,
    is_object,
    read_state_value,
)
from verl.workers.collectives import get_rank
from verl.workers.engine import TrainEngine
from verl.workers.shards import (
    begin_writing,
    fill_from_shards,
    list_written_shards,
    read_tensor_metadata,
    unwrap_checkpoint_error,
)

FORMAT = 2
READABLE_FORMATS = (1, 2)
RANDOM_STATES = ("cpu", "cuda")


@dataclass(frozen=True)
class EngineSave:
    """Running or finished save of one rank's part of a ``TrainEngine`` to ``directory``.

    The weights are already copied, and a thread writes them to shard files. ``write_future`` is
    done when all shard files are written. ``other_files`` are the small files of this rank
    (``engine.json``, random states), which are already written.
    """

    directory: Path
    other_files: list[Path]
    write_future: Future[Any]

    def is_done(self) -> bool:
        """Return True if all files are written or writing failed."""
        return self.write_future.done()

    def wait_for_files(self) -> list[Path]:
        """Wait until writing ends and return every file that this rank wrote.

        Raises ``CheckpointError`` if writing failed.
        """
        error = self.write_future.exception()
        if error is not None:
            why = unwrap_checkpoint_error(error)
            raise CheckpointError(
                f"{self.directory}: the shards of rank {get_rank()} were not written: "
                f"{type(why).__name__}: {why}"
            ) from error
        return [*self.other_files, *list_written_shards(self.directory)]


def gather_full_weights(engine: TrainEngine, name_part: str = "") -> dict[str, torch.Tensor]:
    """Return the weights whose names contain ``name_part``, on the CPU of rank 0.

    Keys are module names. Other ranks return an empty dict. Every rank must call this function.
    Tied weights appear once, under their first name.
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
    engine: TrainEngine, directory: str | Path, optimizer: bool = True, extra: bool = True
) -> EngineSave:
    """Copy the weights of ``engine`` and begin to write them to ``directory`` in a thread.

    ``optimizer=True`` also writes the AdamW moments, ``extra=True`` the random states of the ranks.
    Every rank must call this function.

    The directory is complete when the ``EngineSave`` of every rank is done. The caller must make
    sure that an incomplete directory is never loaded.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    other_files: list[Path] = []
    if extra:
        other_files.append(directory / f"rng_rank{get_rank()}.safetensors")
        random_states = {"cpu": torch.get_rng_state()}
        if engine.device == "cuda":
            random_states["cuda"] = torch.cuda.get_rng_state()
        save_file(random_states, other_files[-1])
    if get_rank() == 0:
        other_files.append(directory / ENGINE_STATE)
        record: dict[str, Any] = {"format": FORMAT, "steps": engine.steps}
        if adapter := get_adapter_settings(engine.module):
            record["adapter"] = asdict(adapter)
        other_files[-1].write_text(json.dumps(record))
    engine.reshard_parameters()
    # Offloaded tensors are saved from host memory, because a rollout engine may occupy the GPU.
    state = named_weights(engine) | (_optimizer_moments(engine) if optimizer else {})
    return EngineSave(directory, other_files, begin_writing(state, directory))


def load_engine(engine: TrainEngine, directory: str | Path) -> None:
    """Load the state that ``save_engine`` wrote to ``directory``.

    Raises ``ValueError`` if the state does not fit the model.
    """
    directory = Path(directory)
    record = _read_state_file(directory)
    _require_equal_scales(engine, record, directory)
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
            moment_names = metadata.keys() - weight_names - set(RANDOM_STATES)
            _allocate_moments(engine, engine.optimizer, moment_names)
            state |= _optimizer_moments(engine)
        fill_from_shards(state, directory)
        engine.steps = int(record["steps"])
        engine.check_finite_weights()
    random_file = directory / f"rng_rank{get_rank()}.safetensors"
    if random_file.is_file():
        random_states = load_file(random_file)
        torch.set_rng_state(random_states["cpu"])
        if engine.device == "cuda" and "cuda" in random_states:
            torch.cuda.set_rng_state(random_states["cuda"])


def _require_equal_scales(engine: TrainEngine, record: dict[str, Any], directory: Path) -> None:
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
    _read_state_file(directory)
    metadata = read_tensor_metadata(directory)
    weights = {
        name: torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
        for name in _weight_names(metadata)
    }
    fill_from_shards(weights, directory)
    return weights


def _read_state_file(directory: Path) -> dict[str, Any]:
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
        adapter = read_state_value(record, "adapter", is_object, "an object", default={})
        read_state_value(adapter, "alpha", is_not_negative, "a number of at least 0", default=None)
    except (InvalidState, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
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
    return [name for name in metadata if "|" not in name and name not in RANDOM_STATES]


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
