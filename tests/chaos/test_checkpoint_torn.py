"""Tests of a process that is killed during a save: the previous checkpoint stays valid, and no torn
checkpoint gets a final name.
"""

import json
import signal
import subprocess
import sys

import pytest

from scripts.dev.chaos import damaged_checkpoints
from tests.helpers.tiny_model import make_tiny_policy
from verl.utils.checkpoint import CheckpointError, CheckpointManager, verify_checkpoint

CHILD = """
import os, pathlib, shutil, signal, sys
from verl.utils import checkpoint

root, moment, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
background = sys.argv[4] == "background"
seen = {}
armed = False

def die_at(name):
    seen[name] = seen.get(name, 0) + 1
    if armed and name == moment and seen[name] == count:
        os.kill(os.getpid(), signal.SIGKILL)

def dying(module, function):
    real = getattr(module, function)
    def wrapped(*args, **kwargs):
        die_at(function)
        result = real(*args, **kwargs)
        die_at("after_" + function)
        return result
    setattr(module, function, wrapped)

def writer(directory):
    def write():
        for i in range(4):
            (directory / f"part_{i}").write_bytes(bytes([i]) * 1000)
            die_at("write")
    return write if background else write()

dying(os, "fsync")
dying(os, "rename")
dying(shutil, "rmtree")
manager = checkpoint.CheckpointManager(root, max_to_keep=1, background=background)
manager.save(1, writer, {"n": 1})
manager.wait()
seen.clear()
armed = True
manager.save(2, writer, {"n": 2})
manager.wait()
print("finished")
"""

# The second save has 4 writes, 5 fsyncs of data files, then manifest, directory, the rename, and
# one fsync of the root. Then the first checkpoint is set aside (rename, fsync) and removed.
MOMENTS = [
    ("write", 2, 1),
    ("write", 4, 1),
    ("fsync", 3, 1),
    ("after_fsync", 7, 1),
    ("rename", 1, 1),
    ("after_rename", 1, 2),
    ("rename", 2, 2),
    ("after_rename", 2, 2),
    ("rmtree", 2, 2),
]


@pytest.mark.parametrize("mode", ["foreground", "background"])
@pytest.mark.parametrize(("moment", "count", "survivor"), MOMENTS)
def test_kill_during_a_save_leaves_a_valid_checkpoint(tmp_path, moment, count, survivor, mode):
    child = [sys.executable, "-c", CHILD, str(tmp_path), moment, str(count), mode]
    result = subprocess.run(child, capture_output=True, text=True, timeout=60)
    assert result.returncode == -signal.SIGKILL, (result.stdout, result.stderr)

    manager = CheckpointManager(tmp_path, max_to_keep=1)
    for path in manager.find_checkpoints().values():
        verify_checkpoint(path)
    assert manager.load_state() == {"n": survivor}

    manager.save(3, lambda d: (d / "part_0").write_bytes(b"x"), {"n": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_3"]


def test_truncated_files_are_detected(tmp_path):
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, lambda d: (d / "part_0").write_bytes(b"0123456789"), {"n": 1})
    for file in [p for p in path.iterdir() if p.is_file()]:
        whole = file.read_bytes()
        for length in range(0, len(whole), max(1, len(whole) // 7)):
            file.write_bytes(whole[:length])
            with pytest.raises(CheckpointError):
                verify_checkpoint(path)
        file.write_bytes(whole)
    assert verify_checkpoint(path)["step"] == 1


@pytest.mark.parametrize("name", ["part_0", "manifest.json"])
def test_flipped_bits_are_detected(tmp_path, name):
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, lambda d: (d / "part_0").write_bytes(bytes(range(16))), {"n": 1})
    file = path / name
    whole = file.read_bytes()
    for bit in range(0, 8 * len(whole), 3):  # in every byte, and each bit position
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bytes(flipped))
        assert manager.find_latest_valid() is None


def test_checkpoint_of_the_first_format_is_valid(tmp_path):
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, lambda d: (d / "part_0").write_bytes(b"abc"), {"n": 1})
    manifest = json.loads((path / "manifest.json").read_text())
    files = {name: manifest["files"][name] for name in ("part_0", "state.json")}
    (path / "manifest.json").write_text(json.dumps({"format": 1, "step": 1, "files": files}))
    assert manager.load_state() == {"n": 1}
    (path / "manifest.json").write_text(json.dumps({"format": 3, "step": 1, "files": files}))
    assert manager.find_latest_valid() is None


def test_damaged_files_are_never_loaded():
    assert damaged_checkpoints.run(40, seed=1) == 0


SHARDS_CHILD = """
import os, pathlib, signal, sys, threading
from verl.models.loader import load_causal_lm
from verl.models.policy import PolicyModel
from verl.config.schema.model import OptimConfig
from verl.utils.checkpoint import CheckpointManager
from verl.workers.engine import TrainEngine
from verl.workers.engine_state import save_engine

policy, root = sys.argv[1:]
engine = TrainEngine(PolicyModel(load_causal_lm(policy)), device="cpu", optim=OptimConfig())
manager = CheckpointManager(root, background=True)

def save(directory):
    write = save_engine(engine, directory)
    def wait():
        write.wait_for_files()
    return wait

manager.save(1, save, {"n": 1})
manager.wait()

def dying(descriptor):
    # DCP's own, of the file with the shards: its bytes are written.
    assert threading.current_thread() is not threading.main_thread()
    os.kill(os.getpid(), signal.SIGKILL)

os.fsync = dying
manager.save(2, save, {"n": 2})
manager.wait()
"""


def test_kill_during_a_shard_write_leaves_no_checkpoint(tmp_path):
    policy = make_tiny_policy(tmp_path / "policy", hidden=32, layers=1)
    root = tmp_path / "checkpoints"
    child = [sys.executable, "-c", SHARDS_CHILD, str(policy), str(root)]
    result = subprocess.run(child, capture_output=True, text=True, timeout=120)
    assert result.returncode == -signal.SIGKILL, (result.stdout, result.stderr)
    (partial,) = root.glob(".partial-*")
    assert list(partial.glob("shard-*.safetensors")), "the process was killed before the write"
    manager = CheckpointManager(root)
    assert list(manager.find_checkpoints()) == [1] and manager.load_state() == {"n": 1}
    manager.save(3, lambda d: (d / "part_0").write_bytes(b"x"), {"n": 3})
    assert sorted(path.name for path in root.iterdir()) == ["global_step_1", "global_step_3"]
