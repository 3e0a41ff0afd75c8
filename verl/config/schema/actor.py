"""Section ``actor_rollout_ref``: the policy in training (actor), reference and rollout engine."""

from typing import Annotated

from annotated_types import Ge, Gt

from verl.config.schema.model import CheckpointConfig, FSDPConfig, ModelConfig, OptimConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.settings import NULL, Derived, NonNegative, PositiveInt, Section, Share
from verl.names import KLEstimator, LossAggMode, Strategy, TrainDtype


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
    """kl_cov: weight of that penalty, which is the distance from the old log-prob"""


class ActorConfig(Section):
    """Losses, batches and optimiser of the policy.

    Batch sizes are in tasks, micro-batch sizes in rows per device.
    """

    strategy: Strategy = "fsdp2"
    """sharding of the model; fsdp also means fsdp2"""
    dtype: TrainDtype = "bfloat16"
    """compute dtype; master weights stay float32"""
    ppo_mini_batch_size: PositiveInt = 256
    """tasks per optimizer step, with all their trajectories; at most data.train_batch_size"""
    ppo_mini_batches: Derived[PositiveInt] = NULL
    """optimizer steps per epoch; overrides ppo_mini_batch_size"""
    # null is allowed with use_dynamic_bsz only; check_lengths refuses it otherwise.
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
    clip_ratio_c: Annotated[float, Ge(1)] = 3.0
    """dual clip: bound of the ratio for negative advantages; dppo: for all"""
    tau_pos: NonNegative = 1.0
    """sapo: slope tau of the sigmoid for tokens with positive advantage; with a larger tau the
    gradient falls faster as the ratio moves away from 1"""
    tau_neg: NonNegative = 1.05
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
