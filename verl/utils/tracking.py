"""Alias of ``verl.record.tracking.Tracking`` under the path that verl scripts import."""

from verl.utils.lazy import make_lazy_exports

__getattr__, __all__ = make_lazy_exports("verl.record", {"Tracking": "tracking"})
