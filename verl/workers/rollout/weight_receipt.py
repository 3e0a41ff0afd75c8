"""Check that an engine holds the weights that were sent to it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch

from verl.models.lora import drop_lora
from verl.utils.weight_arrays import compute_fingerprint
from verl.workers.rollout.base import EngineError, RolloutEngine, Weights

if TYPE_CHECKING:  # vLLM is optional
    from vllm.v1.worker.worker_base import WorkerBase

RECEIPT_ATTRIBUTE = "_verl_arrival"  # attribute of vLLM's model that holds its WeightReceipt
MAX_SHOWN_NAMES = 3  # largest number of weight names in an error message
COMPARABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Array: TypeAlias = np.ndarray | torch.Tensor


class WeightReceipt:
    """Record of the weights that an engine receives, to verify afterwards that it holds them.

    ``weights_before`` are the readable weights of the engine before the update, or their parts on
    device ``device_index`` of ``num_devices``. ``received_checksums`` maps the name of each
    received weight to its checksum (fingerprint).
    """

    def __init__(
        self,
        weights_before: Mapping[str, torch.Tensor],
        device_index: int = 0,
        num_devices: int = 1,
    ) -> None:
        self._weights_before = weights_before
        self._device_index = device_index
        self._num_devices = num_devices
        self._expected_checksums: dict[str, int] = {}
        self.received_checksums: dict[str, int] = {}

    def record_weights(self, weights: Weights) -> Iterator[tuple[str, Array]]:
        """Yield ``weights`` unchanged and record the fingerprint (checksum) of each one."""
        for name, value in weights:
            self.received_checksums[name] = compute_fingerprint(value)
            engine_weight = self._weights_before.get(name)
            # Quantised weights are not compared, because a cast does not reproduce their values.
            if engine_weight is not None and _is_comparable(value, engine_weight.dtype):
                local_part = self._get_device_part(value, engine_weight.shape)
                if local_part is not None:
                    self._expected_checksums[name] = compute_fingerprint(
                        local_part, engine_weight.dtype
                    )
            yield name, value

    def _get_device_part(self, value: Array, shape: torch.Size) -> Array | None:
        """Return the part of ``value`` that this device holds, None if it cannot be compared."""
        if value.shape == shape:
            return value
        # Only tensors split by columns can be compared. Fused tensors have an engine-specific order
        # of rows.
        if len(shape) != 2 or value.shape != (shape[0], shape[1] * self._num_devices):
            return None
        first_column = self._device_index * shape[1]
        return value[:, first_column : first_column + shape[1]]

    def verify_weights(self, current_weights: Mapping[str, torch.Tensor]) -> int:
        """Compare the current weights of the engine with the weights that it received.

        Returns the number of weights that could be compared. Raises ``EngineError`` if one differs.
        """
        comparable_names = [name for name in self._expected_checksums if name in current_weights]
        differing_names = [
            name
            for name in comparable_names
            if compute_fingerprint(current_weights[name]) != self._expected_checksums[name]
        ]
        if differing_names:
            raise EngineError(
                f"the engine received new weights, but {len(differing_names)} of the "
                f"{len(comparable_names)} weights that can be read back differ from them: "
                f"{', '.join(differing_names[:MAX_SHOWN_NAMES])}"
            )
        return len(comparable_names)


def _is_comparable(value: Array, engine_dtype: torch.dtype) -> bool:
    """Return True if ``value``, cast to ``engine_dtype``, equals the weight of the engine."""
    is_same_dtype = str(value.dtype) == str(engine_dtype).removeprefix("torch.")
    return engine_dtype in COMPARABLE_DTYPES or is_same_dtype or value.dtype == engine_dtype


def load_and_verify_weights(
    engine: RolloutEngine, weights: Weights, version: int
) -> dict[str, int]:
    """Load ``weights`` into ``engine``, verify them and return their checksums by name.

    Only weights that ``held_weights`` of the engine returns are verified. Raises ``EngineError`` if
    one of them differs.
    """
    read_held_weights = engine.held_weights if hasattr(engine, "held_weights") else dict
    receipt = WeightReceipt(read_held_weights())
    engine.update_weights(receipt.record_weights(weights), version)
    receipt.verify_weights(read_held_weights())
    return receipt.received_checksums


def verify_adapter(
    sent_tensors: Mapping[str, Array],
    held_tensors: Mapping[str, torch.Tensor],
    device_index: int = 0,
    num_devices: int = 1,
) -> dict[str, int]:
    """Check that an engine holds the LoRA adapter ``sent_tensors``; return checksums by tensor.

    ``held_tensors`` are the tensors that the engine applies, or their parts on this device. Raises
    ``EngineError`` if they differ from ``sent_tensors``.
    """
    missing_names = sorted(sent_tensors.keys() - held_tensors.keys())
    if missing_names:
        raise EngineError(
            f"the engine applies no adapter to the modules of {len(missing_names)} of the "
            f"{len(sent_tensors)} tensors that were sent "
            f"({', '.join(missing_names[:MAX_SHOWN_NAMES])}); "
            "fix: actor_rollout_ref.rollout.lora_sync=merged"
        )
    receipt = WeightReceipt(held_tensors, device_index, num_devices)
    for _ in receipt.record_weights(sent_tensors.items()):
        pass
    receipt.verify_weights(held_tensors)
    return receipt.received_checksums


# ---- functions that vLLM's ``collective_rpc`` calls in the worker process of each device


def start_recording(worker: "WorkerBase") -> None:
    """Begin to record the checksum of every weight that is loaded into the model of ``worker``."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    model = worker.get_model()
    receipt = WeightReceipt(
        drop_lora(dict(model.named_parameters())),
        get_tensor_model_parallel_rank(),
        get_tensor_model_parallel_world_size(),
    )
    load_weights = cast(Callable[[Weights], object], model.load_weights)

    def load_and_record(weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        return load_weights(receipt.record_weights(weights))

    # Replace the method on the instance, where vLLM looks it up for every chunk.
    model.__dict__ |= {RECEIPT_ATTRIBUTE: receipt, "load_weights": load_and_record}


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
    receipt.verify_weights(drop_lora(dict(model.named_parameters())))
    return receipt.received_checksums
