"""The ``env.number_line`` section."""

from typing import Literal

from agent_system.environments.settings import EnvSettings
from verl.config.settings import PositiveInt


class LineSettings(EnvSettings):
    """How long the line is and how much of it is played."""

    size: PositiveInt = 12
    """numbers go from 0 to size"""
    train_tasks: PositiveInt | None = None
    """training tasks, at most; null: all of them"""
    val_tasks: PositiveInt | None = None
    """validation tasks, at most; null: all of them"""
    prompt: Literal["full", "compact"] = "full"
    """full: rules and answer format for chat models; compact: observations alone, for policies made
    by imitation"""
