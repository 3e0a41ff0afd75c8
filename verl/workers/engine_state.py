"""State of a ``TrainEngine`` in files without pickle: weights and AdamW moments as safetensors, the
rest as JSON.

    weights.safetensors      full float32 weights                     (rank 0)
    optimizer.safetensors    ``<parameter>|exp_avg`` and so on, full   (rank 0)
    engine.json              optimizer steps tried, format             (rank 0)
    rng_rank<r>.safetensors  random states of the rank                 (every rank)

The files hold no trace of the sharding, so a checkpoint of two ranks continues on one, and the
other way round.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, distribute_tensor

from verl.workers.collectives import rank, world_size
from verl.workers.engine import TrainEngine

FORMAT = 1


def _full(tensor: torch.Tensor) -> torch.Tensor | None:
    """The unsharded tensor as a CPU copy on rank 0, None elsewhere; a collective call."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone() if rank() == 0 else None


def full_weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """All weights by the module's names, on the CPU of rank 0 (empty elsewhere); every rank must
    call it.

    Tied weights appear once, under their first name.
    """
    with engine.resident():
        found = {name: _full(parameter) for name, parameter in engine.module.named_parameters()}
        for name, buffer in _saved_buffers(engine.module):
            found[name] = _full(buffer)
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _saved_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    kept = module.state_dict().keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in kept]


def load_weights(engine: TrainEngine, weights: dict[str, torch.Tensor]) -> None:
    """Copy full weights into the shards.

    Raises ``ValueError`` naming weights that are missing, extra or misshapen.
    """
    mine = dict(engine.module.named_parameters()) | dict(_saved_buffers(engine.module))
    if mine.keys() != weights.keys():
        odd = sorted(mine.keys() ^ weights.keys())[:5]
        raise ValueError(f"the weights do not fit the model: {odd} are on one side only")
    wrong = [name for name in mine if mine[name].shape != weights[name].shape]
    if wrong:
        raise ValueError(f"the weights do not fit the model: shapes of {wrong[:5]} differ")
    with torch.no_grad(), engine.resident():
        for name, target in mine.items():
            target.copy_(_like(weights[name].to(target.dtype), target))


def _like(full: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    full = full.to(target.device)
    if not isinstance(target, DTensor):
        return full
    # every rank has read the whole tensor: nothing has to travel
    return distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)


def save_engine(
    engine: TrainEngine, directory: str | Path, optimizer: bool = True, extra: bool = True
) -> list[Path]:
    """Write the state into ``directory`` and return the files that this rank wrote; every rank must
    call it.

    The caller makes the directory atomic.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights = full_weights(engine)
    moments = _full_moments(engine) if optimizer else {}
    written: list[Path] = []
    if extra:
        written.append(directory / f"rng_rank{rank()}.safetensors")
        save_file(_rng_state(engine.device), written[-1])
    if rank() == 0:
        written.append(directory / "weights.safetensors")
        save_file(weights, written[-1])
        if engine.optimizer is not None and optimizer:
            written.append(directory / "optimizer.safetensors")
            save_file(moments, written[-1])
        record = {"format": FORMAT, "steps": engine.steps}
        written.append(directory / "engine.json")
        written[-1].write_text(json.dumps(record))
    if world_size() > 1:
        dist.barrier()  # nobody takes the directory for complete before every rank has written
    return written


def load_engine(engine: TrainEngine, directory: str | Path) -> None:
    """Continue from what ``save_engine`` wrote.

    Raises ``ValueError`` where it does not fit this model.
    """
    directory = Path(directory)
    record = json.loads((directory / "engine.json").read_text())
    if record["format"] != FORMAT:
        raise ValueError(
            f"{directory}: engine state of format {record['format']}, this version reads {FORMAT}"
        )
    load_weights(engine, load_file(directory / "weights.safetensors"))
    engine.steps = int(record["steps"])
    moments = directory / "optimizer.safetensors"
    if engine.optimizer is not None and moments.is_file():
        _load_moments(engine, engine.optimizer, load_file(moments))
    random = directory / f"rng_rank{rank()}.safetensors"
    if random.is_file():
        _set_rng_state(load_file(random), engine.device)


def _full_moments(engine: TrainEngine) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor | None] = {}
    if engine.optimizer is None:
        return {}
    with engine.resident(training=True):
        for name, parameter in engine.module.named_parameters():
            for key, value in sorted(engine.optimizer.state.get(parameter, {}).items()):
                found[f"{name}|{key}"] = _full(value)
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _load_moments(
    engine: TrainEngine, optimizer: torch.optim.AdamW, moments: dict[str, torch.Tensor]
) -> None:
    optimizer.state.clear()
    with engine.resident(training=True):
        parameters = dict(engine.module.named_parameters())
        for name, tensor in moments.items():
            parameter, key = name.rsplit("|", 1)
            if parameter not in parameters:
                raise ValueError(f"the optimizer state names '{parameter}', which the model lacks")
            target = parameters[parameter]
            # The step counter is a scalar: on the host, or, for a fused step, beside its parameter.
            place = target.device if optimizer.defaults["fused"] else tensor.device
            value = tensor.to(place) if tensor.dim() == 0 else _like(tensor, target)
            optimizer.state[target][key] = value


def _rng_state(device: str) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor], device: str) -> None:
    torch.set_rng_state(state["cpu"])
    if device == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
