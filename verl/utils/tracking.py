"""Alias of ``verl.record.tracking.Tracking``: scripts written for verl import it from here."""

from verl.utils.lazy import make_lazy_exports

__getattr__, __all__ = make_lazy_exports("verl.record", {"Tracking": "tracking"})
