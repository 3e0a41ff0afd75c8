"""Agents: map the messages of a conversation to the next action and its sampled tokens."""

from agent_system.agents.base import Action, Agent, BatchAgent, Conversation, Message, TextAgent
from agent_system.agents.batched_actions import get_actions
from agent_system.agents.direct import DirectOutputAgent, LanguageModel
from agent_system.agents.engine import EngineAgent

__all__ = [
    "Action",
    "Agent",
    "BatchAgent",
    "Conversation",
    "DirectOutputAgent",
    "EngineAgent",
    "LanguageModel",
    "Message",
    "TextAgent",
    "get_actions",
]
