"""What can go wrong with an environment, as data."""

from typing import Literal

FailureKind = Literal["dead", "timeout", "error", "garbage"]


class EnvFailure(Exception):
    """A call to an environment came to nothing; the trajectory that made it is aborted, the run
    goes on.

    ``kind``: ``dead`` (its process is gone), ``timeout`` (past its deadline), ``error`` (it
    raised), ``garbage`` (it returned something that is not what the protocol asks for).
    """

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"environment {self.kind}: {self.detail}"


class WorkerStartError(RuntimeError):
    """No environment worker could be started: a set-up error, which ends the run.

    ``missing`` names a module.
    """

    def __init__(self, detail: str, missing: str | None = None) -> None:
        super().__init__(detail)
        self.missing = missing
