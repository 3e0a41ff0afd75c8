"""Settings of the config section ``env.number_line``."""

from typing import Literal

from agent_system.environments.settings import EnvSettings
from verl.config.settings import PositiveInt


class LineSettings(EnvSettings):
    """Length of the line and number of tasks."""

    size: PositiveInt = 12
    """numbers go from 0 to size"""
    train_tasks: PositiveInt | None = None
    """maximum number of training tasks; null: all of them"""
    val_tasks: PositiveInt | None = None
    """maximum number of validation tasks; null: all of them"""
    prompt: Literal["full", "compact"] = "full"
    """full: rules and answer format for chat models; compact: observations only, for policies
    trained by imitation"""
