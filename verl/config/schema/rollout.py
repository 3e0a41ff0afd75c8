"""Section ``actor_rollout_ref.rollout``: rollout workers, engines and sampling."""

from typing import Annotated, Any, Literal

from annotated_types import Ge

from verl.config.settings import (
    NULL,
    VERL,
    Derived,
    GpuOnly,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    RunsCode,
    Section,
    Seed,
    Share,
    Unused,
)
from verl.names import (
    EngineDtype,
    LoraSync,
    WeightTransfer,
)


class ValSamplingConfig(Section):
    """Sampling parameters and number of trajectories in validation."""

    temperature: NonNegative = 0.0
    """sampling temperature in validation; 0 is greedy"""
    top_k: Annotated[int, Ge(-1)] = -1
    """number of most likely tokens to sample from in validation; -1: all"""
    top_p: Share = 1.0
    """probability mass of the tokens to sample from in validation; 1: all"""
    n: PositiveInt = 1
    """trajectories per validation task"""
    # Validation is greedy by default, so that two validations of one policy can be compared.
    do_sample: bool = False
    """sample in validation; false means greedy at any temperature"""


class RolloutConfig(Section):
    """Rollout workers and their engines.

    Each rollout worker is a Ray actor with one engine. Training uses no top_k and no top_p.
    """

    mode: Annotated[Literal["async", "sync"], Unused("engines are always asynchronous", VERL)] = (
        "async"
    )
    """calls of the engine: asynchronous or synchronous"""
    name: Annotated[str, RunsCode(only_import_paths=True)] = "vllm"
    """engine: vllm, hf (needs no vLLM), a registered name, or the import path of a class,
    module:Class"""
    temperature: NonNegative = 1.0
    """sampling temperature in training"""
    top_k: Annotated[int, Ge(-1)] = -1
    """number of most likely tokens to sample from; training requires -1, which is all"""
    top_p: Share = 1.0
    """probability mass of the tokens to sample from; training requires 1, which is all"""
    n: PositiveInt = 1
    """samples per prompt of data files; environments use env.rollout.n"""
    do_sample: bool = True
    """sample in training; false means greedy"""
    dtype: EngineDtype = "bfloat16"
    """dtype of the engine's weights"""
    seed: Seed = 0
    """base of the sampling seeds"""
    num_workers: PositiveInt | None = None
    """rollout workers (engines); null: one per GPU, without GPUs one per node"""
    num_threads: PositiveInt | None = None
    """CPU threads per engine; null: the node's cores divided by its engines"""
    kv_cache_gb: NonNegative | None = None
    """KV cache on each device of an engine, GiB; null: 1 on CPU, the rest of
    gpu_memory_utilization on a GPU"""
    gpu_memory_utilization: Annotated[Share, GpuOnly()] = 0.5
    """share of a GPU's memory that the engine may use"""
    tensor_model_parallel_size: Annotated[PositiveInt, GpuOnly()] = 1
    """GPUs of an engine; they are on one node"""
    nnodes: Annotated[NonNegativeInt, GpuOnly()] = 0
    """nodes with GPUs only for engines; 0: engines share the GPUs of the training ranks"""
    n_gpus_per_node: Annotated[PositiveInt | None, GpuOnly()] = None
    """GPUs for the engines on each of rollout.nnodes; null: trainer.n_gpus_per_node"""
    weight_transfer: WeightTransfer = "auto"
    """transport of weights to engines: store (Ray's object store), ipc (on shared GPUs), nccl (to
    separate GPUs); auto: ipc or nccl for vllm, else store"""
    lora_sync: LoraSync = "auto"
    """what a weight sync sends with LoRA: adapter (only the adapter, after the base weights once),
    merged (all weights, with the adapter merged); auto: adapter where the engine supports it"""
    max_model_len: Derived[PositiveInt] = NULL
    """context length of the engine, in tokens; null: max_prompt_length + max_response_length"""
    max_num_seqs: PositiveInt = 256
    """sequences decoded at once"""
    max_num_batched_tokens: PositiveInt = 8192
    """tokens per engine step"""
    enforce_eager: bool | None = None
    """run vLLM without compilation and CUDA graphs; null: true on CPU, false on GPUs"""
    free_cache_engine: Annotated[bool, GpuOnly()] = True
    """put the engine to sleep while the policy is updated, if they share GPUs"""
    enable_chunked_prefill: bool = True
    """split long prompts over engine steps"""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """rows per forward pass for old log-probs; null: actor.ppo_micro_batch_size_per_gpu"""
    log_prob_use_dynamic_bsz: Derived[bool] = NULL
    """form micro-batches of the old-log-prob pass by tokens; null: actor.use_dynamic_bsz"""
    log_prob_max_token_len_per_gpu: Derived[PositiveInt] = NULL
    """tokens per micro-batch of the old-log-prob pass; null: actor.ppo_max_token_len_per_gpu"""
    engine_kwargs: Annotated[dict[str, Any], RunsCode()] = {}
    """further arguments of the engine's constructor"""
    val_kwargs: ValSamplingConfig = ValSamplingConfig()
    """sampling in validation"""
