"""State of a ``TrainEngine`` in files without pickle: weights and AdamW moments as safetensors, the
rest as JSON.

    shard-<r>-*.safetensors  this rank's shards of the float32 weights and of the moments, which
                             are called ``<parameter>|exp_avg`` and so on    (every rank)
    rng_rank<r>.safetensors  random states of the rank                       (every rank)
    engine.json              optimizer steps tried, format                   (rank 0)

A checkpoint continues on any number of ranks. Weights and moments are cut anew; a rank takes the
random states of its own number, and one that has none keeps what its seed gave it.

Format 1, which had one file of full weights and one of full moments, is read like a checkpoint of
one rank.
"""

import json
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from verl.utils.checkpoint import CheckpointError
from verl.workers.collectives import rank
from verl.workers.engine import TrainEngine
from verl.workers.shards import begin_writing, read_into, reason, shards_written, stored

RECORD = "engine.json"
FORMAT = 2
READABLE = (1, 2)
RANDOM_STATES = ("cpu", "cuda")


@dataclass(frozen=True)
class EngineSave:
    """What this rank saves: the state is copied, and files may still be being written.

    ``others`` are the files beside the shards, which are written already.
    """

    directory: Path
    others: list[Path]
    write: Future[Any]

    def done(self) -> bool:
        """Whether nothing is being written any more."""
        return self.write.done()

    def files(self) -> list[Path]:
        """Every file that this rank wrote, once all are.

        Raises ``CheckpointError`` where one could not be.
        """
        error = self.write.exception()
        if error is not None:
            why = reason(error)
            raise CheckpointError(
                f"{self.directory}: the shards of rank {rank()} were not written: "
                f"{type(why).__name__}: {why}"
            ) from error
        return [*self.others, *shards_written(self.directory)]


def full_weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """All weights by the module's names, on the CPU of rank 0 (empty elsewhere); every rank must
    call it.

    Tied weights appear once, under their first name.
    """
    with engine.resident():
        found = {name: _full(tensor) for name, tensor in weights_of(engine).items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _full(tensor: torch.Tensor) -> torch.Tensor | None:
    """The unsharded tensor as a CPU copy on rank 0, None elsewhere; a collective call."""
    found = whole(tensor)
    return found.cpu().clone() if rank() == 0 else None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The unsharded tensor where its shards are, on every rank; a collective call."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def save_engine(
    engine: TrainEngine, directory: str | Path, optimizer: bool = True, extra: bool = True
) -> EngineSave:
    """Copy the state and begin to write it into ``directory``; every rank must call it.

    The directory is complete when all ranks are done. The caller makes it atomic.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    others: list[Path] = []
    if extra:
        others.append(directory / f"rng_rank{rank()}.safetensors")
        save_file(_rng_state(engine.device), others[-1])
    if rank() == 0:
        others.append(directory / RECORD)
        others[-1].write_text(json.dumps({"format": FORMAT, "steps": engine.steps}))
    engine.reshard()
    # From where they rest: a GPU that an engine plays on may have no room for them.
    state = weights_of(engine) | (_moments(engine) if optimizer else {})
    return EngineSave(directory, others, begin_writing(state, directory))


def load_engine(engine: TrainEngine, directory: str | Path) -> None:
    """Continue from what ``save_engine`` wrote.

    Raises ``ValueError`` where it does not fit this model.
    """
    directory = Path(directory)
    record = _read_record(directory)
    found = stored(directory)
    with torch.no_grad(), engine.resident(training=True):
        engine.reshard()
        state = weights_of(engine)
        names = set(_weight_names(found))
        if state.keys() != names:
            odd = sorted(state.keys() ^ names)[:5]
            raise ValueError(f"the weights do not fit the model: {odd} are on one side only")
        if engine.optimizer is not None:
            moments = found.keys() - names - set(RANDOM_STATES)
            _make_moments(engine, engine.optimizer, moments)
            state |= _moments(engine)
        read_into(state, directory)
        engine.steps = int(record["steps"])
        engine.require_finite()
    random = directory / f"rng_rank{rank()}.safetensors"
    if random.is_file():
        _set_rng_state(load_file(random), engine.device)


def holds_engine(directory: Path) -> bool:
    """Whether ``directory`` is one that ``save_engine`` wrote."""
    return (directory / RECORD).is_file()


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The full weights that ``save_engine`` wrote, by the module's names, without an engine.

    Raises ``ValueError`` for a format that is not read, or where a part is missing.
    """
    _read_record(directory)
    found = stored(directory)
    entries = {name: found[name] for name in _weight_names(found)}
    weights = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
    }
    read_into(weights, directory)
    return weights


def _read_record(directory: Path) -> dict[str, Any]:
    record = json.loads((directory / RECORD).read_text())
    if record["format"] not in READABLE:
        raise ValueError(
            f"{directory}: engine state of format {record['format']}; allowed: {READABLE}; fix: "
            "continue with the version that wrote it (env.json of its run)"
        )
    return record


def weights_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Parameters and kept buffers by the module's names, sharded as they are."""
    kept = engine.module.state_dict().keys()
    buffers = {name: buffer for name, buffer in engine.module.named_buffers() if name in kept}
    return dict(engine.module.named_parameters()) | buffers


def _weight_names(found: dict[str, TensorStorageMetadata]) -> list[str]:
    return [name for name in found if "|" not in name and name not in RANDOM_STATES]


def _moments(engine: TrainEngine) -> dict[str, torch.Tensor]:
    if engine.optimizer is None:
        return {}
    state = engine.optimizer.state
    return {
        f"{name}|{key}": value
        for name, parameter in engine.module.named_parameters()
        for key, value in state.get(parameter, {}).items()
    }


def _make_moments(engine: TrainEngine, optimizer: torch.optim.AdamW, names: set[str]) -> None:
    """Room in ``optimizer`` for the moments of these names, sharded like their parameters."""
    optimizer.state.clear()
    parameters = dict(engine.module.named_parameters())
    for name in sorted(names):  # in one order on all ranks
        parameter, key = name.rsplit("|", 1)
        if parameter not in parameters:
            raise ValueError(f"the optimizer state names '{parameter}', which the model lacks")
        target = parameters[parameter]
        # The step counter is a scalar: on the host, or, for a fused step, beside its parameter.
        place = target.device if optimizer.defaults["fused"] else "cpu"
        room = torch.zeros((), device=place) if key == "step" else torch.zeros_like(target)
        optimizer.state[target][key] = room


def _rng_state(device: str) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor], device: str) -> None:
    torch.set_rng_state(state["cpu"])
    if device == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
