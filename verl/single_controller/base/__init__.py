"""Workers, worker groups and the registration of worker methods. Independent of Ray."""

from verl.utils.lazy import make_lazy_exports

__getattr__, __all__ = make_lazy_exports(
    __name__,
    {
        "Dispatch": "decorator",
        "Execute": "decorator",
        "GroupFuture": "worker_group",
        "Worker": "worker_group",
        "WorkerDiedError": "worker_group",
        "WorkerError": "worker_group",
        "WorkerGroup": "worker_group",
        "WorkerTimeoutError": "worker_group",
        "register": "decorator",
    },
)
