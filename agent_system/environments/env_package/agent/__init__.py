"""User-provided agents, which generate episodes with ``agent_system.endpoint``."""
