"""Alias of ``verl.record.tracking.Tracking`` under the path that job code imports."""

from verl.utils.lazy import lazy

__getattr__, __all__ = lazy("verl.record", {"Tracking": "tracking"})
