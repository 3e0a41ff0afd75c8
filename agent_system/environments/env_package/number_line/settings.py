"""Settings of the config section ``env.number_line``."""

from agent_system.environments.settings import PromptSettings
from verl.config.settings import PositiveInt


class LineSettings(PromptSettings):
    """Length of the line and number of tasks."""

    size: PositiveInt = 12
    """numbers go from 0 to size"""
    train_tasks: PositiveInt | None = None
    """maximum number of training tasks; null: all of them"""
    val_tasks: PositiveInt | None = None
    """maximum number of validation tasks; null: all of them"""
