"""``actor_rollout_ref.rollout``: the engine that samples."""

from dataclasses import dataclass
from typing import Any

from verl.trainer.config.schema.field import opt, section
from verl.trainer.config.schema.model import DTYPES

ENGINES = ("vllm", "hf")


@dataclass
class ValSamplingConfig:
    """Sampling in validation."""

    temperature: float = opt(0.0, "0 is greedy", low=0)
    top_k: int = opt(-1, "-1: no truncation", low=-1)
    top_p: float = opt(1.0, "1: no truncation", low=0, high=1)
    n: int = opt(1, "plays per validation task", low=1)
    do_sample: bool = opt(False, "false means greedy, whatever the temperature")


@dataclass
class RolloutConfig:
    """Each rollout worker is a Ray actor with one engine; training samples at temperature, top_k
    and top_p.
    """

    name: str = opt(
        "vllm",
        "engine: vllm, hf which needs no vLLM, a registered one, or module:Class of your own",
    )
    mode: str = opt(
        "async",
        "how it is called",
        choices=("async", "sync"),
        unused="engines are always asynchronous",
    )
    temperature: float = opt(1.0, "sampling temperature in training", low=0)
    top_k: int = opt(-1, "-1: no truncation", low=-1)
    top_p: float = opt(1.0, "1: no truncation", low=0, high=1)
    n: int = opt(1, "samples per prompt of data files; environments use env.rollout.n", low=1)
    do_sample: bool = opt(True, "false means greedy")
    dtype: str = opt("bfloat16", "dtype of the engine's weights", choices=DTYPES)
    seed: int = opt(0, "base of the sampling seeds", low=0)
    num_workers: int = opt(1, "rollout workers (engines)", low=1)
    num_threads: int | None = opt(
        None, "CPU threads per engine; null: shared out from the machine's cores", low=1
    )
    kv_cache_gb: float = opt(1.0, "KV cache of an engine on CPU, GiB", low=0)
    gpu_memory_utilization: float = opt(
        0.5, "share of a GPU the engine may use", low=0, high=1, gpu_only=True
    )
    tensor_model_parallel_size: int = opt(1, "devices per engine", low=1, gpu_only=True)
    max_model_len: int | None = opt(
        None, "context of the engine; null: max_prompt_length + max_response_length", low=1
    )
    max_num_seqs: int = opt(256, "sequences decoded at once", low=1)
    max_num_batched_tokens: int = opt(8192, "tokens per engine step", low=1)
    enforce_eager: bool = opt(False, "no CUDA graphs", gpu_only=True)
    free_cache_engine: bool = opt(
        True, "put the engine to sleep while the policy is updated", gpu_only=True
    )
    enable_chunked_prefill: bool = opt(True, "split long prompts over engine steps")
    log_prob_micro_batch_size_per_gpu: int | None = opt(
        None, "rows per forward of the old-log-prob pass; null: the actor's", low=1
    )
    log_prob_use_dynamic_bsz: bool | None = opt(
        None, "form those micro-batches by tokens; null: the actor's"
    )
    log_prob_max_token_len_per_gpu: int | None = opt(
        None, "tokens per such micro-batch; null: the actor's", low=1
    )
    engine_kwargs: dict[str, Any] = opt({}, "passed to the engine's constructor as they are")
    val_kwargs: ValSamplingConfig = section(ValSamplingConfig, "sampling in validation")
