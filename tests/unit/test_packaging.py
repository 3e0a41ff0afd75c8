"""What ``pip install .`` takes along: every file below the packages, and the configs that
``main_ppo`` starts from.
"""

import runpy
from fnmatch import fnmatch
from pathlib import Path

import pytest
import setuptools

from verl.config.compose import BASE_DIR, EXPERIMENTS_DIR

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def arguments() -> dict:
    """What ``setup.py`` hands to setuptools."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", found.update)
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
    return found


def test_every_file_below_the_packages_is_shipped(arguments):
    packages, patterns = set(arguments["packages"]), arguments["package_data"]
    tops = {name.split(".")[0] for name in packages}
    found = [file for top in tops for file in (ROOT / top).rglob("*") if file.is_file()]
    files = [
        file
        for file in found
        if not any(part == "__pycache__" or part[0] == "." for part in file.parts[1:])
    ]
    assert len(files) > 150
    for file in files:
        home = file.parent
        while ".".join(home.relative_to(ROOT).parts) not in packages:
            home = home.parent
        name, below = ".".join(home.relative_to(ROOT).parts), file.relative_to(home).as_posix()
        taken = [*patterns.get("", ()), *patterns.get(name, ()), "*.py"]
        fits = [
            pattern
            for pattern in taken
            if pattern.count("/") == below.count("/") and fnmatch(below, pattern)
        ]
        assert fits, f"{file} is in no wheel: package_data of setup.py has {taken}"


def test_the_configs_lie_where_an_installed_package_looks_for_them(arguments):
    assert {"configs", "verl.config"} <= set(arguments["packages"])
    assert EXPERIMENTS_DIR.relative_to(ROOT) == Path("configs") and BASE_DIR.parents[1] == ROOT
    for name in ("quickstart.yaml", "quickstart_sft.yaml", "policies/quickstart/model.safetensors"):
        assert (EXPERIMENTS_DIR / name).is_file()
