"""Section ``actor_rollout_ref``: the policy in training (actor), reference and rollout engine."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from verl.config.schema.model import CheckpointConfig, FSDPConfig, ModelConfig, OptimConfig
from verl.config.settings import (
    NULL,
    VERL,
    Derived,
    GpuOnly,
    NamesCode,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Section,
    Seed,
    Share,
    Unused,
)
from verl.names import (
    EngineDtype,
    KLEstimator,
    LoraSync,
    LossAggMode,
    Strategy,
    TrainDtype,
    WeightTransfer,
)


class PolicyLossConfig(Section):
    """Name and parameters of the policy loss."""

    loss_mode: str = "vanilla"
    """name in the policy-loss registry"""
    clip_cov_ratio: Share = 0.0002
    """clip_cov: share of a mini-batch's tokens that is excluded from the loss"""
    clip_cov_lb: NonNegative = 1.0
    """clip_cov: least covariance of log-prob and advantage of a token that may be excluded"""
    clip_cov_ub: NonNegative = 5.0
    """clip_cov: largest covariance of a token that may be excluded"""
    kl_cov_ratio: Share = 0.0002
    """kl_cov: share of a mini-batch's tokens with a penalty on the change of their log-prob"""
    ppo_kl_coef: NonNegative = 1.0
    """kl_cov: weight of the penalty of kl_cov_ratio, which is the distance from the old log-prob"""


class ActorConfig(Section):
    """Losses, batches and optimiser of the policy."""

    strategy: Strategy = "fsdp2"
    """sharding of the model; fsdp also means fsdp2"""
    dtype: TrainDtype = "bfloat16"
    """compute dtype; master weights stay float32"""
    ppo_mini_batch_size: PositiveInt = 256
    """tasks per optimizer step, with all their trajectories; at most data.train_batch_size"""
    ppo_mini_batches: Derived[PositiveInt] = NULL
    """optimizer steps per epoch; overrides ppo_mini_batch_size"""
    # null is allowed with use_dynamic_bsz only; check_row_lengths refuses it otherwise.
    ppo_micro_batch_size_per_gpu: PositiveInt | None = 8
    """rows per forward/backward and device"""
    use_dynamic_bsz: bool = False
    """form micro-batches by tokens (ppo_max_token_len_per_gpu), not by rows"""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """tokens per micro-batch and device with use_dynamic_bsz"""
    ppo_epochs: PositiveInt = 1
    """epochs of updates on the rows of a training step"""
    grad_clip: Annotated[float, Gt(0)] = 1.0
    """largest gradient norm"""
    clip_ratio: NonNegative = 0.2
    """PPO clip range below and above a ratio of 1"""
    clip_ratio_low: Derived[NonNegative] = NULL
    """clip range below 1; null: clip_ratio"""
    clip_ratio_high: Derived[NonNegative] = NULL
    """clip range above 1; null: clip_ratio"""
    # With 1, tokens that have a negative advantage and a ratio above 1 would have no gradient.
    clip_ratio_c: Annotated[float, Gt(1)] = 3.0
    """dual clip: largest ratio of tokens with negative advantage; dppo: of all tokens"""
    tau_pos: Annotated[float, Gt(0)] = 1.0
    """sapo: slope tau of the sigmoid for tokens with positive advantage; with a larger tau the
    gradient falls faster as the ratio moves away from 1"""
    tau_neg: Annotated[float, Gt(0)] = 1.05
    """sapo: slope tau of the sigmoid for tokens with negative advantage"""
    loss_agg_mode: LossAggMode = "token-mean"
    """aggregation of token losses to one number"""
    loss_scale_factor: Derived[Annotated[float, Ge(1)]] = NULL
    """divisor of token sums in seq-mean-token-sum-norm; null: data.max_response_length"""
    entropy_coeff: float = 0.0
    """weight of the entropy bonus"""
    skip_without_advantage: bool = False
    """skip mini-batches in which no token has an advantage, even if the loss has an entropy bonus
    or a KL term: AdamW scales even a tiny gradient to a full-size update"""
    use_kl_loss: bool = False
    """add a KL term to the reference policy to the loss"""
    kl_loss_coef: NonNegative = 0.001
    """weight of the KL term in the loss"""
    kl_loss_type: KLEstimator = "low_var_kl"
    """estimator of the KL term in the loss"""
    use_invalid_action_penalty: bool = False
    """subtract a reward for each invalid action"""
    invalid_action_penalty_coef: NonNegative = 0.1
    """reward that is subtracted for an invalid action"""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """name and parameters of the policy loss"""
    shuffle: bool = False
    """form different mini-batches in each of ppo_epochs"""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """neighbouring ranks that compute a row together, each a slice of its tokens and a share of the
    attention heads; for policy and reference"""
    use_torch_compile: bool = False
    """compile the layers of the policy and of the reference (torch.compile), one by one"""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """contents of a checkpoint"""
    optim: OptimConfig = OptimConfig()
    """AdamW and its schedule"""
    fsdp_config: FSDPConfig = FSDPConfig()
    """placement of parameters and optimiser state"""


class RefConfig(Section):
    """The frozen reference policy; it exists only if a KL term is used."""

    strategy: Strategy = "fsdp2"
    """sharding of the model"""
    dtype: Derived[TrainDtype] = NULL
    """compute dtype of the reference policy; null: actor.dtype"""
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """rows per forward pass and device; null: actor.ppo_micro_batch_size_per_gpu"""
    log_prob_use_dynamic_bsz: Derived[bool] = NULL
    """form micro-batches by tokens; null: actor.use_dynamic_bsz"""
    log_prob_max_token_len_per_gpu: Derived[PositiveInt] = NULL
    """tokens per micro-batch; null: actor.ppo_max_token_len_per_gpu"""
    fsdp_config: FSDPConfig = FSDPConfig()
    """placement of parameters"""


class ValSamplingConfig(Section):
    """Sampling parameters and number of trajectories in validation."""

    temperature: NonNegative = 0.0
    """sampling temperature in validation; 0 is greedy, other values are 0.01 or more"""
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
    """Rollout workers and their engines. Each rollout worker is a Ray actor with one engine."""

    mode: Annotated[Literal["async", "sync"], Unused("engines are always asynchronous", VERL)] = (
        "async"
    )
    """calls of the engine: asynchronous or synchronous"""
    name: Annotated[str, NamesCode(only_import_paths=True)] = "vllm"
    """engine: vllm, hf (needs no vLLM), a registered name, or the import path of a class,
    module:Class"""
    temperature: NonNegative = 1.0
    """sampling temperature in training, 0.01 or more"""
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
    engine_kwargs: Annotated[dict[str, Any], NamesCode()] = {}
    """further arguments of the engine's constructor"""
    val_kwargs: ValSamplingConfig = ValSamplingConfig()
    """sampling in validation"""


class ActorRolloutRefConfig(Section):
    """The policy: model, actor, reference and rollout engine."""

    model: ModelConfig = ModelConfig()
    """path and loading of the policy"""
    actor: ActorConfig = ActorConfig()
    """losses, batches and optimiser"""
    ref: RefConfig = RefConfig()
    """the frozen reference policy"""
    rollout: RolloutConfig = RolloutConfig()
    """the rollout engine"""
