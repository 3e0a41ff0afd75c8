"""The typed configuration: one dataclass per section, every key with its type, default and one-line
doc.

``PPOConfig`` is what ``main_ppo`` and ``main_eval`` read, ``SFTConfig`` what ``main_sft`` reads.
"""

from dataclasses import dataclass

from verl.trainer.config.schema.actor import (
    ActorConfig,
    ActorRolloutRefConfig,
    PolicyLossConfig,
    RefConfig,
)
from verl.trainer.config.schema.algorithm import (
    AlgorithmConfig,
    GiGPOConfig,
    KLControl,
    RLVCRConfig,
)
from verl.trainer.config.schema.critic import CriticConfig, CustomRewardFunction, RewardModelConfig
from verl.trainer.config.schema.data import DataConfig
from verl.trainer.config.schema.env import AlfworldConfig, EnvConfig
from verl.trainer.config.schema.field import section
from verl.trainer.config.schema.model import FSDPConfig, ModelConfig, OptimConfig
from verl.trainer.config.schema.rollout import RolloutConfig, ValSamplingConfig
from verl.trainer.config.schema.sft import SFTConfig
from verl.trainer.config.schema.trainer import ColdStartConfig, RayInitConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlfworldConfig",
    "AlgorithmConfig",
    "ColdStartConfig",
    "CriticConfig",
    "CustomRewardFunction",
    "DataConfig",
    "EnvConfig",
    "FSDPConfig",
    "GiGPOConfig",
    "KLControl",
    "ModelConfig",
    "OptimConfig",
    "PPOConfig",
    "PolicyLossConfig",
    "RLVCRConfig",
    "RayInitConfig",
    "RefConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "SFTConfig",
    "TrainerConfig",
    "ValSamplingConfig",
]


@dataclass
class PPOConfig:
    """Everything ``main_ppo`` reads."""

    data: DataConfig = section(
        DataConfig, "how much is trained on per iteration, how long rows may be"
    )
    actor_rollout_ref: ActorRolloutRefConfig = section(
        ActorRolloutRefConfig, "the policy: trained, compared, played"
    )
    critic: CriticConfig = section(CriticConfig, "the value model (gae)")
    reward_model: RewardModelConfig = section(
        RewardModelConfig, "rewards that a model or a manager gives"
    )
    custom_reward_function: CustomRewardFunction = section(
        CustomRewardFunction, "a reward function of the user's own"
    )
    algorithm: AlgorithmConfig = section(AlgorithmConfig, "how rewards become advantages")
    env: EnvConfig = section(EnvConfig, "the environment, its groups, its processes")
    trainer: TrainerConfig = section(TrainerConfig, "schedule, devices and the run directory")
    ray_init: RayInitConfig = section(
        RayInitConfig, "the Ray cluster: one of its own, or one to join"
    )
    cold_start: ColdStartConfig = section(
        ColdStartConfig, "a policy made by supervised learning when none exists"
    )
