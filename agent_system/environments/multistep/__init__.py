"""Trials of several episodes: the environment runs the whole interaction, tokens included."""

from agent_system.environments.multistep.env import MultistepEnv
from agent_system.environments.multistep.transcript import Limits

__all__ = ["Limits", "MultistepEnv"]
