"""Another package named ``verl`` on the search path is refused with both directories."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("module", ["verl.trainer", "agent_system"])
def test_another_package_verl_is_named(tmp_path, module):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").touch()
    # An editable installation finds the sub-packages that the other package lacks.
    (tmp_path / "verl" / "trainer").symlink_to(ROOT / "verl" / "trainer")
    search_path = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": search_path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    last_line = result.stderr.splitlines()[-1]
    assert last_line.startswith("ImportError: ") and "; fix: " in last_line
    assert str(tmp_path / "verl") in last_line and str(ROOT) in last_line
