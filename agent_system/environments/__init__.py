"""Environments: the protocol, the registry, the process pool and the grouped manager.

Names are resolved on first use, so that an environment worker imports only what it plays.
"""

import importlib

_HOME = {
    "Env": "base",
    "EnvPackage": "base",
    "Observation": "base",
    "Prompts": "base",
    "EnvFailure": "pool",
    "EnvironmentPool": "pool",
    "EnvironmentManagerBase": "manager",
    "make_envs": "manager",
    "get_package": "registry",
    "register_env": "registry",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
