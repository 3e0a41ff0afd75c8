"""Worker groups as Ray actors: resource pools, groups, colocation of roles, and starting Ray itself."""

import importlib

_HOMES = {
    "RayClassWithInitArgs": "worker_group",
    "RayResourcePool": "resource_pool",
    "RayWorkerGroup": "worker_group",
    "create_colocated_worker_cls": "worker_group",
    "init_ray": "local",
    "ray_get": "calls",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
