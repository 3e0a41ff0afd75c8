"""Environments: the protocol, the registry, the process pool and the manager of groups.

Names are imported on first use, so that a worker process imports only its own environment.
"""

from verl.utils.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "Decision": "expert_protocol",
        "Env": "env",
        "EnvPackage": "package",
        "EpisodeStart": "expert_protocol",
        "Expert": "expert_protocol",
        "EnvSettings": "settings",
        "Noise": "expert_protocol",
        "Observation": "env",
        "Prompts": "prompts",
        "ChatPrompts": "chat_prompts",
        "CompactPrompts": "chat_prompts",
        "project": "chat_prompts",
        "Tried": "agent_system.environments.experts.interface",
        "disturbed": "agent_system.environments.experts.interface",
        "shortest_way": "agent_system.environments.experts.interface",
        "EnvFailure": "agent_system.environments.pool.failure",
        "EnvironmentPool": "agent_system.environments.pool.environment_pool",
        "EnvironmentManagerBase": "manager",
        "make_envs": "manager",
        "get_package": "env_registry",
        "register_env": "env_registry",
    },
)
