"""Errors of environments and of their worker processes."""

from typing import Literal

FailureKind = Literal["dead", "timeout", "error", "garbage"]


class EnvFailure(Exception):
    """Failed call of an environment. Its trajectory is aborted, and the run continues.

    ``kind`` is one of:

    - ``dead``: the worker process died.
    - ``timeout``: the call exceeded its deadline.
    - ``error``: the environment raised.
    - ``garbage``: the return value violates the protocol.
    """

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"environment {self.kind}: {self.detail}"


class WorkerStartError(RuntimeError):
    """Environment worker that could not be started. This is a set-up error and ends the run.

    ``missing`` is the name of the Python module whose absence is the cause, or None.
    """

    def __init__(self, detail: str, missing: str | None = None) -> None:
        super().__init__(detail)
        self.missing = missing
