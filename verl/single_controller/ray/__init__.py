"""Worker groups of Ray actors: resource pools, groups, colocation of roles, and start of Ray."""

from verl.utils.lazy import make_lazy_exports

__getattr__, __all__ = make_lazy_exports(
    __name__,
    {
        "RayClassWithInitArgs": "worker_group",
        "RayResourcePool": "resource_pool",
        "RayWorkerGroup": "worker_group",
        "create_colocated_worker_cls": "worker_group",
        "init_ray": "local",
        "ray_get": "calls",
    },
)
