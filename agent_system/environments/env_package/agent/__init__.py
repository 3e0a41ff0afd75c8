"""Agents of one's own, which play through the endpoint (``agent_system.endpoint``)."""
