"""Another package named ``verl`` on the search path is refused with both directories."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_another_package_verl_is_named(tmp_path):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").touch()
    search_path = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = subprocess.run(
        [sys.executable, "-c", "import agent_system"],
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
