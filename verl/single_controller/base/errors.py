"""What can go wrong between the driver and its workers.

Messages name the worker, its rank and the method.
"""


class WorkerError(RuntimeError):
    """A call on a group of workers could not be completed."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """One or more workers did not answer before the deadline; they may still be busy."""


class WorkerDiedError(WorkerError):
    """The process of a worker is gone."""
