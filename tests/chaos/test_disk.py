"""Tests of a full disk, a read-only run directory and one of an older version: the error names the
path, and nothing is lost.
"""

import errno
import json
import logging
import subprocess
import sys

import pytest
import yaml

from tests.helpers.refusals import list_logged, mentions
from verl.config.settings import ConfigError
from verl.record.run_dir import RunDirectory
from verl.record.tracking import Tracking, read_metrics
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointManager
from verl.utils.files import atomic_write

# A mount namespace, where any user may mount. The disk is removed with the process.
PRIVATE = ["unshare", "--map-root-user", "--mount", sys.executable, "-c"]
MOUNT = """
import subprocess, sys
from pathlib import Path

disk = Path(sys.argv[1])

def mount(options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=True)

"""
FULL = """
mount("size=400k")
from verl.record.run_dir import RunDirectory
from verl.record.tracking import Tracking
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointManager
from verl.config.settings import ConfigError

def save(step, size):
    write = lambda directory: (directory / "weights").write_bytes(bytes(size))
    manager.save(step, write, {"step": step})

def refused(call, *arguments):
    try:
        call(*arguments)
    except (OSError, ConfigError) as error:
        print(type(error).__name__, error)
    else:
        print("not refused")

with RunDirectory(disk / "run").open({"seed": 1}) as run:
    manager = CheckpointManager(run.checkpoints, max_to_keep=1)
    tracking = Tracking("p", "e", [], {}, run.path)
    tracking.log({"loss": 1.0}, 1)
    save(1, 100_000)
    refused(save, 2, 1_000_000)
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    refused(run.write_rollouts, 1, [{"text": "x" * 10_000}])
    refused(tracking.log, {"text": "x" * 10_000}, 2)
refused(RunDirectory(disk / "run").open, {"seed": 2})
print("whole:", manager.find_latest_valid().name, manager.load_state())
filler.unlink()
with RunDirectory(disk / "run").open({"seed": 1}) as run:
    with Tracking("p", "e", [], {}, run.path, resume_step=1) as tracking:
        tracking.log({"loss": 0.5}, 2)
    save(2, 100_000)
steps = [row["step"] for row in jsonl.read(run.metrics_path)]
print("after:", manager.find_latest_valid().name, steps)
"""
READ_ONLY = """
mount("size=400k")
from verl.record.run_dir import RunDirectory
from verl.config.settings import ConfigError

if sys.argv[2] == "older":
    RunDirectory(disk / "run").open({"seed": 1}).close()
mount("remount,ro")
try:
    RunDirectory(disk / "run").open({"seed": 2})
except ConfigError as error:
    print(error)
"""


@pytest.fixture
def run_on_own_disk(tmp_path):
    """Return ``run(code, argument)``: it runs ``code`` with a ``mount(options)`` and returns the
    output.
    """
    if subprocess.run([*PRIVATE, "pass"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow mounts in a user namespace")

    def run(code: str, argument: str = "") -> str:
        command = [*PRIVATE, MOUNT + code, str(tmp_path), argument]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def test_full_disk_keeps_all_earlier_files(run_on_own_disk, tmp_path):
    *refused, whole, after = run_on_own_disk(FULL).splitlines()
    messages = "\n".join(refused)
    run_directory = f"{tmp_path}/run"
    assert (
        "not refused" not in messages and messages.count("[Errno 28] No space left on device") == 4
    )
    assert f"device: '{run_directory}/rollouts/1.jsonl'" in messages
    assert f"device: '{run_directory}/metrics.jsonl'" in messages
    assert f"trainer.default_local_dir='{run_directory}': " in messages
    assert whole == "whole: global_step_1 {'step': 1}"
    assert after == "after: global_step_2 [1, 2]"


@pytest.mark.parametrize("directory_state", ["new", "older"])
def test_read_only_run_directory_is_refused(run_on_own_disk, tmp_path, directory_state):
    output = run_on_own_disk(READ_ONLY, directory_state)
    assert f"trainer.default_local_dir='{tmp_path}/run': " in output
    assert "Read-only file system" in output and "fix: " in output


def test_run_directory_below_a_file_is_refused(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, check=mentions("default_local_dir")):
        RunDirectory(tmp_path / "runs" / "p").open({})


def test_disk_full_error_gets_a_file_name_and_others_keep_theirs(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    for error in (full, FileNotFoundError(errno.ENOENT, "No such file", "elsewhere"), OSError("?")):
        with pytest.raises(OSError) as caught, atomic_write(tmp_path / "a") as _:
            raise error
        assert caught.value is error
    assert str(full) == f"[Errno 28] No space left on device: '{tmp_path}/a'"
    assert list(tmp_path.iterdir()) == []


def test_run_directory_of_an_older_version_is_continued(tmp_path, caplog):
    run = RunDirectory(tmp_path)
    manager = CheckpointManager(run.checkpoints)
    saved = manager.save(4, lambda d: (d / "weights").write_bytes(b"abc"), {"global_step": 4})
    manifest = json.loads((saved / "manifest.json").read_text())
    old = {"format": 1, "step": 4, "files": manifest["files"]}
    (saved / "manifest.json").write_text(json.dumps(old))
    run.config_path.write_text(yaml.safe_dump({"trainer": {"a_key_of_then": 1}, "seed": 1}))
    run.env_path.write_text(json.dumps({"time": "then"}))
    jsonl.write(run.metrics_path, [{"step": step, "loss": 1.0} for step in range(6)])

    with caplog.at_level(logging.WARNING), RunDirectory(tmp_path).open({"seed": 1}):
        assert CheckpointManager(run.checkpoints).load_state() == {"global_step": 4}
        with Tracking("p", "e", [], {}, run.path, resume_step=4) as tracking:
            tracking.log({"loss": 0.5}, 5)
    assert "trainer.a_key_of_then: 1 -> None" in caplog.text
    assert len(json.loads(run.env_path.read_text())["starts"]) == 1
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(6))


@pytest.mark.parametrize(("name", "starts"), [("config.yaml", 2), ("env.json", 1)])
@pytest.mark.parametrize("text", ["{torn: [", "just a word", "\x00"])
def test_unreadable_file_is_set_aside(tmp_path, caplog, name, starts, text):
    RunDirectory(tmp_path).open({}).close()
    (tmp_path / name).write_text(text)
    with caplog.at_level(logging.WARNING), RunDirectory(tmp_path).open({"seed": 1}) as run:
        assert yaml.safe_load(run.config_path.read_text()) == {"seed": 1}
        assert len(json.loads(run.env_path.read_text())["starts"]) == starts
    assert (tmp_path / f"{name}.unreadable").read_text() == text
    path = tmp_path / name
    assert len(list_logged(caplog, "verl.record.run_dir", path, f"{name}.unreadable")) == 1
