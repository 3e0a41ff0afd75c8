"""``actor_rollout_ref``: the policy as it is trained (actor), compared with (ref) and played
(rollout).
"""

from dataclasses import dataclass

from verl.trainer.config.schema.field import opt, section
from verl.trainer.config.schema.model import (
    TRAIN_DTYPES,
    CheckpointConfig,
    FSDPConfig,
    ModelConfig,
    OptimConfig,
)
from verl.trainer.config.schema.rollout import RolloutConfig

LOSS_AGG_MODES = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
POLICY_LOSSES = ("vanilla",)
STRATEGIES = ("fsdp2", "fsdp")


@dataclass
class PolicyLossConfig:
    """Which policy loss is minimised."""

    loss_mode: str = opt("vanilla", "name in the policy-loss registry")


@dataclass
class ActorConfig:
    """Losses, batches and optimiser of the policy.

    Batch sizes in tasks, micro-batches in rows per device.
    """

    strategy: str = opt(
        "fsdp2", "how the model is sharded; fsdp means fsdp2 as well", choices=STRATEGIES
    )
    dtype: str = opt("bfloat16", "compute dtype; master weights stay float32", choices=TRAIN_DTYPES)
    ppo_mini_batch_size: int = opt(
        256, "tasks per optimizer step, times the group size; capped at the batch", low=1
    )
    ppo_mini_batches: int | None = opt(
        None, "optimizer steps per epoch; overrides ppo_mini_batch_size", low=1
    )
    ppo_micro_batch_size_per_gpu: int | None = opt(8, "rows per forward/backward and device", low=1)
    use_dynamic_bsz: bool = opt(
        False, "form micro-batches by tokens (ppo_max_token_len_per_gpu), not by rows"
    )
    ppo_max_token_len_per_gpu: int = opt(
        16384, "tokens per micro-batch and device with use_dynamic_bsz", low=1
    )
    ppo_epochs: int = opt(1, "passes over the rows of an iteration", low=1)
    grad_clip: float = opt(1.0, "largest gradient norm", low=0)
    clip_ratio: float = opt(0.2, "PPO clip range on both sides", low=0)
    clip_ratio_low: float | None = opt(None, "clip range below 1; null: clip_ratio", low=0)
    clip_ratio_high: float | None = opt(None, "clip range above 1; null: clip_ratio", low=0)
    clip_ratio_c: float = opt(3.0, "dual clip: bound of the ratio for negative advantages", low=1)
    loss_agg_mode: str = opt(
        "token-mean", "how token losses become one number", choices=LOSS_AGG_MODES
    )
    loss_scale_factor: float | None = opt(
        None,
        "what seq-mean-token-sum-norm divides token sums by; null: data.max_response_length",
        low=1,
    )
    entropy_coeff: float = opt(0.0, "weight of the entropy bonus")
    use_kl_loss: bool = opt(False, "add a KL term to the reference policy to the loss")
    kl_loss_coef: float = opt(0.001, "its weight", low=0)
    kl_loss_type: str = opt("low_var_kl", "its estimator", choices=KL_TYPES)
    use_invalid_action_penalty: bool = opt(False, "subtract a reward for each invalid action")
    invalid_action_penalty_coef: float = opt(0.1, "that reward", low=0)
    policy_loss: PolicyLossConfig = section(PolicyLossConfig, "which policy loss is minimised")
    shuffle: bool = opt(False, "cut other mini-batches in every one of ppo_epochs")
    ulysses_sequence_parallel_size: int = opt(
        1, "sequence parallelism", unused="rows are not split over devices"
    )
    use_torch_compile: bool = opt(False, "compile the model", unused="the model runs eagerly")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what a checkpoint holds")
    optim: OptimConfig = section(OptimConfig, "AdamW and its schedule")
    fsdp_config: FSDPConfig = section(FSDPConfig, "placement of parameters and optimiser state")


@dataclass
class RefConfig:
    """The frozen reference policy; it exists only where a KL term is used."""

    strategy: str = opt("fsdp2", "how the model is sharded", choices=STRATEGIES)
    dtype: str | None = opt(None, "compute dtype; null: the actor's", choices=TRAIN_DTYPES)
    log_prob_micro_batch_size_per_gpu: int | None = opt(
        None, "rows per forward and device; null: the actor's", low=1
    )
    log_prob_use_dynamic_bsz: bool | None = opt(
        None, "form micro-batches by tokens; null: the actor's"
    )
    log_prob_max_token_len_per_gpu: int | None = opt(
        None, "tokens per micro-batch; null: the actor's", low=1
    )
    fsdp_config: FSDPConfig = section(FSDPConfig, "placement of parameters")


@dataclass
class ActorRolloutRefConfig:
    """Everything about the policy."""

    model: ModelConfig = section(ModelConfig, "which policy is trained and how it is loaded")
    actor: ActorConfig = section(ActorConfig, "losses, batches and optimiser")
    ref: RefConfig = section(RefConfig, "the frozen reference policy")
    rollout: RolloutConfig = section(RolloutConfig, "the engine that samples")
