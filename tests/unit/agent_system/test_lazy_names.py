"""Names that packages resolve on first use exist."""

import importlib
import pkgutil

import pytest

import agent_system
import verl

PACKAGES = [
    module_info.name
    for package in (verl, agent_system)
    for module_info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if module_info.ispkg and ".env_package." not in module_info.name
]


@pytest.mark.parametrize("package", ["verl", *PACKAGES])
def test_every_public_name_of_a_package_exists(package):
    module = importlib.import_module(package)
    missing = [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)]
    assert not missing
