"""Lazy exports of a package: a name is imported on first use, so importing the package is fast."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def make_lazy_exports(
    package: str, module_of_name: Mapping[str, str]
) -> tuple[Callable[[str], Any], list[str]]:
    """Return ``__getattr__`` and ``__all__`` for the ``__init__`` module of ``package``.

    ``module_of_name`` maps each exported name to the module that defines it. A module name without
    a dot is a module of ``package``; a name with a dot is the full name of any module.
    """

    def resolve_name(name: str) -> Any:
        if name not in module_of_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module_name = module_of_name[name]
        module = importlib.import_module(
            module_name if "." in module_name else f"{package}.{module_name}"
        )
        return getattr(module, name)

    return resolve_name, sorted(module_of_name)
