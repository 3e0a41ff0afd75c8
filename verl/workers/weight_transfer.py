"""Send weights from the devices of the training ranks to those of the rollout engines.

Engines on the same devices (``ipc``):

    rank 0   shards ─gather─▶ a weight ─cast─▶ chunk ──CUDA IPC──▶ engine on the same device
    rank 1   shards ─gather─▶ a weight ─cast─▶ chunk ──CUDA IPC──▶ engine on the same device

Engines on separate devices (``nccl``):

    rank 0   shards ─gather─▶ a weight ─cast─▶ chunk ──broadcast──▶ every engine
    rank 1   shards ─gather─▶ a weight

``vllm.distributed.weight_transfer`` sends the data. All ranks iterate over the weights together,
and rank 0 calls the engines. Each device of an engine receives whole weights and keeps its part of
them.

Extra memory with ``ipc``: one chunk on each rank and one copy of it in the engine. With ``nccl``:
up to three chunks on rank 0 and in each engine.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from verl.models.checkpoint_format import WeightConversion, plan_conversions
from verl.models.export import merge_weights
from verl.models.lora import get_merged_name
from verl.records import WeightFingerprints
from verl.single_controller.ray.calls import gather_results
from verl.utils.weight_arrays import compute_fingerprint
from verl.workers.collectives import get_rank
from verl.workers.engine import TrainEngine
from verl.workers.engine_state import gather_tensor, named_weights

if TYPE_CHECKING:  # vLLM is optional
    from transformers import PreTrainedModel
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.weight_transfer.base import (
        ParamMeta,
        TrainerWeightTransferEngine,
        WeightTransferUpdatePayload,
    )

SYNC_TIMEOUT_S = 600.0  # for loading an engine, a weight update, sleep or wake
CHUNK_BYTES = 512 * 2**20  # size of a chunk of weights; larger if a single weight is larger


class WeightStream:
    """Iterable of the full weights of ``engine``, one at a time, on the device of this rank.

    Weights are those of the Hugging Face checkpoint of ``lm``, the language model of ``engine``.
    Parameters are cast to ``dtype``. Buffers keep their dtype, because models compute with it. All
    ranks must iterate together, because each weight is gathered. The other arguments are those of
    ``merge_weights``.
    """

    def __init__(
        self,
        engine: TrainEngine,
        lm: "PreTrainedModel",
        dtype: torch.dtype,
        prefix: str,
        lora_scales: dict[str, float] | None,
        tied_names: set[str],
    ) -> None:
        self._engine = engine
        self._lm = lm
        self._dtype = dtype
        self._merge_arguments = (prefix, lora_scales, tied_names)
        # Fingerprints of the weights that were yielded last. Only rank 0 computes them.
        self.fingerprints = WeightFingerprints({}, {})

    @property
    def device(self) -> torch.device:
        """Device of the yielded weights, including the device index."""
        return torch.empty(0, device=self._engine.device).device

    def compute_max_weight_bytes(self) -> int:
        """Return the size of the largest weight in bytes."""
        return max(weight.nbytes for _, weight in self._describe())

    def get_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of each yielded weight by name. No weight is gathered."""
        return {name: weight.dtype for name, weight in self._describe()}

    def metadata(self) -> "list[ParamMeta]":
        """Return name, dtype and shape of each weight in the order of ``__iter__``."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [
            ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self._describe()
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        full_precision_checksums: dict[str, int] = {}
        sent_checksums: dict[str, int] = {}
        num_bytes = 0
        device, dtypes = self._engine.device, self.get_dtypes()
        for name, tensor in self._convert(lambda shard: gather_tensor(shard).to(device)):
            cast_tensor = tensor.to(dtypes[name])
            if get_rank() == 0:
                full_precision_checksums[name] = compute_fingerprint(tensor)
                sent_checksums[name] = compute_fingerprint(cast_tensor)
                num_bytes += cast_tensor.nbytes
            yield name, cast_tensor
        self.fingerprints = WeightFingerprints(full_precision_checksums, sent_checksums, num_bytes)

    def _describe(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of the checkpoint on ``meta``, in the dtype in which they are sent."""
        return self._convert(
            lambda shard: torch.empty(shard.shape, dtype=self._get_sent_dtype(shard), device="meta")
        )

    def _get_sent_dtype(self, shard: torch.Tensor) -> torch.dtype:
        is_cast = isinstance(shard, torch.nn.Parameter) and shard.is_floating_point()
        return self._dtype if is_cast else shard.dtype

    def _convert(
        self, read_tensor: Callable[[torch.Tensor], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each checkpoint weight.

        ``read_tensor`` makes a whole tensor from a sharded one: its values, or an empty tensor on
        ``meta``. Adapters are merged, and names are converted to those of the checkpoint.
        """
        sharded_weights = named_weights(self._engine)
        prefix, _, tied_names = self._merge_arguments
        shard_names: dict[str, list[str]] = {}  # by the name of the merged weight
        for name in sharded_weights:
            shard_names.setdefault(get_merged_name(name).removeprefix(prefix), []).append(name)
        merged_names = [name for name in shard_names if name not in tied_names]
        conversions = plan_conversions(self._lm, merged_names, to_checkpoint=True)

        def get_item_size(conversion: WeightConversion) -> int:
            merged_name = next(iter(conversion.patterns))
            return self._get_sent_dtype(sharded_weights[shard_names[merged_name][0]]).itemsize

        # vLLM packs the weights without gaps, and each must start at a multiple of its item size.
        conversions.sort(key=get_item_size, reverse=True)
        for conversion in conversions:
            full_tensors = {
                name: read_tensor(sharded_weights[name])
                for merged_name in conversion.patterns
                for name in shard_names[merged_name]
            }
            weights = merge_weights(full_tensors, *self._merge_arguments)
            yield from conversion.convert(self._lm, weights).items()


class WeightSyncClient:
    """Client of all rollout workers with the interface of vLLM's ``VLLMWeightSyncClient``.

    Every call goes to all rollout workers ``engines`` and waits for all of them. Each engine has
    ``devices_per_engine`` GPUs. ``abort_transfer`` is called if an engine cannot receive a chunk,
    because other processes may wait for this engine.
    """

    def __init__(self, engines: Sequence[Any], devices_per_engine: int) -> None:
        self._engines = engines
        self._devices_per_engine = devices_per_engine
        self.abort_transfer: Callable[[], None] = lambda: None
        self.version = 0  # policy version of the weights being sent
        # For each engine, the fingerprints of the weights that it received in the last update.
        self.received_checksums: list[dict[str, int]] = []

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Prepare all engines for weight transfers; called once.

        With ``nccl``, every engine gets its own range of ranks in the group. vLLM's sender assumes
        a single engine, so the offsets are computed here.
        """
        info_per_engine = [dict(init_info) for _ in self._engines]
        for engine_index, info in enumerate(info_per_engine):
            if "rank_offset" in info:
                info["rank_offset"] += engine_index * self._devices_per_engine
        call_each_engine(self._engines, "connect", [(info,) for info in info_per_engine])

    def start_weight_update(self) -> None:
        """Announce new weights to all engines, before the first chunk."""
        call_engines(self._engines, "begin_update")

    def update_weights(self, update_info: "WeightTransferUpdatePayload") -> None:
        """Send a chunk and wait until all engines have copied it."""
        try:
            call_engines(self._engines, "receive", update_info)
        except Exception:
            self.abort_transfer()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002
        """Finish the update after the last chunk and store the checksums that engines return."""
        self.received_checksums = call_engines(self._engines, "finish_update", self.version)


class WeightSender:
    """Sender of one training rank to rollout workers ``engines`` with a ``DirectSyncEngine``.

    ``transport`` is ``ipc`` or ``nccl``. ``devices_per_engine`` is the number of devices per
    engine. All ranks must create and use it together.
    """

    def __init__(
        self, stream: WeightStream, engines: Sequence[Any], transport: str, devices_per_engine: int
    ) -> None:
        self.stream = stream
        self._client = WeightSyncClient(engines, devices_per_engine)
        chunk_bytes = max(CHUNK_BYTES, stream.compute_max_weight_bytes())
        source: Any = stream  # Any: it has only those methods of vLLM's interface that senders call
        if transport == "nccl":
            self._sender = _create_nccl_sender(
                chunk_bytes, len(engines) * devices_per_engine, self._client, source
            )
        else:
            from vllm.distributed.weight_transfer.ipc_engine import (
                IPCTrainerInitInfo,
                IPCTrainerWeightTransferEngine,
            )

            init_info = IPCTrainerInitInfo(
                rank=get_rank(), packed=True, packed_buffer_size_bytes=chunk_bytes
            )
            sender_class = IPCTrainerWeightTransferEngine
            self._sender = sender_class.trainer_init(init_info, client=self._client, source=source)

    def send(self, version: int) -> list[dict[str, int]]:
        """Send all weights. Rank 0 returns, per engine, the checksum of each received weight."""
        self._client.version = version
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM reads the weights in other CUDA streams
        self._sender.send_weights()
        return self._client.received_checksums


def _create_nccl_sender(
    chunk_bytes: int, num_receivers: int, client: WeightSyncClient, source: Any
) -> "TrainerWeightTransferEngine[Any]":
    """Create a sender whose NCCL group is rank 0 and ``num_receivers`` devices of the engines."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    sender = NCCLTrainerWeightTransferEngine(
        client=client,
        source=source,
        is_sender=get_rank() == 0,
        packed_buffer_size_bytes=chunk_bytes,
    )
    if get_rank() == 0:
        client.abort_transfer = sender.shutdown
        sender.model_update_group = _create_nccl_group(
            chunk_bytes, num_receivers, client, source.device
        )
    return sender


def _create_nccl_group(
    chunk_bytes: int, num_receivers: int, client: WeightSyncClient, device: torch.device
) -> "PyNcclCommunicator":
    """Create the NCCL group as rank 0 and wait until all engines have joined.

    The id is sent through Ray: vLLM's TCP store needs no key and unpickles its content.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.distributed.weight_transfer.nccl_common import (
        NCCLWeightTransferInitInfo,
        uid_init_process_group,
        worker_init_payload,
    )

    if torch.cuda.is_available():
        # If no current stream is set, vLLM creates one and switches this thread to it.
        torch.cuda.set_stream(torch.cuda.current_stream())
    group_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
    num_group_ranks = 1 + num_receivers
    info = NCCLWeightTransferInitInfo(
        rank_offset=1,
        world_size=num_group_ranks,
        packed=True,
        packed_buffer_size_bytes=chunk_bytes,
        nccl_unique_id_b64=base64.b64encode(group_id).decode(),
    )
    with ThreadPoolExecutor(max_workers=1) as executor:
        join_future = executor.submit(client.init_weight_transfer_engine, worker_init_payload(info))
        nccl_group = uid_init_process_group(group_id, 0, num_group_ranks, device)
        join_future.result()
    return nccl_group


def call_engines(workers: Sequence[Any], method: str, *args: Any) -> list[Any]:
    """Call ``method`` of every rollout worker at the same time and return the results in order."""
    return call_each_engine(workers, method, [args] * len(workers))


def call_each_engine(
    workers: Sequence[Any], method: str, arguments: Sequence[tuple[Any, ...]]
) -> list[Any]:
    """Call ``method`` of every rollout worker at the same time, each with its ``arguments``."""
    labels = [f"rollout worker {index}: {method}" for index in range(len(workers))]
    workers_and_arguments = zip(workers, arguments, strict=True)
    result_refs = [getattr(worker, method).remote(*args) for worker, args in workers_and_arguments]
    return gather_results(result_refs, SYNC_TIMEOUT_S, labels)
