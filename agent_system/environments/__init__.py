"""Environments: protocol, registry, process pool, and the manager that selects tasks for training.

Names are imported on first use, so that a worker process imports only its own environment.
"""

from verl.utils.lazy import make_lazy_exports

__getattr__, __all__ = make_lazy_exports(
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
        "Prompts": "env",
        "ChatPrompts": "chat_prompts",
        "CompactPrompts": "chat_prompts",
        "project_action": "chat_prompts",
        "LastActionText": "agent_system.environments.experts.expert_helpers",
        "add_noise": "agent_system.environments.experts.expert_helpers",
        "find_shortest_path": "agent_system.environments.experts.expert_helpers",
        "EnvFailure": "env",
        "EnvironmentPool": "agent_system.environments.pool.environment_pool",
        "EnvironmentManagerBase": "manager",
        "make_envs": "manager",
        "get_package": "env_registry",
        "register_env": "env_registry",
    },
)
