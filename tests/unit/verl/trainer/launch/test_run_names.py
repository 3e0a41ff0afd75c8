"""Names of runs that are no directory below runs/ are refused before the start."""

import pytest

from verl.trainer.launch.extensions import load_config
from verl.trainer.launch.preflight_machine import machine_problems


@pytest.mark.parametrize(
    "name, refused",
    [("", True), ("..", True), ("../../etc", True), ("/abs", True), ("a\nb", True)]
    + [("x" * 300, True), ("fine", False), ("with space", False), ("group/run", False)],
)
@pytest.mark.parametrize("key", ["project_name", "experiment_name"])
def test_names(tmp_path, monkeypatch, key, name, refused):
    monkeypatch.chdir(tmp_path)
    cfg = load_config("quickstart", ["trainer.device=cpu"])
    setattr(cfg.trainer, key, name)
    cfg.trainer.default_local_dir = f"runs/{cfg.trainer.project_name}/{cfg.trainer.experiment_name}"
    found = [problem for problem in machine_problems(cfg) if f"trainer.{key}" in problem]
    assert bool(found) == refused
