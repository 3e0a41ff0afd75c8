"""``critic``, ``reward_model`` and ``custom_reward_function``: where values and extra rewards come
from.
"""

from dataclasses import dataclass
from typing import Any

from verl.trainer.config.schema.actor import LOSS_AGG_MODES, STRATEGIES
from verl.trainer.config.schema.field import opt, section
from verl.trainer.config.schema.model import (
    TRAIN_DTYPES,
    CheckpointConfig,
    CriticModelConfig,
    OptimConfig,
)

UNUSED_REWARD_MODEL = (
    "no reward model is run; environments and custom_reward_function give the reward"
)


@dataclass
class CriticConfig:
    """The value model; it exists only where the estimator needs values (gae)."""

    enable: bool | None = opt(None, "null: follows algorithm.adv_estimator")
    strategy: str = opt("fsdp2", "how the model is sharded", choices=STRATEGIES)
    dtype: str | None = opt(None, "compute dtype; null: the actor's", choices=TRAIN_DTYPES)
    ppo_mini_batch_size: int | None = opt(None, "as the actor's; null: the actor's", low=1)
    ppo_mini_batches: int | None = opt(None, "optimizer steps per epoch; null: the actor's", low=1)
    ppo_micro_batch_size_per_gpu: int | None = opt(
        None, "rows per forward/backward; null: the actor's", low=1
    )
    forward_micro_batch_size_per_gpu: int | None = opt(
        None, "rows per forward; null: as above", low=1
    )
    use_dynamic_bsz: bool | None = opt(None, "form micro-batches by tokens; null: the actor's")
    ppo_max_token_len_per_gpu: int | None = opt(
        None, "tokens per micro-batch; null: the actor's", low=1
    )
    forward_max_token_len_per_gpu: int | None = opt(
        None, "tokens per forward; null: as above", low=1
    )
    ppo_epochs: int | None = opt(None, "passes over the rows; null: the actor's", low=1)
    shuffle: bool = opt(False, "cut other mini-batches in every one of ppo_epochs")
    grad_clip: float = opt(1.0, "largest gradient norm", low=0)
    cliprange_value: float = opt(
        0.5, "how far a value may move from the old one before it is clipped", low=0
    )
    loss_agg_mode: str = opt(
        "token-mean", "how token losses become one number", choices=LOSS_AGG_MODES
    )
    loss_scale_factor: float | None = opt(
        None, "as the actor's; null: data.max_response_length", low=1
    )
    ulysses_sequence_parallel_size: int = opt(
        1, "sequence parallelism", unused="rows are not split over devices"
    )
    optim: OptimConfig = section(lambda: OptimConfig(lr=1e-5), "AdamW and its schedule")
    model: CriticModelConfig = section(CriticModelConfig, "the value model")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "what a checkpoint holds")


@dataclass
class RewardModelConfig:
    """Rewards that a model or a manager gives."""

    enable: bool = opt(False, "run a reward model (refused: none can be run)")
    reward_manager: str = opt("episode", "how an episode's rewards are placed on tokens")
    reward_kwargs: dict[str, Any] = opt({}, "passed to the reward manager")
    strategy: str = opt(
        "fsdp2", "how the model is sharded", choices=STRATEGIES, unused=UNUSED_REWARD_MODEL
    )
    micro_batch_size_per_gpu: int | None = opt(
        None, "rows per forward", low=1, unused=UNUSED_REWARD_MODEL
    )
    use_dynamic_bsz: bool | None = opt(None, "micro-batches by tokens", unused=UNUSED_REWARD_MODEL)
    forward_max_token_len_per_gpu: int | None = opt(
        None, "tokens per forward", unused=UNUSED_REWARD_MODEL
    )
    max_length: int | None = opt(None, "longest input", unused=UNUSED_REWARD_MODEL)
    launch_reward_fn_async: bool = opt(
        False, "score while other work goes on", unused="rewards are immediate"
    )
    model: dict[str, Any] = opt(
        {}, "the network: path, input_tokenizer, ...", unused=UNUSED_REWARD_MODEL
    )


@dataclass
class CustomRewardFunction:
    """A reward function of the user's own."""

    path: str | None = opt(None, "Python file that defines it")
    name: str = opt("compute_score", "name of the function in that file")
