"""Trials of several episodes. The environment runs the whole interaction and keeps the tokens."""

from agent_system.environments.multistep.env import MultistepEnv
from agent_system.tokens.conversation import TokenLimits

__all__ = ["MultistepEnv", "TokenLimits"]
