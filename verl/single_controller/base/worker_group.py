"""Worker, the base class of one rank, and WorkerGroup, which calls methods on all ranks.

Subclasses of WorkerGroup start the workers. Error messages name worker, rank and method.
"""

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from verl.config.settings.hints import did_you_mean
from verl.names import LISTEN_FD_VARIABLE
from verl.single_controller.base.decorator import (
    Call,
    Collect,
    Dispatch,
    MethodRegistration,
    collect_registered_methods,
    plan_calls,
    register,
)


class WorkerError(RuntimeError):
    """Error: a call on a group of workers could not be completed."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """Error: one or more workers did not answer before the deadline; they may still be running."""


class WorkerDiedError(WorkerError):
    """Error: the process of a worker has ended."""


class Worker:
    """One rank of a group.

    The environment variables ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``,
    ``MASTER_ADDR`` and ``MASTER_PORT`` are set before the constructor runs. Outside of a group a
    worker has rank 0 and world size 1.
    """

    @property
    def rank(self) -> int:
        """Return the index of this worker in the group, from 0."""
        return int(os.environ.get("RANK", "0"))

    @property
    def world_size(self) -> int:
        """Return the number of workers in the group."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def local_rank(self) -> int:
        """Return the index of this worker among the group's workers on the same node, from 0."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def device(self) -> Any:
        """Return the ``torch.device`` of this rank: its CUDA device if it has one, else the CPU."""
        import torch

        if not torch.cuda.is_available() or torch.cuda.device_count() == 0:
            return torch.device("cpu")
        # A Ray actor usually sees only the device assigned to it, as device 0.
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_process_group(self, backend: str | None, timeout_s: float) -> None:
        """Join the default ``torch.distributed`` process group; every rank has to call this.

        ``backend`` None means ``nccl`` if the rank has a CUDA device, else ``gloo``. Workers in one
        process share the process group, so a second call only checks the backend. ``timeout_s``
        limits the rendezvous and each collective. Raises ``RuntimeError`` if a group with another
        backend exists.
        """
        import torch
        import torch.distributed as dist

        device = self.device
        backend = backend or ("nccl" if device.type == "cuda" else "gloo")
        if dist.is_initialized():
            # Compare backend configurations, not names: "gloo" equals "cpu:gloo,cuda:gloo".
            requested_backend = dist.Backend(backend)
            requested_config = dist.BackendConfig(requested_backend)  # pyright: ignore[reportArgumentType]  a Backend
            if dist.get_backend_config() != str(requested_config):
                raise RuntimeError(
                    "the process group of this process has the backend "
                    f"{dist.get_backend_config()}, not {backend}, which was requested"
                )
            return
        if device.type == "cuda":
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=timeout_s)
        store = self._create_tcp_store(timeout)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout
        )

    def _create_tcp_store(self, timeout: timedelta) -> Any:
        import torch.distributed as dist

        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = int(os.environ.get("MASTER_PORT", "0"))
        listen_fd = os.environ.pop(LISTEN_FD_VARIABLE, None) if self.rank == 0 else None
        return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]  torch documents it
            address,
            port,
            world_size=self.world_size,
            is_master=self.rank == 0,
            timeout=timeout,
            # Use the socket that is already bound, so that no other process can take the port.
            master_listen_fd=int(listen_fd) if listen_fd is not None else None,
        )

    def close(self) -> None:
        """Release resources. Called once by ``WorkerGroup.shutdown``, not by ``kill``."""


class GroupFuture:
    """Future of the result of a group call.

    It can be passed as an argument to another group call, which waits for the result and uses it.
    The function ``wait(timeout_s)`` must return the list of the ranks' results, or raise an error.
    """

    def __init__(
        self, wait: Callable[[float], list[Any]], collect: Collect, timeout_s: float
    ) -> None:
        self._wait_for_results = wait
        self._collect = collect
        self._timeout_s = timeout_s
        self._group_result: Any = None
        self._is_ready = False

    def get(self, timeout_s: float | None = None) -> Any:
        """Return the result of the call. Wait at most ``timeout_s`` (None: the call's timeout)."""
        if not self._is_ready:
            results = self._wait_for_results(self._timeout_s if timeout_s is None else timeout_s)
            self._group_result = self._collect(results)
            self._is_ready = True
        return self._group_result


class WorkerGroup(ABC):
    """Group of workers, with a method for each registered method of ``worker_cls``."""

    def __init__(self, worker_cls: type, world_size: int, name: str, call_timeout_s: float) -> None:
        self.worker_cls = worker_cls
        self.name = name
        self.call_timeout_s = call_timeout_s
        self._world_size = world_size
        self._methods = collect_registered_methods(worker_cls)
        conflicting_methods = [method for method in self._methods if hasattr(type(self), method)]
        if conflicting_methods:
            raise ValueError(
                f"{worker_cls.__name__}: the registered methods {conflicting_methods} have names "
                "of WorkerGroup methods; fix: rename the methods of the worker"
            )
        for method, registration in self._methods.items():
            setattr(self, method, self._make_group_method(method, registration))

    @property
    def world_size(self) -> int:
        """Return the number of workers in the group."""
        return self._world_size

    def __getattr__(self, name: str) -> Any:
        # Python calls __getattr__ only for a name that is neither attribute nor registered method.
        # Use vars(): ``self._methods`` would recurse while a group is constructed or unpickled.
        hint = did_you_mean(name, vars(self).get("_methods", {}))
        worker_cls = vars(self).get("worker_cls")
        class_text = f" of {worker_cls.__name__}" if worker_cls else ""
        raise AttributeError(
            f"a group{class_text} has no attribute or registered method {name!r}{hint}"
        )

    def submit(self, method: str, *args: object, **kwargs: object) -> GroupFuture:
        """Start ``method`` on the ranks and return a future, even if its calls normally block."""
        if method not in self._methods:
            getattr(self, method)  # for an unknown name, the AttributeError suggests a similar one
            raise AttributeError(
                f"{method!r} is not a registered method of {self.worker_cls.__name__}"
            )
        return self._submit_call(method, self._methods[method], args, kwargs)

    def execute_all(self, method: str, *args: object, **kwargs: object) -> list[Any]:
        """Call ``method`` on every rank and return the list of results.

        ``method`` needs no ``@register``. This function is kept for scripts written for verl.
        """
        calls = [_resolve_futures(args, kwargs)] * self.world_size
        return self._start_calls(method, calls, list).get()

    def execute_rank_zero(self, method: str, *args: object, **kwargs: object) -> Any:
        """Call ``method`` on rank 0 and return its result.

        ``method`` needs no ``@register``. This function is kept for scripts written for verl.
        """
        calls = [_resolve_futures(args, kwargs)]
        return self._start_calls(method, calls, list).get()[0]

    def _make_group_method(
        self, method: str, registration: MethodRegistration
    ) -> Callable[..., Any]:
        @functools.wraps(getattr(self.worker_cls, method))
        def call(*args: object, **kwargs: object) -> Any:
            future = self._submit_call(method, registration, args, kwargs)
            return future.get() if registration.blocking else future

        return call

    def _submit_call(
        self,
        method: str,
        registration: MethodRegistration,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> GroupFuture:
        args, kwargs = _resolve_futures(args, kwargs)
        calls, collect = plan_calls(registration, self.world_size, args, kwargs)
        return self._start_calls(method, calls, collect)

    @abstractmethod
    def _start_calls(self, method: str, calls: list[Call], collect: Collect) -> GroupFuture:
        """Start ``method`` on rank i with the arguments ``calls[i]``. Return the future result."""

    @abstractmethod
    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Close the workers, waiting at most ``timeout_s``, then end their processes."""

    @abstractmethod
    def kill(self) -> None:
        """End the workers' processes at once, without closing the workers."""


def _resolve_futures(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    def resolve_value(value: object) -> object:
        return value.get() if isinstance(value, GroupFuture) else value

    return tuple(resolve_value(value) for value in args), {
        k: resolve_value(value) for k, value in kwargs.items()
    }
