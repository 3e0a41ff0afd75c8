"""Names of a package that are imported on first use: importing the package costs nothing."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """``__getattr__`` and ``__all__`` of ``package``; ``homes`` says in which of its modules a name
    is defined, or in which other one where that has a dotted name.
    """

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        module = importlib.import_module(home if "." in home else f"{package}.{home}")
        return getattr(module, name)

    return resolve, sorted(homes)
