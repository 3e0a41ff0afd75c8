"""Workers, groups of workers and the registration of their methods; independent of what runs the
processes.
"""

from verl.utils.lazy import lazy

__getattr__, __all__ = lazy(
    __name__,
    {
        "Dispatch": "decorator",
        "Execute": "decorator",
        "GroupFuture": "worker_group",
        "Worker": "worker",
        "WorkerDiedError": "errors",
        "WorkerError": "errors",
        "WorkerGroup": "worker_group",
        "WorkerTimeoutError": "errors",
        "register": "decorator",
    },
)
