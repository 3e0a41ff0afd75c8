"""Agents: map the messages of a conversation to the next action and its sampled tokens."""

from agent_system.agents.base import (
    Action,
    Agent,
    BatchAgent,
    Conversation,
    Message,
    TextAgent,
    get_actions,
)
from agent_system.agents.direct import DirectOutputAgent, LanguageModel

__all__ = [
    "Action",
    "Agent",
    "BatchAgent",
    "Conversation",
    "DirectOutputAgent",
    "LanguageModel",
    "Message",
    "TextAgent",
    "get_actions",
]
