"""Functions that run in the workers of a vLLM engine, called by ``collective_rpc``.

A worker holds the weights, or its part of them, on one device. It may be another process.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import torch

from verl.workers.rollout.base import EngineError, Weights
from verl.workers.rollout.weight_receipt import WeightReceipt

if TYPE_CHECKING:  # vLLM is optional
    from vllm.v1.worker.worker_base import WorkerBase

RECEIPT_ATTRIBUTE = "_verl_arrival"


def start_recording(worker: "WorkerBase") -> None:
    """Begin to record the checksum of every weight that is loaded into the model."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    model = worker.get_model()
    receipt = WeightReceipt(
        dict(model.named_parameters()),
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
    )
    load = cast(Callable[[Weights], object], model.load_weights)

    def load_recorded(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        return load(receipt.record_weights(weights))

    # Set on the instance, where vLLM looks up the method for every chunk.
    model.__dict__ |= {RECEIPT_ATTRIBUTE: receipt, "load_weights": load_recorded}


def finish_recording(worker: "WorkerBase") -> dict[str, int]:
    """Finish recording and return a checksum of each received weight, by name.

    Raises ``EngineError`` if the model does not hold the received weights, or if
    ``start_recording`` was not called.
    """
    model = worker.get_model()
    receipt: WeightReceipt | None = model.__dict__.pop(RECEIPT_ATTRIBUTE, None)
    if receipt is None:
        raise EngineError("finish_update was called without begin_update")
    del model.__dict__["load_weights"]
    receipt.verify_held(dict(model.named_parameters()))
    return receipt.received
