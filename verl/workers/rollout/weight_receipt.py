"""Check that an engine holds the weights that were sent to it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch

from verl.utils.fingerprint import compute_fingerprint
from verl.workers.rollout.base import EngineError, RolloutEngine, Weights

if TYPE_CHECKING:  # vLLM is optional
    from vllm.v1.worker.worker_base import WorkerBase

RECEIPT_ATTRIBUTE = "_verl_arrival"
SHOWN = 3  # largest number of weight names in an error message
READABLE = (torch.float32, torch.bfloat16, torch.float16)
Values: TypeAlias = np.ndarray | torch.Tensor


class WeightReceipt:
    """Record of the weights that an engine receives, to verify afterwards that it holds them.

    ``held`` are the readable weights of the engine before the update. For an engine with tensor
    parallelism, this record is for device number ``share`` of ``shares`` devices. ``received`` maps
    the name of each weight that the engine received to its fingerprint (checksum).
    """

    def __init__(self, held: Mapping[str, torch.Tensor], share: int = 0, shares: int = 1) -> None:
        self._held = held
        self._share = share
        self._shares = shares
        self._expected: dict[str, int] = {}
        self.received: dict[str, int] = {}

    def record_weights(self, weights: Weights) -> Iterator[tuple[str, Values]]:
        """Yield ``weights`` unchanged and record the fingerprint (checksum) of each one."""
        for name, value in weights:
            self.received[name] = compute_fingerprint(value)
            held_weight = self._held.get(name)
            # Quantised weights are excluded: a cast does not reproduce their values.
            if held_weight is not None and held_weight.dtype in READABLE:
                local_part = self._local_part(value, held_weight.shape)
                if local_part is not None:
                    self._expected[name] = compute_fingerprint(local_part, held_weight.dtype)
            yield name, value

    def _local_part(self, value: Values, shape: torch.Size) -> Values | None:
        """Return the part of ``value`` that this device holds in a tensor of ``shape``.

        None if the tensor is fused, repacked, or not split by columns.
        """
        if value.shape == shape:
            return value
        # Only a split by columns is certain: fused tensors have an engine-specific order of rows.
        if len(shape) != 2 or value.shape != (shape[0], shape[1] * self._shares):
            return None
        first_column = self._share * shape[1]
        return value[:, first_column : first_column + shape[1]]

    def verify_held(self, held: Mapping[str, torch.Tensor]) -> int:
        """Compare ``held``, the current weights of the engine, with the received ones.

        Returns the number of weights that could be compared. Raises ``EngineError`` if one differs.
        """
        readable = [name for name in self._expected if name in held]
        stale = [
            name for name in readable if compute_fingerprint(held[name]) != self._expected[name]
        ]
        if stale:
            raise EngineError(
                f"the engine received new weights, but {len(stale)} of the {len(readable)} weights "
                f"that can be read back differ from them: {', '.join(stale[:SHOWN])}"
            )
        return len(readable)


def load_and_verify_weights(
    engine: RolloutEngine, weights: Weights, version: int
) -> dict[str, int]:
    """Load ``weights`` into ``engine``, verify them and return their checksums by name.

    Only weights that the engine can return are verified. Raises ``EngineError`` if one differs.
    """
    read_held_weights = engine.held_weights if hasattr(engine, "held_weights") else dict
    receipt = WeightReceipt(read_held_weights())
    engine.update_weights(receipt.record_weights(weights), version)
    receipt.verify_held(read_held_weights())
    return receipt.received


# ---- for vLLM: ``collective_rpc`` calls these in the worker of each device, maybe another process


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
