"""The ``env.reasoning_gym`` section."""

from typing import Any, ClassVar, Literal

from agent_system.environments.settings import GradedSettings
from verl.utils.settings import PositiveInt, Seed


class ReasoningGymSettings(GradedSettings):
    """Which generator asks, and how often."""

    variant_key: ClassVar[str] = "task"
    one_step: ClassVar[bool] = True

    task: str = "chain_sum"
    """reasoning-gym's name of the generator, as in env.env_name=reasoning_gym/countdown"""
    options: dict[str, dict[str, Any]] = {}
    """settings of generators by name, such as {chain_sum: {min_terms: 2, max_terms: 3}}"""
    train_tasks: PositiveInt = 2000
    """questions to train on"""
    val_tasks: PositiveInt = 512
    """questions held out"""
    task_seed: Seed = 0
    """seed of the questions, of both splits"""
    prompt: Literal["full", "compact"] = "full"
    """full: the question and how to answer, for chat models; compact: the question alone, its
    numbers digit by digit, for policies made by imitation"""

    def known_tasks(self, split: str) -> int | None:
        """How many questions ``split`` has, at most."""
        return self.val_tasks if split == "val" else self.train_tasks
