"""Tests of checkpoint directories: save and load, damage, retention and background writes."""

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.refusals import mentions
from verl.config.settings import ConfigError
from verl.records import WrittenFiles
from verl.utils import checkpoint
from verl.utils.checkpoint import (
    CheckpointError,
    CheckpointManager,
    choose_checkpoint,
    convert_state_errors,
    verify_checkpoint,
    write_state_and_manifest,
)


def write_weights(payload: bytes):
    def writer(directory):
        (directory / "actor").mkdir()
        (directory / "actor" / "weights.bin").write_bytes(payload)

    return writer


def list_steps(manager):
    return list(manager.find_checkpoints())


def test_state_and_files_are_restored(tmp_path):
    manager = CheckpointManager(tmp_path / "checkpoints")
    assert manager.find_latest_valid() is None
    path = manager.save(3, write_weights(b"abc"), {"epoch": 1, "rng": [1, 2]})
    assert path == manager.find_latest_valid() == tmp_path / "checkpoints" / "global_step_3"
    assert (path / "actor" / "weights.bin").read_bytes() == b"abc"
    assert manager.load_state() == manager.load_state(path) == {"epoch": 1, "rng": [1, 2]}
    manifest = verify_checkpoint(path)
    assert manifest["step"] == 3 and manifest["files"]["actor/weights.bin"]["size"] == 3
    assert sorted(p.name for p in manager.root.iterdir()) == ["global_step_3"]
    assert path.stat().st_mode == manager.root.stat().st_mode and stat.S_ISDIR(path.stat().st_mode)


@pytest.mark.parametrize("text", ["", "[1]", "3", "null", '{"n": 1', "[" * 100_000, "1" * 5000])
def test_state_that_is_no_object_is_refused_with_its_file(tmp_path, text):
    directory = tmp_path / "global_step_3"
    directory.mkdir()
    write_state_and_manifest(directory, 3, text, [])
    manager = CheckpointManager(tmp_path)
    assert manager.find_latest_valid() == directory
    with pytest.raises(CheckpointError, check=mentions(directory / "state.json", "; allowed: ")):
        manager.load_state(directory)
    expected = mentions(directory / "state.json", "; fix: ", "trainer.resume_from_path")
    with pytest.raises(ConfigError, check=expected), convert_state_errors(directory):
        manager.load_state(directory)


def test_newest_is_by_number_and_equal_steps_are_replaced(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (9, 10, 2):
        manager.save(step, write_weights(b"old"), {"n": step})
    assert manager.find_latest_valid() == tmp_path / "global_step_10"
    manager.save(10, write_weights(b"new"), {"n": 100})
    assert manager.load_state() == {"n": 100}
    assert list_steps(manager) == [2, 9, 10]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda p: (p / "actor" / "weights.bin").write_bytes(b"abd"), "actor/weights.bin"),
        (lambda p: (p / "actor" / "weights.bin").write_bytes(b"ab"), "actor/weights.bin"),
        (lambda p: (p / "actor" / "weights.bin").unlink(), "actor/weights.bin"),
        (lambda p: (p / "state.json").write_text("{}"), "state.json"),
        (lambda p: (p / "manifest.json").write_text('{"files": {'), "manifest.json"),
        (lambda p: (p / "manifest.json").write_text("[]"), "manifest.json"),
        (lambda p: (p / "manifest.json").write_text('{"files": {}}'), "manifest.json"),
        (lambda p: (p / "manifest.json").unlink(), "manifest.json"),
    ],
)
def test_damaged_checkpoints_are_skipped_with_a_warning(tmp_path, caplog, damage, name):
    manager = CheckpointManager(tmp_path)
    manager.save(1, write_weights(b"abc"), {})
    damage(manager.save(2, write_weights(b"abc"), {"second": True}))
    assert manager.find_latest_valid() == tmp_path / "global_step_1"
    damaged_file = tmp_path / "global_step_2" / name
    assert str(damaged_file) in caplog.text
    with pytest.raises(CheckpointError, check=mentions(damaged_file)):
        manager.load_state(tmp_path / "global_step_2")


def test_run_with_only_invalid_checkpoints_is_not_started_again(tmp_path):
    """With ``auto`` the run would lose its progress without notice. ``disable`` states the wish."""
    manager = CheckpointManager(tmp_path)
    assert choose_checkpoint(manager, "auto", None) is None
    for step in (1, 2):
        path = manager.save(step, write_weights(b"abc"), {})
        (path / "actor" / "weights.bin").write_bytes(b"")
    with pytest.raises(ConfigError, check=mentions(str(tmp_path), "trainer.resume_mode=disable")):
        choose_checkpoint(manager, "auto", None)
    assert choose_checkpoint(manager, "disable", None) is None
    valid = manager.save(0, write_weights(b"abc"), {})
    assert choose_checkpoint(manager, "auto", None) == valid


def test_manifest_entries_outside_the_directory_are_refused(tmp_path):
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, write_weights(b"abc"), {})
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("../secret", "/etc/hostname"):
        entries = {**manifest["files"], name: {"sha256": "", "size": 0}}
        (path / "manifest.json").write_text(json.dumps({**manifest, "files": entries}))
        with pytest.raises(CheckpointError, check=mentions("entry")):
            verify_checkpoint(path)


def test_retention_keeps_the_newest(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=2)
    for step in range(5):
        manager.save(step, write_weights(b"abc"), {})
    assert list_steps(manager) == [3, 4]


def test_retention_never_removes_the_newest_valid(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    flipped = manager.save(10, write_weights(b"abc"), {})
    (flipped / "actor" / "weights.bin").write_bytes(b"xyz")  # same size: only the digest differs
    manager.save(7, write_weights(b"abc"), {"n": 7})
    manager.save(8, write_weights(b"abc"), {"n": 8})
    assert list_steps(manager) == [8, 10]
    assert manager.load_state() == {"n": 8}


def test_save_of_an_older_step_keeps_a_newer_checkpoint(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    manager.save(10, write_weights(b"abc"), {"n": 10})
    manager.save(4, write_weights(b"abc"), {"n": 4})
    assert manager.load_state() == {"n": 10}


def test_links_are_refused(tmp_path):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError):
        manager.save(1, lambda d: (d / "link").symlink_to("/etc/hostname"), {})


def test_failed_save_leaves_no_files(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    manager.save(1, write_weights(b"abc"), {"n": 1})

    def fail(directory):
        (directory / "half").write_bytes(b"x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        manager.save(1, fail, {"n": 2})
    with pytest.raises(TypeError, check=mentions("JSON")):
        manager.save(2, lambda _: pytest.fail("the writer ran"), {"bad": object()})
    assert manager.load_state() == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["global_step_1"]


def test_only_abandoned_partial_saves_are_removed(tmp_path):
    manager = CheckpointManager(tmp_path)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = socket.gethostname()
    abandoned = [
        f".partial-{host}-{ended.pid}-a",
        f".partial-{host}-{os.getpid()}-b",
        ".partial-elsewhere-1-old",
    ]
    kept = [f".partial-{host}-{os.getppid()}-c", ".partial-elsewhere-1-new", ".partial-of_a_user"]
    for name in abandoned + kept:
        (tmp_path / name).mkdir()
    for name in (".partial-elsewhere-1-old", ".partial-of_a_user"):
        os.utime(tmp_path / name, (0, 0))
    manager.save(1, write_weights(b"abc"), {})
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*kept, "global_step_1"])


def test_checkpoint_module_needs_no_torch():
    code = "import sys, verl.utils.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def list_written(rank: str, directory, *names: str, size: int = 3) -> WrittenFiles:
    return WrittenFiles(rank, {str(directory / name): size for name in names})


def test_missing_file_of_a_rank_fails_the_save(tmp_path, monkeypatch):
    """On two nodes without shared storage the file of the other rank is on its own disk."""
    monkeypatch.setattr(checkpoint, "VISIBILITY_TIMEOUT_S", 0.05)
    manager = CheckpointManager(tmp_path)

    def writer(directory):
        (directory / "mine").write_bytes(b"abc")
        own_files = list_written("rank 0 on a", directory, "mine")
        return [own_files, list_written("rank 1 on b", directory, "mine", "theirs")]

    expected = mentions("1 files", "theirs", "rank 1 on b", "trainer.default_local_dir=DIR")
    with pytest.raises(CheckpointError, check=expected):
        manager.save(1, writer, {})
    assert list(tmp_path.iterdir()) == []


def test_save_waits_for_a_file_of_another_node(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    incomplete = []

    def writer(directory):
        (directory / "part").write_bytes(b"a")  # exists, but is not complete
        incomplete.append(directory / "part")
        return [list_written("rank 1 on b", directory, "part", size=3)]

    def sleep(seconds):
        assert 0 < seconds <= 1
        incomplete.pop().write_bytes(b"abc")

    monkeypatch.setattr(checkpoint.time, "sleep", sleep)
    path = manager.save(1, writer, {})
    assert verify_checkpoint(path)["writers"] == {"rank 1 on b": ["part"]} and not incomplete


def test_manifest_without_a_file_of_a_rank_is_invalid(tmp_path, caplog):
    manager = CheckpointManager(tmp_path)

    def writer(directory):
        for name in ("rank0", "rank1"):
            (directory / name).write_bytes(b"abc")
        return [list_written(f"rank {n} on a", directory, f"rank{n}") for n in range(2)]

    first = manager.save(1, writer, {})
    second = manager.save(2, writer, {})
    assert manager.find_latest_valid() == second
    manifest = json.loads((second / "manifest.json").read_text())
    del manifest["files"]["rank1"]
    (second / "manifest.json").write_text(json.dumps(manifest))
    (second / "rank1").unlink()
    assert manager.find_latest_valid() == first
    assert "rank1" in caplog.text and "rank 1 on a" in caplog.text


# ---- background saves ---------------------------------------------------------------------------


class DelayedWriter:
    """Writer that copies at once and writes when ``may_write`` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.may_write = threading.Event()
        self.directory = Path()

    def __call__(self, directory):
        self.directory = directory
        (directory / "begun").write_bytes(b"a")
        return self.write

    def write(self):
        assert threading.current_thread() is not threading.main_thread()
        assert self.may_write.wait(60)
        if self.error is not None:
            raise self.error
        (self.directory / "part").write_bytes(b"abc")
        return [list_written("rank 0 on a", self.directory, "part")]


def test_checkpoint_appears_when_it_is_complete(tmp_path):
    manager = CheckpointManager(tmp_path, background=True)
    writer = DelayedWriter()
    path = manager.save(1, writer, {"n": 1})
    assert not path.exists() and manager.find_latest_valid() is None
    assert [entry.name for entry in tmp_path.iterdir()] == [writer.directory.name]
    writer.may_write.set()
    manager.wait()
    assert manager.find_latest_valid() == path and manager.load_state() == {"n": 1}
    assert verify_checkpoint(path)["writers"] == {"rank 0 on a": ["part"]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["global_step_1"]


def test_next_save_waits_for_the_previous_one(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=1, background=True)
    first, second = DelayedWriter(), DelayedWriter()
    manager.save(1, first, {})
    second.may_write.set()
    threading.Timer(0.05, first.may_write.set).start()
    manager.save(2, second, {"n": 2})
    assert first.directory != second.directory
    manager.wait()
    assert list_steps(manager) == [2] and manager.load_state() == {"n": 2}


@pytest.mark.parametrize(
    "call", [lambda m: m.save(2, write_weights(b"abc"), {}), lambda m: m.wait()]
)
def test_failed_write_is_raised_by_the_next_call(tmp_path, caplog, call):
    manager = CheckpointManager(tmp_path, background=True)
    writer = DelayedWriter(CheckpointError("rank 1 on b: its shards were not written: disk full"))
    manager.save(1, writer, {})
    writer.may_write.set()
    with pytest.raises(CheckpointError, check=mentions("step 1", "rank 1 on b: its shards")):
        call(manager)
    assert "step 1" in caplog.text and not list(tmp_path.iterdir())
    manager.wait()  # the error is raised once
    manager.save(3, write_weights(b"abc"), {"n": 3})
    manager.wait()
    assert manager.load_state() == {"n": 3}


def test_failed_copy_is_raised_at_once(tmp_path):
    manager = CheckpointManager(tmp_path, background=True)
    with pytest.raises(ZeroDivisionError):
        manager.save(1, lambda _: 1 / 0, {})
    manager.wait()
    assert not list(tmp_path.iterdir())


def test_close_waits_a_limited_time_for_a_save(tmp_path, caplog):
    manager = CheckpointManager(tmp_path, background=True)
    writer = DelayedWriter()
    manager.save(1, writer, {})
    manager.close(timeout_s=0.01)
    assert "save-1" in caplog.text and "0.01 s" in caplog.text
    assert manager.find_latest_valid() is None
    writer.may_write.set()
    ready_writer = DelayedWriter()
    ready_writer.may_write.set()
    other = CheckpointManager(tmp_path / "other", background=True)
    other.save(2, ready_writer, {})
    other.close()
    assert list(other.find_checkpoints()) == [2]


def test_restarted_run_keeps_its_own_checkpoints(tmp_path):
    """Checkpoints of the earlier run have higher steps, and must not be resumed from."""
    manager = CheckpointManager(tmp_path, max_to_keep=2)
    for step in (40, 50):
        manager.save(step, write_weights(b"old"), {"n": "old"})
    (tmp_path / "global_step_60").mkdir()  # incomplete: it stays for inspection
    manager.set_aside_later_checkpoints(0)
    for step in (10, 20, 30):
        assert manager.save(step, write_weights(b"new"), {"n": "new"}).is_dir()
        assert manager.load_state() == {"n": "new"}
    assert list_steps(manager) == [20, 30, 60]
    aside = CheckpointManager(tmp_path / "given_up")
    assert list_steps(aside) == [40, 50] and aside.load_state() == {"n": "old"}


def test_checkpoints_set_aside_are_never_overwritten(tmp_path, caplog):
    manager = CheckpointManager(tmp_path)
    for payload in (b"first", b"second"):
        for step in (1, 2, 3):
            manager.save(step, write_weights(payload), {})
        manager.set_aside_later_checkpoints(1)
    assert list_steps(manager) == [1]
    given_up = tmp_path / "given_up"
    contents = {
        path.name: (path / "actor" / "weights.bin").read_bytes() for path in given_up.iterdir()
    }
    names = ("global_step_2", "global_step_3")
    assert contents == {name: b"second" for name in names} | {
        f"{name}.1": b"first" for name in names
    }
    assert f"{given_up}: global_step_2, global_step_3" in caplog.text


def test_retention_keeps_the_checkpoint_just_saved(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    manager.save(5, write_weights(b"a"), {})
    assert manager.save(4, write_weights(b"b"), {}).is_dir()
