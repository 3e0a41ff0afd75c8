"""What of the past an agent sees."""

from agent_system.memory.window import WindowMemory

__all__ = ["WindowMemory"]
