"""User-provided agents. They query the policy through the server in ``agent_system.endpoint``."""
