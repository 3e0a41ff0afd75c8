"""``Tracking`` under the path from which job code imports it; it lives in ``verl.record``."""

from verl.utils.lazy import lazy

__getattr__, __all__ = lazy("verl.record", {"Tracking": "tracking"})
