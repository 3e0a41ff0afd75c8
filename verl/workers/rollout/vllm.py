"""The vLLM engine: ``LLMEngine`` in this process, token ids in and out.

CPU and CUDA share everything but this: on CPU the sampler and the reload are mended (``vllm_cpu``);
on CUDA weights may come from the devices of the training ranks, and with tensor parallelism a
worker process per device holds a share of them (``vllm_worker``).
"""

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.schema.rollout import RolloutConfig
from verl.names import CPU_CACHE_GB
from verl.utils.sampling import SamplingRequest, SamplingResult, StopReason
from verl.utils.shipped import as_tensor
from verl.workers.rollout.base import (
    GREEDY_BELOW,
    EngineError,
    EnginePart,
    RequestSeeds,
    SleepLevel,
    StopRules,
    Weights,
    check_request,
    end_token_ids,
)

if TYPE_CHECKING:  # vLLM is optional, and imported only after _prepare_process
    import torch
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from verl.workers.rollout.vllm_cpu import CountedSampler

logger = logging.getLogger(__name__)
GIB = 2**30
CPU_BLOCK_SIZE = 32  # tokens: the unit of prefix reuse; the CPU kernels want a multiple of 32
_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}


class VLLMEngine:
    """``RolloutEngine`` on vLLM. ``config`` is the section ``actor_rollout_ref.rollout``."""

    gives_logprobs = True

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        seed: int = 0,
        num_threads: int | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        self._on_cpu = _prepare_process(num_threads, compiles=config.enforce_eager is False)
        arguments_cls, engine_cls = _import_vllm()
        _check_weights(str(model_path), config, trust_remote_code)
        arguments = engine_arguments(str(model_path), config, seed, trust_remote_code, self._on_cpu)
        self._engine = engine_cls.from_engine_args(arguments_cls(**arguments))
        self._sampler = self._mend_for_cpu() if self._on_cpu else None
        # vLLM's own type names less of a tokenizer than the tokenizers have.
        tokenizer: Any = self._engine.get_tokenizer()
        self._rules = StopRules(tokenizer, end_token_ids(model_path, tokenizer))
        self._seeds = RequestSeeds(seed)
        model_config = self._engine.vllm_config.model_config
        self._max_model_len = model_config.max_model_len
        self._vocab_size = model_config.get_vocab_size()
        self._requests: dict[str, str] = {}  # request id -> vLLM's internal id
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        self.policy_version = 0

    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def add(self, request: SamplingRequest) -> None:
        """Take a request. Raises ``ValueError`` for one that cannot be served."""
        from vllm.inputs.engine import tokens_input

        check_request(request, self._max_model_len, self._vocab_size)
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} is already running")
        params = self._sampling_params(request)
        seed = self._seeds.of(request)
        # Our own sampler draws from the seed itself, by request and position.
        if self._sampler is None:
            params.seed = seed
        prompt = tokens_input(list(request.prompt_ids))
        internal = self._engine.add_request(request.request_id, prompt, params)
        self._requests[request.request_id] = internal
        if self._sampler is not None:
            self._sampler.begin(internal, seed)

    def step(self) -> list[SamplingResult]:
        """Advance all running requests by one engine step; return those that finished."""
        from vllm.outputs import RequestOutput

        outputs = self._engine.step()
        sampled = [output for output in outputs if isinstance(output, RequestOutput)]
        return [self._result(output) for output in sampled if output.finished]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests; they give no result."""
        internal = [self._requests.pop(name) for name in request_ids if name in self._requests]
        self._engine.abort_request(internal, internal=True)
        if self._sampler is not None:
            for name in internal:
                self._sampler.finish(name)

    def update_weights(self, weights: Weights, version: int) -> None:
        """Load full weights in place and drop the prefix cache; raises ``EngineError`` while
        requests run.
        """
        self._refuse_while_running()
        dtype = self._engine.vllm_config.model_config.dtype
        # One by one, when vLLM asks for the next: a second copy of all is never there.
        tensors = ((name, as_tensor(value).to(dtype)) for name, value in weights)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        if self._on_cpu:
            from verl.workers.rollout.vllm_cpu import repack_output_head

            repack_output_head(self._runner().get_model())
        self._begin_version(version)

    def connect(self, info: Mapping[str, object]) -> None:
        """Be ready for weights by vLLM's own way (``weight_transfer_config``)."""
        self._ask_workers("init_weight_transfer_engine", init_info=info)

    def begin_update(self) -> None:
        """Expect new weights in pieces; raises ``EngineError`` while requests run."""
        from verl.workers.rollout.vllm_worker import watch

        self._refuse_while_running()
        self._engine.collective_rpc(watch)
        self._ask_workers("start_weight_update")

    def receive(self, info: Mapping[str, object]) -> None:
        """Load a piece, whole on every device; each keeps its share."""
        self._ask_workers("update_weights", update_info=info)

    def finish_update(self, version: int) -> dict[str, int]:
        """Drop the prefix cache; the fingerprints of the weights that came, by name.

        Raises ``EngineError`` where a device holds others, or got others than the first did.
        """
        from verl.workers.rollout.vllm_worker import arrived

        self._ask_workers("finish_weight_update")
        first, *others = self._engine.collective_rpc(arrived)
        for number, taken in enumerate(others, start=1):
            if taken != first:
                raise EngineError(
                    f"device {number} of the engine took other weights than its first device"
                )
        self._begin_version(version)
        return first

    def held_weights(self) -> "dict[str, torch.Tensor]":
        """The parameters that vLLM keeps under the name and in the shape of the checkpoint; on CPU
        those of no matrix product, which it repacks.
        """
        return dict(self._runner().get_model().named_parameters())

    def sleep(self, level: SleepLevel = 1) -> None:
        """Free device memory on CUDA (on level 1 weights wait in host memory, on level 2 they are
        forgotten); nothing on CPU or with free_cache_engine=false.
        """
        if self._can_sleep:
            self._engine.sleep(level=level)

    def wake(self, part: EnginePart | None = None) -> None:
        """Undo ``sleep``, for one part or for all."""
        if self._can_sleep:
            self._engine.wake_up(tags=None if part is None else [part])

    def close(self) -> None:
        """Shut vLLM's core down."""
        self._requests.clear()
        self._engine.engine_core.shutdown()

    def _sampling_params(self, request: SamplingRequest) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        plan = self._rules.plan(tuple(request.stop))
        greedy = request.temperature < GREEDY_BELOW
        return SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0.0 if greedy else request.temperature,
            top_p=1.0 if greedy else request.top_p,
            top_k=-1 if greedy else request.top_k,
            stop=list(plan.strings),
            stop_token_ids=sorted(plan.token_ids),
            include_stop_str_in_output=True,
            ignore_eos=True,  # end tokens are among stop_token_ids
            detokenize=bool(plan.strings),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # 0: of the sampled token alone; on CPU our own sampler notes it
            logprobs=None if self._sampler is not None else 0,
            skip_clone=True,  # made for this request alone: vLLM need not copy it deeply
        )

    def _result(self, output: "RequestOutput") -> SamplingResult:
        completion = output.outputs[0]
        internal = self._requests.pop(output.request_id)
        tokens = list(completion.token_ids)
        if self._sampler is not None:
            logprobs = self._sampler.finish(internal)[: len(tokens)]
        else:
            entries = zip(completion.logprobs or (), tokens, strict=True)
            logprobs = [entry[token].logprob for entry, token in entries if entry is not None]
        if len(logprobs) != len(tokens):
            raise EngineError(
                f"request {output.request_id}: {len(logprobs)} log-probs for {len(tokens)} tokens"
            )
        reason = _REASONS.get(completion.finish_reason or "", StopReason.ABORT)
        info = {"cached_tokens": output.num_cached_tokens or 0}
        return SamplingResult(
            output.request_id, tokens, logprobs, reason, self.policy_version, info
        )

    def _refuse_while_running(self) -> None:
        if self._requests:
            raise EngineError(
                f"weights cannot change while {len(self._requests)} requests are running"
            )

    def _ask_workers(self, method: str, **arguments: object) -> None:
        self._engine.collective_rpc(method, kwargs=arguments)

    def _begin_version(self, version: int) -> None:
        # A prompt that hits the old cache would be continued by a mix of two policies.
        if not self._engine.reset_prefix_cache():
            raise EngineError(
                "vLLM kept its prefix cache after a weight update: "
                "cached keys would be of old weights"
            )
        self.policy_version = version

    def _runner(self) -> "GPUModelRunner":
        return self._engine.model_executor.driver_worker.worker.model_runner

    def _mend_for_cpu(self) -> "CountedSampler":
        from verl.workers.rollout.vllm_cpu import CountedSampler

        return CountedSampler(self._runner())


def engine_arguments(
    path: str, config: RolloutConfig, seed: int, trust_remote_code: bool, on_cpu: bool
) -> dict[str, Any]:
    """The keyword arguments of vLLM's ``EngineArgs``; ``config.engine_kwargs`` has the last word.

    Its ``hf_overrides`` are added to ours.
    """
    asked = dict(config.engine_kwargs)
    overrides = asked.pop("hf_overrides", {})
    if not isinstance(overrides, Mapping):
        raise ValueError(f"engine_kwargs.hf_overrides={overrides!r}: a mapping is needed")
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": config.dtype,
        # logits as the trainer's: see full_logits in verl/models/token_scores.py
        "hf_overrides": {"head_dtype": "float32"} | dict(overrides),
        "seed": seed & 0x7FFFFFFF,  # vLLM takes 32 bits with a sign
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        # requests say how to sample; a file of the model must not change it
        "generation_config": "vllm",
        "trust_remote_code": trust_remote_code,
    }
    if on_cpu:
        # Compiling costs up to half a minute at the start and saves a tenth of an iteration.
        arguments["enforce_eager"] = config.enforce_eager is not False
        arguments["block_size"] = CPU_BLOCK_SIZE
        cache_gb = CPU_CACHE_GB if config.kv_cache_gb is None else config.kv_cache_gb
        arguments["kv_cache_memory_bytes"] = int(cache_gb * GIB)
    else:
        arguments |= _on_cuda(config)
    return arguments | asked


def _check_weights(path: str, config: RolloutConfig, trust_remote_code: bool) -> None:
    """Raise ``UnusableWeights`` for weights that vLLM would load in part, and fill up with random
    ones; of models that transformers cannot compare the files alone are checked.
    """
    # By call: transformers comes with these, and with it torch, which reads the environment.
    from verl.models.loader import read_config
    from verl.models.weights import check_files, check_weights, is_comparable

    if "load_format" in config.engine_kwargs:  # dummy weights, or another kind of file
        return
    described = read_config(path, trust_remote_code)
    if is_comparable(described):
        check_weights(path, described, trust_remote_code=trust_remote_code, values=False)
    else:
        check_files(Path(path), f"model path={path!r}")


def _on_cuda(config: RolloutConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "enforce_eager": bool(config.enforce_eager),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        # On GPUs of its own an engine never sleeps.
        "enable_sleep_mode": config.free_cache_engine and not config.nnodes,
    }
    if config.kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gb * GIB)
    if config.weight_transfer in ("ipc", "nccl"):
        arguments["weight_transfer_config"] = {"backend": config.weight_transfer}
    if config.tensor_model_parallel_size > 1:
        # Processes on the devices that this one sees. vLLM would take Ray, because this is an actor
        # in a placement group, and want bundles that training ranks have a share of.
        arguments["distributed_executor_backend"] = "mp"
    return arguments


def _prepare_process(num_threads: int | None, compiles: bool) -> bool:
    """Set what vLLM and OpenMP read at import; return whether the engine runs on CPU. ``compiles``:
    it may, there.
    """
    # the core in this process: weights are handed over without a copy through another one
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # It warns at every reload of modules without weights; what a reload must renew is tested.
    logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    import torch  # OpenMP reads it when it is loaded

    if torch.cuda.is_available():
        return False
    if not compiles:
        # else vLLM compiles a helper during the first requests: 4-20 s
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # it would take precedence over kv_cache_memory_bytes, in whole GiB
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return True


def _import_vllm() -> "tuple[type[EngineArgs], type[LLMEngine]]":
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "vllm":
            raise
        raise ImportError(
            "rollout.name=vllm needs vLLM: install the extra 'cpu' or 'gpu' of this package, "
            "or set actor_rollout_ref.rollout.name=hf, which needs no vLLM"
        ) from error
    if current_platform.is_cpu():
        from verl.workers.rollout.vllm_cpu import inspect_models_in_process

        inspect_models_in_process()
    return EngineArgs, LLMEngine
