"""Names that packages resolve on first use exist."""

import importlib
import pkgutil

import pytest

import agent_system
import verl

PACKAGES = [
    found.name
    for package in (verl, agent_system)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if found.ispkg and ".env_package." not in found.name
]


@pytest.mark.parametrize("package", ["verl", *PACKAGES])
def test_every_public_name_of_a_package_exists(package):
    module = importlib.import_module(package)
    missing = [name for name in getattr(module, "__all__", ()) if not hasattr(module, name)]
    assert not missing
