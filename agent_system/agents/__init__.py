"""Agents: from what was said so far to an action, with the tokens it was sampled as."""

from agent_system.agents.base import Action
from agent_system.agents.direct import DirectOutputAgent

__all__ = ["Action", "DirectOutputAgent"]
