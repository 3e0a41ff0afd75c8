"""``pip install .`` installs every file of the packages and the configs of ``main_ppo``."""

import runpy
from fnmatch import fnmatch
from pathlib import Path

import pytest
import setuptools

from verl.config.compose import BASE_DIR, EXPERIMENTS_DIR

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def setup_arguments() -> dict:
    """Return the arguments that ``setup.py`` passes to setuptools."""
    arguments = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", arguments.update)
        patch.chdir(ROOT)
        runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def test_every_file_of_the_packages_is_shipped(setup_arguments):
    packages, patterns = set(setup_arguments["packages"]), setup_arguments["package_data"]
    tops = {name.split(".")[0] for name in packages}
    candidates = [file for top in tops for file in (ROOT / top).rglob("*") if file.is_file()]
    files = [
        file
        for file in candidates
        if not any(part == "__pycache__" or part[0] == "." for part in file.parts[1:])
    ]
    assert len(files) > 150
    for file in files:
        package_dir = file.parent
        while ".".join(package_dir.relative_to(ROOT).parts) not in packages:
            package_dir = package_dir.parent
        name = ".".join(package_dir.relative_to(ROOT).parts)
        relative_path = file.relative_to(package_dir).as_posix()
        shipped_patterns = [*patterns.get("", ()), *patterns.get(name, ()), "*.py"]
        matching_patterns = [
            pattern
            for pattern in shipped_patterns
            if pattern.count("/") == relative_path.count("/") and fnmatch(relative_path, pattern)
        ]
        assert matching_patterns, (
            f"{file} is in no wheel: package_data of setup.py has {shipped_patterns}"
        )


def test_configs_are_where_an_installed_package_looks(setup_arguments):
    assert {"configs", "verl.config"} <= set(setup_arguments["packages"])
    assert EXPERIMENTS_DIR.relative_to(ROOT) == Path("configs") and BASE_DIR.parents[1] == ROOT
    for name in ("quickstart.yaml", "quickstart_sft.yaml", "policies/quickstart/model.safetensors"):
        assert (EXPERIMENTS_DIR / name).is_file()
