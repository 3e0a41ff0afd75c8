"""WorkerGroup: one object that calls methods on many workers. Subclasses start the workers."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from verl.config.settings.hints import did_you_mean
from verl.single_controller.base.decorator import (
    Call,
    Collect,
    Registration,
    collect_registered_methods,
    plan_calls,
)


class GroupFuture:
    """Result of a non-blocking group call.

    It may be passed to another group call in place of the value. ``wait(timeout_s)`` must return
    the ranks' results in rank order or raise.
    """

    def __init__(
        self,
        wait: Callable[[float], list[Any]],
        done: Callable[[], bool],
        collect: Collect,
        timeout_s: float,
    ) -> None:
        self._wait = wait
        self._done = done
        self._collect = collect
        self._timeout_s = timeout_s
        self._value: Any = None
        self._ready = False

    def is_done(self) -> bool:
        """Return true if ``get`` would return or raise without waiting."""
        return self._ready or self._done()

    def get(self, timeout_s: float | None = None) -> Any:
        """Return the value of the call. Wait at most ``timeout_s`` (None: the call's timeout)."""
        if not self._ready:
            answers = self._wait(self._timeout_s if timeout_s is None else timeout_s)
            self._value = self._collect(answers)
            self._ready = True
        return self._value


class WorkerGroup(ABC):
    """Group of workers that has each registered method of ``worker_cls`` as a method.

    Such a method dispatches its arguments to the ranks and collects their results.
    """

    def __init__(self, worker_cls: type, world_size: int, name: str, call_timeout_s: float) -> None:
        self.worker_cls = worker_cls
        self.name = name
        self.call_timeout_s = call_timeout_s
        self._world_size = world_size
        self._methods = collect_registered_methods(worker_cls)
        conflicting = [method for method in self._methods if hasattr(type(self), method)]
        if conflicting:
            raise ValueError(
                f"{worker_cls.__name__}: the registered methods {conflicting} have names of "
                "WorkerGroup methods; fix: rename the methods of the worker"
            )
        for method, registration in self._methods.items():
            setattr(self, method, self._make_group_method(method, registration))

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return self._world_size

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for names that are neither attributes nor registered methods.
        # Use vars(): _methods may be missing while a group is constructed or unpickled.
        hint = did_you_mean(name, vars(self).get("_methods", {}))
        worker = vars(self).get("worker_cls")
        of_worker = f" of {worker.__name__}" if worker else ""
        raise AttributeError(
            f"a group{of_worker} has no attribute or registered method {name!r}{hint}"
        )

    def submit(self, method: str, *args: object, **kwargs: object) -> GroupFuture:
        """Start the registered ``method`` and return a future, also for a blocking method."""
        if method not in self._methods:
            getattr(self, method)  # raises with the nearest match
            raise AttributeError(
                f"{method!r} is not a registered method of {self.worker_cls.__name__}"
            )
        return self._submit_call(method, self._methods[method], args, kwargs)

    def execute_all(self, method: str, *args: object, **kwargs: object) -> list[Any]:
        """Call ``method``, registered or not, with the same arguments on every rank.

        Returns the results in rank order. Kept for verl scripts that call methods by name.
        """
        calls = [_resolve_futures(args, kwargs)] * self.world_size
        return self._start_calls(method, calls, list, self.call_timeout_s).get()

    def execute_rank_zero(self, method: str, *args: object, **kwargs: object) -> Any:
        """Call ``method``, registered or not, on rank 0 only, and return its result.

        Kept for verl scripts that call methods by name.
        """
        calls = [_resolve_futures(args, kwargs)]
        return self._start_calls(method, calls, list, self.call_timeout_s).get()[0]

    def _make_group_method(self, method: str, registration: Registration) -> Callable[..., Any]:
        @functools.wraps(getattr(self.worker_cls, method))
        def call(*args: object, **kwargs: object) -> Any:
            future = self._submit_call(method, registration, args, kwargs)
            return future.get() if registration.blocking else future

        return call

    def _submit_call(
        self,
        method: str,
        registration: Registration,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> GroupFuture:
        args, kwargs = _resolve_futures(args, kwargs)
        calls, collect = plan_calls(registration, self.world_size, args, kwargs)
        timeout_s = registration.timeout_s
        if timeout_s is None:
            timeout_s = self.call_timeout_s
        return self._start_calls(method, calls, collect, timeout_s)

    @abstractmethod
    def _start_calls(
        self, method: str, calls: list[Call], collect: Collect, timeout_s: float
    ) -> GroupFuture:
        """Start ``calls[i]`` of ``method`` on rank i and return the future of their results."""

    @abstractmethod
    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Close the workers, waiting at most ``timeout_s``, then end their processes."""

    @abstractmethod
    def kill(self) -> None:
        """End the workers' processes at once, without closing the workers."""

    def __enter__(self) -> "WorkerGroup":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()


def _resolve_futures(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Replace every ``GroupFuture`` among the arguments by its value, waiting for it."""

    def resolve_value(v: object) -> object:
        return v.get() if isinstance(v, GroupFuture) else v

    return tuple(resolve_value(v) for v in args), {k: resolve_value(v) for k, v in kwargs.items()}
