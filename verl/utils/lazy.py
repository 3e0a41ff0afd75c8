"""Lazy exports of a package: a name is imported on first use, so importing the package is fast."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], list[str]]:
    """Return ``__getattr__`` and ``__all__`` of ``package``.

    ``module_of_name`` maps a name to the module that defines it: a module of ``package``, or with a
    dot the full name of any module.
    """

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        module = importlib.import_module(home if "." in home else f"{package}.{home}")
        return getattr(module, name)

    return resolve, sorted(homes)
