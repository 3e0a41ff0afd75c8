"""The typed configuration: a pydantic model per section, with types, defaults and help texts.

``main_ppo`` and ``main_eval`` read a ``PPOConfig``, ``main_sft`` reads an ``SFTConfig``.
"""

from verl.config.schema.actor_rollout_ref import ActorRolloutRefConfig
from verl.config.schema.algorithm import AlgorithmConfig
from verl.config.schema.critic import CriticConfig, CustomRewardFunction, RewardModelConfig
from verl.config.schema.env import DataConfig, EnvConfig
from verl.config.schema.sft import SFTConfig
from verl.config.schema.trainer import ColdStartConfig, RayInitConfig, TrainerConfig
from verl.config.settings import Section

__all__ = ["PPOConfig", "SFTConfig"]  # import section classes from the modules of this package


class PPOConfig(Section):
    """Configuration of training and evaluation: ``main_ppo`` and ``main_eval``."""

    data: DataConfig = DataConfig()
    """data files, batch size and length of rows"""
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    """the policy: actor, reference and rollout engine"""
    critic: CriticConfig = CriticConfig()
    """the value model (gae)"""
    reward_model: RewardModelConfig = RewardModelConfig()
    """reward model, reward manager and weights of rewards"""
    custom_reward_function: CustomRewardFunction = CustomRewardFunction()
    """a user-provided reward function"""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """advantage estimation and KL in the reward"""
    env: EnvConfig = EnvConfig()
    """the environment, its groups and its processes"""
    trainer: TrainerConfig = TrainerConfig()
    """schedule, devices and the run directory"""
    ray_init: RayInitConfig = RayInitConfig()
    """the Ray cluster: a local one, or one to join"""
    cold_start: ColdStartConfig = ColdStartConfig()
    """supervised training of a policy if there is none"""
