"""What an engine on vLLM has its workers do: each holds the weights, or its share of them, on one
device. Functions of the worker, for ``collective_rpc``, which may call them in other processes.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import torch

from verl.workers.rollout.arrival import Arrival
from verl.workers.rollout.base import EngineError, Weights

if TYPE_CHECKING:  # vLLM is optional
    from vllm.v1.worker.worker_base import WorkerBase

WATCHED = "_verl_arrival"


def watch(worker: "WorkerBase") -> None:
    """Note every weight that the model is given from now on, by whatever way it comes."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    model = worker.get_model()
    arrival = Arrival(
        dict(model.named_parameters()),
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
    )
    load = cast(Callable[[Weights], object], model.load_weights)

    def noted(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        return load(arrival.through(weights))

    # On the instance: vLLM looks the method up there for every piece.
    model.__dict__ |= {WATCHED: arrival, "load_weights": noted}


def arrived(worker: "WorkerBase") -> dict[str, int]:
    """End ``watch``; the fingerprints of the weights that came, by name.

    Raises ``EngineError`` where the model holds others, or where nobody watched.
    """
    model = worker.get_model()
    arrival: Arrival | None = model.__dict__.pop(WATCHED, None)
    if arrival is None:
        raise EngineError("the weights that the engine has now came without being watched")
    del model.__dict__["load_weights"]
    arrival.check(dict(model.named_parameters()))
    return arrival.taken
