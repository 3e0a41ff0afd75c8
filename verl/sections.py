"""What a method adds to the record of a run: registries that the framework reads and others fill.

The framework names no method. A package that has one registers its functions when it is imported
(``rlvcr.sections``), which the composition root does.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # the registries themselves are free of torch
    from verl.protocol import DataProto

# From a batch of rows and a prefix such as "val/" to metrics whose names start with the prefix.
BatchMetrics: TypeAlias = "Callable[[DataProto, str], dict[str, float]]"

BATCH_METRICS: dict[str, BatchMetrics] = {}


def register_batch_metrics(name: str) -> Callable[[BatchMetrics], BatchMetrics]:
    """Compute the decorated function's metrics of every validation; ``name`` is a registry key.

    The function returns nothing for batches of which it can say nothing.
    """

    def decorate(function: BatchMetrics) -> BatchMetrics:
        BATCH_METRICS[name] = function
        return function

    return decorate


def batch_metrics(batch: "DataProto", prefix: str) -> dict[str, float]:
    """The metrics of all registered functions."""
    found: dict[str, float] = {}
    for function in BATCH_METRICS.values():
        found |= function(batch, prefix)
    return found
