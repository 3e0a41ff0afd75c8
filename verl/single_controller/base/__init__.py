"""Workers, groups of workers and the registration of their methods; independent of what runs the processes."""

import importlib

_HOMES = {
    "Dispatch": "decorator",
    "Execute": "decorator",
    "GroupFuture": "worker_group",
    "Worker": "worker",
    "WorkerDiedError": "errors",
    "WorkerError": "errors",
    "WorkerGroup": "worker_group",
    "WorkerTimeoutError": "errors",
    "register": "decorator",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
