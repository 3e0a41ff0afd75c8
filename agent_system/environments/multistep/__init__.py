"""Trials: several episodes of one task in one conversation. The environment runs the agent's turns
and stores all tokens.
"""

from agent_system.environments.multistep.env import MultistepEnv
from agent_system.tokens.conversation import TokenLimits

__all__ = ["MultistepEnv", "TokenLimits"]
