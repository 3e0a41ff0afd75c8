"""Checks of the shape annotations of pure maths while the tests run.

``tests/conftest.py`` calls ``check_shapes`` before the modules are imported.
"""

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

CHECKED_MODULES = [
    "rlvcr.core_rlvcr",
    "rlvcr.thinking",
    "verl.algos",
    "verl.utils.torch_functional",
]

# jaxtyping decorates every function of these modules with it. The numeric tower accepts an int for
# a float, as Python's type checkers do.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_shapes() -> None:
    """Let calls with a wrong shape raise ``jaxtyping.TypeCheckError`` from now on."""
    install_import_hook(CHECKED_MODULES, f"{__name__}.checked")
