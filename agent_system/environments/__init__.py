"""Environments: the protocol, the registry, the process pool and the grouped manager.

Names are resolved on first use, so that an environment worker imports only what it plays.
"""

from verl.utils.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "Decision": "base",
        "Env": "base",
        "EnvPackage": "base",
        "EpisodeStart": "base",
        "Expert": "base",
        "EnvSettings": "settings",
        "Noise": "base",
        "Observation": "base",
        "Prompts": "base",
        "ChatPrompts": "chat_prompts",
        "CompactPrompts": "chat_prompts",
        "project": "chat_prompts",
        "Tried": f"{__name__}.experts.interface",
        "disturbed": f"{__name__}.experts.interface",
        "shortest_way": f"{__name__}.experts.interface",
        "EnvFailure": f"{__name__}.pool.failure",
        "EnvironmentPool": f"{__name__}.pool.environment_pool",
        "EnvironmentManagerBase": "manager",
        "make_envs": "manager",
        "get_package": "env_registry",
        "register_env": "env_registry",
    },
)
