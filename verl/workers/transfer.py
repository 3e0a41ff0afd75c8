"""Weights from the devices of the training ranks to those of the engines.

On the same devices (``ipc``):

    rank 0   shards ─gather─▶ a weight ─cast─▶ piece ──CUDA IPC──▶ its share in the engine there
    rank 1   shards ─gather─▶ a weight ─cast─▶ piece ──CUDA IPC──▶ its share in the engine there

On devices of their own (``nccl``):

    rank 0   shards ─gather─▶ a weight ─cast─▶ piece ──broadcast──▶ its share, in every engine
    rank 1   shards ─gather─▶ a weight

The transport is vLLM's own (``vllm.distributed.weight_transfer``); all ranks go through the weights
together, and rank 0 tells the engines. Beside its shards a rank holds a piece of the weights, and
an engine a copy of it; with ``nccl`` rank 0 alone does, and both sides up to three.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from verl.models.export import hf_names
from verl.models.lora import adapted_module
from verl.records import WeightSketch
from verl.utils.fingerprint import fingerprint
from verl.workers.collectives import rank
from verl.workers.engine import TrainEngine
from verl.workers.engine_state import weights_of, whole
from verl.workers.rollout.calls import call_each, call_engines

if TYPE_CHECKING:  # vLLM is optional
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.weight_transfer.base import (
        ParamMeta,
        TrainerWeightTransferEngine,
        WeightTransferUpdatePayload,
    )

PIECE_BYTES = 512 * 2**20  # of weights that travel together, unless one of them is larger


class WeightStream:
    """The weights of ``engine`` under their Hugging Face names, in ``dtype``, LoRA merged: one
    after another on the device, of all ranks at the same time.

    ``prefix``, ``scales`` and ``tied`` are those of ``hf_names``.
    """

    def __init__(
        self,
        engine: TrainEngine,
        dtype: torch.dtype,
        prefix: str,
        scales: dict[str, float],
        tied: set[str],
    ) -> None:
        self._engine = engine
        self._dtype = dtype
        self._names = (prefix, scales, tied)
        self.sketch = WeightSketch({}, {})  # of what was iterated over last, on rank 0

    @property
    def device(self) -> torch.device:
        """Where the weights are when they are iterated over."""
        return torch.empty(0, device=self._engine.device).device  # with its index

    def largest(self) -> int:
        """Bytes of the largest weight."""
        shapes = [tensor.shape for tensor in weights_of(self._engine).values()]
        return max(prod(shape) for shape in shapes) * self._dtype.itemsize

    def metadata(self) -> "list[ParamMeta]":
        """Name, dtype and shape of what is iterated over, in that order; nothing is gathered."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        empty = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in weights_of(self._engine).items()
        }
        named = hf_names(empty, *self._names)
        return [ParamMeta(name, self._dtype, tuple(found.shape)) for name, found in named.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        held: dict[str, int] = {}
        sent: dict[str, int] = {}
        self.sketch = WeightSketch(held, sent)
        device = self._engine.device
        weights = weights_of(self._engine).items()
        # A module and its adapters come one after another: they are gathered together.
        for _, part in groupby(weights, key=lambda item: adapted_module(item[0])):
            gathered = {name: whole(tensor).to(device) for name, tensor in part}
            for name, tensor in hf_names(gathered, *self._names).items():
                cast = tensor.to(self._dtype)
                if rank() == 0:
                    held[name] = fingerprint(tensor)
                    sent[name] = fingerprint(cast)
                yield name, cast


class WeightSyncClient:
    """The rollout workers ``engines``, of ``devices`` each, as vLLM's senders want them
    (``VLLMWeightSyncClient``): every call goes to all of them, and waits for all.

    ``give_up`` is called where an engine cannot take a piece: others may wait for it to.
    """

    def __init__(self, engines: Sequence[Any], devices: int) -> None:
        self._engines = engines
        self._devices = devices
        self.give_up: Callable[[], None] = lambda: None
        self.version = 0  # of the weights under way
        self.taken: list[dict[str, int]] = []  # by each engine, the last time

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Before all hand-overs. Where devices form a group, every engine gets ranks of its own:
        vLLM knows of one engine.
        """
        infos = [dict(init_info) for _ in self._engines]
        for number, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += number * self._devices
        call_each(self._engines, "connect", [(info,) for info in infos])

    def start_weight_update(self) -> None:
        """Before the first piece."""
        call_engines(self._engines, "begin_update")

    def update_weights(self, update_info: "WeightTransferUpdatePayload") -> None:
        """A piece; back when all engines have copied it."""
        try:
            call_engines(self._engines, "receive", update_info)
        except Exception:
            self.give_up()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002
        """After the last piece."""
        self.taken = call_engines(self._engines, "finish_update", self.version)


class WeightSender:
    """One rank's end of the hand-overs to ``engines``, handles of rollout workers whose engines
    fetch weights themselves; made and used by all ranks at the same time.

    ``way`` is ``ipc`` or ``nccl``; ``devices`` are those of each engine.
    """

    def __init__(
        self, stream: WeightStream, engines: Sequence[Any], way: str, devices: int
    ) -> None:
        self.stream = stream
        self._client = WeightSyncClient(engines, devices)
        size = max(PIECE_BYTES, stream.largest())
        source: Any = stream  # vLLM's class of sources has more than its senders ask for
        if way == "nccl":
            self._sender = _nccl_sender(size, len(engines) * devices, self._client, source)
        else:
            self._sender = _ipc_sender(size, self._client, source)

    def send(self, version: int) -> list[dict[str, int]]:
        """Hand the weights over; what each engine took, by name, on rank 0."""
        self._client.version = version
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # it reads the weights in streams of its own
        self._sender.send_weights()
        return self._client.taken


def _ipc_sender(
    size: int, client: WeightSyncClient, source: Any
) -> "TrainerWeightTransferEngine[Any]":
    from vllm.distributed.weight_transfer.ipc_engine import (
        IPCTrainerInitInfo,
        IPCTrainerWeightTransferEngine,
    )

    info = IPCTrainerInitInfo(rank=rank(), packed=True, packed_buffer_size_bytes=size)
    return IPCTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)


def _nccl_sender(
    size: int, receivers: int, client: WeightSyncClient, source: Any
) -> "TrainerWeightTransferEngine[Any]":
    """The engines' devices, ``receivers`` of them, form a group with rank 0."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    sender = NCCLTrainerWeightTransferEngine(
        client=client, source=source, is_sender=rank() == 0, packed_buffer_size_bytes=size
    )
    if rank() == 0:
        client.give_up = sender.shutdown
        sender.model_update_group = _joined(size, receivers, client, source.device)
    return sender


def _joined(
    size: int, receivers: int, client: WeightSyncClient, device: torch.device
) -> "PyNcclCommunicator":
    """Rank 0 of the group, when all have come. Its name travels through Ray: the store over which
    vLLM would have them meet asks for no key, and unpickles what it finds.
    """
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.distributed.weight_transfer.nccl_common import (
        NCCLWeightTransferInitInfo,
        uid_init_process_group,
        worker_init_payload,
    )

    if torch.cuda.is_available():
        # Else vLLM, which was told of none yet, would have this thread go on with one of its own.
        torch.cuda.set_stream(torch.cuda.current_stream())
    name = bytes(NCCLLibrary().ncclGetUniqueId().internal)
    members = 1 + receivers
    info = NCCLWeightTransferInitInfo(
        rank_offset=1,
        world_size=members,
        packed=True,
        packed_buffer_size_bytes=size,
        nccl_unique_id_b64=base64.b64encode(name).decode(),
    )
    with ThreadPoolExecutor(max_workers=1) as thread:
        others = thread.submit(client.init_weight_transfer_engine, worker_init_payload(info))
        group = uid_init_process_group(name, 0, members, device)
        others.result()
    return group
