"""Shape annotations of the pure maths, checked while the tests run.

``check_shapes`` has to be called before the modules are imported; ``tests/conftest.py`` does.
"""

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

CHECKED_MODULES = [
    "rlvcr.core_rlvcr",
    "rlvcr.thinking",
    "verl.algos",
    "verl.utils.torch_functional",
]

# What jaxtyping puts on every function of these modules. The numeric tower lets an int stand for a
# float, as Python's own type checkers do.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_shapes() -> None:
    """From now on, calls with a wrong shape raise ``jaxtyping.TypeCheckError``."""
    install_import_hook(CHECKED_MODULES, f"{__name__}.checked")
