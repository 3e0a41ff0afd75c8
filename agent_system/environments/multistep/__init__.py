"""Trials of several episodes: the environment runs the whole interaction, tokens included."""

from agent_system.environments.multistep.env import MultistepEnv
from agent_system.tokens.conversation import Limits

__all__ = ["Limits", "MultistepEnv"]
