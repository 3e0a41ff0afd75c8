"""How a key is declared: a dataclass field whose metadata holds its one-line doc and what may be
written there.
"""

import copy
import dataclasses
from typing import Any


def opt(
    default: Any,
    doc: str,
    *,
    choices: tuple = (),
    low: float | None = None,
    high: float | None = None,
    unused: str = "",
    gpu_only: bool = False,
) -> Any:
    """Declare one key.

    ``choices``, ``low`` and ``high`` bound the value (``None`` is always allowed where the type
    says so). ``unused`` says why a key that job scripts carry changes nothing here; ``gpu_only``
    that it changes nothing on CPU. Both lead to one warning when the key is set to something other
    than its default.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "low": low,
        "high": high,
        "unused": unused,
        "gpu_only": gpu_only,
    }
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, doc: str) -> Any:
    """Declare a nested section with the defaults of ``cls``."""
    return dataclasses.field(default_factory=cls, metadata={"doc": doc})
