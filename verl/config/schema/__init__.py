"""The typed configuration: a pydantic model per section, every key with type, default and doc.

``PPOConfig`` is what ``main_ppo`` and ``main_eval`` read, ``SFTConfig`` what ``main_sft`` reads.
"""

from verl.config.schema.actor import (
    ActorConfig,
    ActorRolloutRefConfig,
    PolicyLossConfig,
    RefConfig,
)
from verl.config.schema.algorithm import AlgorithmConfig, GiGPOConfig, KLControl
from verl.config.schema.critic import CriticConfig, CustomRewardFunction, RewardModelConfig
from verl.config.schema.data import DataConfig
from verl.config.schema.env import EnvConfig
from verl.config.schema.model import FSDPConfig, ModelConfig, OptimConfig
from verl.config.schema.rollout import RolloutConfig, ValSamplingConfig
from verl.config.schema.sft import SFTConfig
from verl.config.schema.trainer import ColdStartConfig, RayInitConfig, TrainerConfig
from verl.config.settings import Section

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
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
    "RayInitConfig",
    "RefConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "SFTConfig",
    "TrainerConfig",
    "ValSamplingConfig",
]


class PPOConfig(Section):
    """Everything ``main_ppo`` reads."""

    data: DataConfig = DataConfig()
    """how much is trained on per iteration, how long rows may be"""
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    """the policy: trained, compared, played"""
    critic: CriticConfig = CriticConfig()
    """the value model (gae)"""
    reward_model: RewardModelConfig = RewardModelConfig()
    """rewards that a model or a manager gives"""
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()
    """a reward function of the user's own"""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """how rewards become advantages"""
    env: EnvConfig = EnvConfig()
    """the environment, its groups, its processes"""
    trainer: TrainerConfig = TrainerConfig()
    """schedule, devices and the run directory"""
    ray_init: RayInitConfig = RayInitConfig()
    """the Ray cluster: one of its own, or one to join"""
    cold_start: ColdStartConfig = ColdStartConfig()
    """a policy made by supervised learning when none exists"""
