"""Errors of calls from the driver to its workers. Messages name the worker, rank and method."""


class WorkerError(RuntimeError):
    """A call on a group of workers could not be completed."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """One or more workers did not answer before the deadline; they may still be running."""


class WorkerDiedError(WorkerError):
    """The process of a worker has ended."""
