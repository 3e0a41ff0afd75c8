"""Engine with weights sharded over two vLLM workers, and a policy that sends it new weights.

The weights go through vLLM's transfer backends CUDA IPC and NCCL, of which only CUDA is replaced. A
mapped file replaces an allocation that another process opens. A gloo group with the same name,
members and ranks replaces a NCCL group. The functions run in the process of
``vllm_process.one_process``.
"""

import asyncio
import contextlib
import inspect
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

from tests.helpers.engine_cases import rollout_section, run_requests
from tests.helpers.policy_rows import policy_config
from tests.helpers.trainer_fakes import LocalActorGroup, LocalHandle
from verl.models.export import convert_to_hf_weights
from verl.models.policy import LM_PREFIX
from verl.names import WeightTransfer
from verl.trainer.ppo import resources
from verl.utils.sampling import SamplingRequest, SamplingResult
from verl.workers import weight_transfer
from verl.workers.actor import ActorWorker
from verl.workers.engine_state import gather_full_weights
from verl.workers.rollout import RolloutWorker
from verl.workers.rollout.vllm import VLLMEngine, engine_arguments

SHARES = 2
GLOO_TIMEOUT = timedelta(seconds=60)
_run: "Run | None" = None


class Run:
    """Engine and policy, joined by the backend ``ipc`` or ``nccl``."""

    def __init__(self, directory: str, backend: WeightTransfer) -> None:
        shared = tempfile.mkdtemp()
        kwargs = {
            "tensor_parallel_size": SHARES,
            "distributed_executor_backend": "mp",
            "weight_transfer_config": {"backend": backend},
        }
        # Prefill whole prompts: vLLM's own sampler on CPU fails after a part of a prompt.
        section = rollout_section(
            name="vllm", engine_kwargs=kwargs, max_num_batched_tokens=512, max_num_seqs=4
        )
        self.engine = VLLMEngine(section, directory, seed=3, num_threads=1)
        self.ask_workers: Any = self.engine._engine.collective_rpc
        self.shared = shared
        self.ask_workers(pretend_cuda, args=(shared,))
        pretend_cuda(None, shared)
        config = policy_config(directory)
        config.rollout.weight_transfer = backend
        config.rollout.tensor_model_parallel_size = SHARES
        self.actor = ActorWorker(config, device="cpu")
        self.actor.init_model()
        self.loop = asyncio.new_event_loop()
        self.rollout_worker = RolloutWorker(None, "", engine=self.engine)
        handle: Any = LocalHandle(self.rollout_worker)
        self.workers = resources.TrainingWorkers(
            LocalActorGroup(self.actor), [handle], weight_transfer=backend
        )

    def gather(self, refs: list, *_: object) -> list:
        """Return the references, which are the results of the calls."""
        return [self.answer(*ref) for ref in refs]

    def answer(self, worker: object, method: str, args: tuple) -> object:
        """Return the result of ``worker.method(*args)``."""
        result = getattr(worker, method)(*args)
        return self.loop.run_until_complete(result) if inspect.iscoroutine(result) else result


class PretendedCuda:
    """Replacement of ``torch`` for vLLM's transfer: one device whose memory is a file below
    ``shared``.
    """

    def __init__(self, shared: str) -> None:
        self.file = str(Path(shared) / "memory")
        nothing = SimpleNamespace(synchronize=lambda: None)
        self.accelerator = SimpleNamespace(
            current_device_index=lambda: 0, synchronize=nothing.synchronize
        )
        self.cuda = SimpleNamespace(
            get_device_properties=lambda _index: SimpleNamespace(uuid="GPU-pretended"),
            current_stream=lambda: nothing,
            synchronize=nothing.synchronize,
            ipc_collect=lambda: None,
            Stream=lambda device: nothing,
            stream=lambda _stream: contextlib.nullcontext(),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, size: int, dtype: torch.dtype, device: object) -> torch.Tensor:
        if device != "cuda":  # memory of one process only
            return torch.empty(size, dtype=dtype, device="cpu")
        return torch.from_file(self.file, shared=True, size=size, dtype=dtype)

    def reduce_tensor(self, tensor: torch.Tensor) -> tuple[None, tuple]:
        """Return the handle of ``tensor``; the receiver sets its seventh value."""
        return None, (self.file, tensor.numel(), 0, 0, 0, 0, None)

    @staticmethod
    def rebuild(file: str, size: int, *_: object) -> torch.Tensor:
        return torch.from_file(file, shared=True, size=size, dtype=torch.uint8)


class PretendedNccl:
    """Replacement of ``PyNcclCommunicator`` on gloo: processes join the group of ``name`` below
    ``shared``.
    """

    def __init__(self, shared: str, name: bytes, rank: int, world_size: int) -> None:
        c10d: Any = distributed  # has more attributes than its stubs
        store = c10d.FileStore(str(Path(shared) / name[:16].hex()), world_size)
        self.group = c10d.ProcessGroupGloo(store, rank, world_size, GLOO_TIMEOUT)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = src
        self.group.broadcast([tensor], options).wait()


def pretend_cuda(_worker: object, shared: str) -> None:
    """Let vLLM's transfer in this process share memory through a file, and use gloo groups."""
    from torch.multiprocessing import reductions
    from vllm.distributed.device_communicators import pynccl_wrapper
    from vllm.distributed.weight_transfer import base, ipc_engine, nccl_common, packed_tensor

    pretended: Any = PretendedCuda(shared)
    for module in (base, ipc_engine, nccl_common, packed_tensor):
        vars(module)["torch"] = pretended
    meeting: Any = nccl_common
    meeting.uid_init_process_group = lambda name, rank, members, _device: PretendedNccl(
        shared, name, rank, members
    )
    library: Any = pynccl_wrapper
    named = SimpleNamespace(internal=os.urandom(128))
    library.NCCLLibrary = lambda: SimpleNamespace(ncclGetUniqueId=lambda: named)
    transport: Any = packed_tensor
    transport.reduce_tensor = pretended.reduce_tensor
    reductions.rebuild_cuda_tensor = pretended.rebuild


def spoil(worker: Any, number: int) -> None:
    """Let worker ``number`` receive zeros."""
    model = worker.get_model()
    if worker.rank == number:
        load = model.load_weights
        model.__dict__["load_weights"] = lambda pairs: load((n, t * 0) for n, t in pairs)


def start(directory: str, backend: WeightTransfer) -> None:
    """Start engine and policy from ``directory``."""
    global _run
    engine: Any = VLLMEngine
    engine._install_cpu_sampler = lambda _self: None  # would patch this process
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    _run = Run(directory, backend)
    for module in (resources, weight_transfer):
        vars(module)["gather_results"] = _run.gather


def running() -> Run:
    """Return the engine and policy that ``start`` made."""
    assert _run is not None, "start() comes first"
    return _run


def stop() -> None:
    """Close the engine."""
    run = running()
    run.loop.run_until_complete(run.rollout_worker.close())


def change_and_sync(version: int, seed: int, piece_bytes: int) -> dict[str, torch.Tensor]:
    """Change the policy strongly and sync; return its new weights by name."""
    run = running()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        sharded: Any
        for sharded in run.actor.train_engine.module.parameters():
            noise = torch.randn(sharded.shape, generator=generator)
            sharded.to_local().add_(0.05 * noise)
    weight_transfer.CHUNK_BYTES = piece_bytes
    run.actor._sender = None  # the sender keeps its piece size
    pretend_cuda(None, run.shared)  # and a group keeps its name
    run.workers.sync_weights(version)
    return convert_to_hf_weights(
        run.actor.lm,
        gather_full_weights(run.actor.train_engine),
        LM_PREFIX,
        {},
        run.actor.tied_names,
    )


def sync_with_zeros(version: int, number: int) -> str:
    """Sync while worker ``number`` receives zeros; return the error message."""
    run = running()
    run.ask_workers(spoil, args=(number,))
    try:
        run.workers.sync_weights(version)
    except RuntimeError as error:
        return str(error)
    return ""


def serve(requests: list[SamplingRequest]) -> dict[str, SamplingResult]:
    """Run ``requests`` to the end."""
    return run_requests(running().engine, requests)


def list_rejected_calls() -> list[str]:
    """Return the calls of the CUDA engine that the installed vLLM does not accept.

    The calls are start arguments and methods of the engine and of its workers.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_worker import Worker

    section = rollout_section(tensor_model_parallel_size=2, weight_transfer="nccl")
    arguments = engine_arguments("policy", section, 1, False, on_cpu=False)
    wrong = [name for name in arguments if name not in inspect.signature(EngineArgs).parameters]
    calls_made = [
        (LLMEngine.sleep, {"level": 2}),
        (LLMEngine.wake_up, {"tags": ["weights"]}),
        (LLMEngine.collective_rpc, {"method": "name", "kwargs": {}}),
        (Worker.init_weight_transfer_engine, {"init_info": {}}),
        (Worker.start_weight_update, {}),
        (Worker.update_weights, {"update_info": {}}),
        (Worker.finish_weight_update, {}),
        (Worker.get_model, {}),
    ]
    for function, arguments_given in calls_made:
        try:
            inspect.signature(function).bind(None, **arguments_given)
        except TypeError as error:
            wrong.append(f"{function.__qualname__}: {error}")
    return wrong
