"""Environments that run whole trials of an agent: one or more episodes of a task."""

from agent_system.environments.multistep.env import MultistepEnv
from agent_system.tokens.conversation import TokenLimits

__all__ = ["MultistepEnv", "TokenLimits"]
