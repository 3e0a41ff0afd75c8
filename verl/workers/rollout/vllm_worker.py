"""Functions that run in the workers of a vLLM engine, called by ``collective_rpc``.

A worker holds the weights, or its part of them, on one device. It may be another process.
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
    """Begin to record every weight that is loaded into the model, by any transport."""
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

    def load_recorded(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        return load(arrival.through(weights))

    # Set on the instance, where vLLM looks up the method for every chunk.
    model.__dict__ |= {WATCHED: arrival, "load_weights": load_recorded}


def arrived(worker: "WorkerBase") -> dict[str, int]:
    """Finish recording and return the fingerprints of the received weights by name.

    Raises ``EngineError`` if the model does not hold the received weights, or if
    ``start_recording`` was not called.
    """
    model = worker.get_model()
    arrival: Arrival | None = model.__dict__.pop(WATCHED, None)
    if arrival is None:
        raise EngineError("finish_update was called without begin_update")
    del model.__dict__["load_weights"]
    arrival.check(dict(model.named_parameters()))
    return arrival.taken
