"""Sections ``critic``, ``reward_model`` and ``custom_reward_function`` of the configuration."""

from typing import Annotated, Any

from annotated_types import Ge, Gt

from verl.config.schema.model import CheckpointConfig, CriticModelConfig, OptimConfig
from verl.config.settings import (
    NULL,
    VERL,
    Derived,
    NamesCode,
    NonNegative,
    PositiveInt,
    Section,
    Unused,
)
from verl.names import LossAggMode, Strategy, TrainDtype

UNUSED_REWARD_MODEL_SHARDING = Unused("every rank holds the whole reward model", VERL)
UNUSED_REWARD_MODEL_TOKEN_BATCHES = Unused(
    "it scores reward_model.micro_batch_size_per_gpu conversations at once", VERL
)
UNUSED_REWARD_MODEL_TOKENIZER = Unused(
    "conversations come as messages, which the reward model's own tokenizer renders", VERL
)


class CriticConfig(Section):
    """The value model; it exists only if the estimator needs values (gae)."""

    enable: Derived[bool] = NULL
    """train a value model; null: true if algorithm.adv_estimator is gae"""
    strategy: Strategy = "fsdp2"
    """sharding of the model"""
    dtype: Derived[TrainDtype] = NULL
    """compute dtype of the value model; null: actor.dtype"""
    ppo_mini_batch_size: Derived[PositiveInt] = NULL
    """tasks per optimizer step of the critic; null: actor.ppo_mini_batch_size"""
    ppo_mini_batches: Derived[PositiveInt] = NULL
    """optimizer steps of the critic per epoch; null: actor.ppo_mini_batches"""
    ppo_micro_batch_size_per_gpu: PositiveInt | None = None
    """rows per forward/backward; null: actor.ppo_micro_batch_size_per_gpu"""
    forward_micro_batch_size_per_gpu: PositiveInt | None = None
    """rows per forward pass; null: critic.ppo_micro_batch_size_per_gpu"""
    use_dynamic_bsz: Derived[bool] = NULL
    """form micro-batches by tokens; null: actor.use_dynamic_bsz"""
    ppo_max_token_len_per_gpu: Derived[PositiveInt] = NULL
    """tokens per forward/backward; null: actor.ppo_max_token_len_per_gpu"""
    forward_max_token_len_per_gpu: Derived[PositiveInt] = NULL
    """tokens per forward pass; null: critic.ppo_max_token_len_per_gpu"""
    ppo_epochs: Derived[PositiveInt] = NULL
    """epochs of critic updates on the rows of a training step; null: actor.ppo_epochs"""
    shuffle: bool = False
    """form different mini-batches in each of ppo_epochs"""
    ulysses_sequence_parallel_size: PositiveInt = 1
    """neighbouring ranks that compute a row together"""
    grad_clip: Annotated[float, Gt(0)] = 1.0
    """largest gradient norm"""
    cliprange_value: NonNegative = 0.5
    """largest difference from the old value; larger ones are clipped"""
    loss_agg_mode: LossAggMode = "token-mean"
    """aggregation of token losses to one number"""
    loss_scale_factor: Derived[Annotated[float, Ge(1)]] = NULL
    """divisor of token sums in seq-mean-token-sum-norm; null: data.max_response_length"""
    optim: OptimConfig = OptimConfig(lr=1e-05)
    """AdamW and its schedule"""
    model: CriticModelConfig = CriticModelConfig()
    """the value model"""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """contents of a checkpoint"""


class UnusedRewardShardingConfig(Section):
    """Keys of ``reward_model.model.fsdp_config``, all without effect."""

    param_offload: Annotated[bool, UNUSED_REWARD_MODEL_SHARDING] = False
    """keep parameters in host memory between passes"""
    reshard_after_forward: Annotated[bool, UNUSED_REWARD_MODEL_SHARDING] = True
    """free gathered parameters between passes"""
    fsdp_size: Annotated[int, UNUSED_REWARD_MODEL_SHARDING] = -1
    """ranks that share one copy of the parameters"""


class RewardNetworkConfig(Section):
    """Reward model network: a transformers model for sequence classification with one label."""

    input_tokenizer: Annotated[str | None, UNUSED_REWARD_MODEL_TOKENIZER] = None
    """the policy's tokenizer"""
    use_remove_padding: Annotated[bool, Unused("rows are padded on the right", VERL)] = False
    """compute without padding tokens"""
    fsdp_config: UnusedRewardShardingConfig = UnusedRewardShardingConfig()
    """sharding of the model"""
    path: str | None = None
    """directory (or hub name) of the reward model"""
    trust_remote_code: Annotated[bool, NamesCode()] = False
    """run Python code that ships with the model"""


class RewardModelConfig(Section):
    """Reward model, reward manager and weights of rewards."""

    strategy: Annotated[Strategy, UNUSED_REWARD_MODEL_SHARDING] = "fsdp2"
    """sharding of the model"""
    use_dynamic_bsz: Annotated[bool | None, UNUSED_REWARD_MODEL_TOKEN_BATCHES] = None
    """form micro-batches by tokens"""
    forward_max_token_len_per_gpu: Annotated[int | None, UNUSED_REWARD_MODEL_TOKEN_BATCHES] = None
    """tokens per forward pass"""
    launch_reward_fn_async: Annotated[bool, Unused("rewards are immediate", VERL)] = False
    """score trajectories concurrently with other work"""
    enable: bool = False
    """run a reward model, which scores the conversation of every trajectory"""
    model: RewardNetworkConfig = RewardNetworkConfig()
    """the network of the reward model"""
    dtype: Derived[TrainDtype] = NULL
    """dtype of the reward model; null: actor.dtype"""
    micro_batch_size_per_gpu: PositiveInt = 8
    """conversations per forward pass and device"""
    max_length: PositiveInt | None = None
    """longest conversation, in tokens; only the end of a longer one is read; null: any length"""
    weight: float = 1.0
    """weight of the reward model's score"""
    rule_weight: Derived[float] = NULL
    """weight of the reward from the environment or a function; null: 0 with a reward model, else
    1"""
    reward_manager: Annotated[str, NamesCode(only_import_paths=True)] = "episode"
    """class that assigns an episode's rewards to tokens: a registered name (naive and prime are
    aliases of episode), or an import path, module:Class or FILE.py:Class"""
    reward_kwargs: dict[str, Any] = {}
    """arguments of the reward manager"""
    weights: dict[str, float] = {}
    """weights of the rewards that custom_reward_function returns by name, as {accuracy: 1, format:
    0.2}; the score is their weighted sum; {}: the score is the reward called score"""


class CustomRewardFunction(Section):
    """A user-provided reward function.

    For a row of data.train_files it gets data_source, solution_str, ground_truth and extra_info,
    for a trajectory of an environment data_source, steps and extra_info.
    """

    path: Annotated[str | None, NamesCode()] = None
    """Python file that defines the reward function"""
    name: str = "compute_score"
    """name of the reward function in its file"""
    reward_kwargs: dict[str, Any] = {}
    """further arguments of the reward function"""
    timeout_s: Annotated[float, Gt(0)] = 30.0
    """deadline for scoring one trajectory, in seconds; after it the trajectory gets the mean of its
    group. For rows of files it sets env.dataset.grade_s (10 if neither is set), and a trajectory
    that is scored too late fails"""
