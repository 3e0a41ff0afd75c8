"""Checkpoint directories: what is saved comes back, what is damaged is passed over, retention keeps
the right ones.
"""

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
from verl.records import WrittenFiles
from verl.utils import checkpoint
from verl.utils.checkpoint import CheckpointError, CheckpointManager, verify_checkpoint


def write(payload: bytes):
    def writer(directory):
        (directory / "actor").mkdir()
        (directory / "actor" / "weights.bin").write_bytes(payload)

    return writer


def saved_steps(manager):
    return list(manager.find_checkpoints())


def test_saved_state_and_files_come_back(tmp_path):
    manager = CheckpointManager(tmp_path / "checkpoints")
    assert manager.find_latest_valid() is None
    path = manager.save(3, write(b"abc"), {"epoch": 1, "rng": [1, 2]})
    assert path == manager.find_latest_valid() == tmp_path / "checkpoints" / "global_step_3"
    assert (path / "actor" / "weights.bin").read_bytes() == b"abc"
    assert manager.load_state() == manager.load_state(path) == {"epoch": 1, "rng": [1, 2]}
    manifest = verify_checkpoint(path)
    assert manifest["step"] == 3 and manifest["files"]["actor/weights.bin"]["size"] == 3
    assert sorted(p.name for p in manager.root.iterdir()) == ["global_step_3"]
    assert path.stat().st_mode == manager.root.stat().st_mode and stat.S_ISDIR(path.stat().st_mode)


def test_newest_is_by_number_and_the_same_step_is_replaced(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (9, 10, 2):
        manager.save(step, write(b"old"), {"n": step})
    assert manager.find_latest_valid() == tmp_path / "global_step_10"
    manager.save(10, write(b"new"), {"n": 100})
    assert manager.load_state() == {"n": 100}
    assert saved_steps(manager) == [2, 9, 10]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: (p / "actor" / "weights.bin").write_bytes(b"abd"), "SHA-256 differs"),
        (lambda p: (p / "actor" / "weights.bin").write_bytes(b"ab"), "2 bytes"),
        (lambda p: (p / "actor" / "weights.bin").unlink(), "missing"),
        (lambda p: (p / "state.json").write_text("{}"), "bytes"),
        (lambda p: (p / "manifest.json").write_text('{"files": {'), "cannot be read"),
        (lambda p: (p / "manifest.json").write_text("[]"), "not a manifest"),
        (lambda p: (p / "manifest.json").write_text('{"files": {}}'), "not a manifest"),
        (lambda p: (p / "manifest.json").unlink(), "cannot be read"),
    ],
)
def test_damaged_checkpoints_are_passed_over_with_a_warning(tmp_path, caplog, damage, reason):
    manager = CheckpointManager(tmp_path)
    manager.save(1, write(b"abc"), {})
    damage(manager.save(2, write(b"abc"), {"second": True}))
    assert manager.find_latest_valid() == tmp_path / "global_step_1"
    assert "global_step_2" in caplog.text and reason in caplog.text
    with pytest.raises(CheckpointError, match=reason):
        manager.load_state(tmp_path / "global_step_2")


def test_manifest_entries_cannot_leave_the_directory(tmp_path):
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, write(b"abc"), {})
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("../secret", "/etc/hostname"):
        entries = {**manifest["files"], name: {"sha256": "", "size": 0}}
        (path / "manifest.json").write_text(json.dumps({**manifest, "files": entries}))
        with pytest.raises(CheckpointError, check=mentions("entry")):
            verify_checkpoint(path)


def test_retention_keeps_the_newest(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=2)
    for step in range(5):
        manager.save(step, write(b"abc"), {})
    assert saved_steps(manager) == [3, 4]
    with pytest.raises(ValueError, check=mentions(1)):
        CheckpointManager(tmp_path, max_to_keep=0)


def test_retention_never_takes_the_newest_valid(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    flipped = manager.save(10, write(b"abc"), {})
    (flipped / "actor" / "weights.bin").write_bytes(b"xyz")  # same size: only the digest tells
    manager.save(7, write(b"abc"), {"n": 7})
    manager.save(8, write(b"abc"), {"n": 8})
    assert saved_steps(manager) == [8, 10]
    assert manager.load_state() == {"n": 8}


def test_a_valid_newer_checkpoint_survives_a_save_of_an_older_step(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    manager.save(10, write(b"abc"), {"n": 10})
    manager.save(4, write(b"abc"), {"n": 4})
    assert manager.load_state() == {"n": 10}


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_reserved_names_are_refused(tmp_path, name):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=name):
        manager.save(1, lambda d: (d / name).write_text("{}"), {})
    assert not list(tmp_path.iterdir())


def test_links_are_refused(tmp_path):
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError):
        manager.save(1, lambda d: (d / "link").symlink_to("/etc/hostname"), {})


def test_a_failed_save_leaves_nothing_and_changes_nothing(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    manager.save(1, write(b"abc"), {"n": 1})

    def failing(directory):
        (directory / "half").write_bytes(b"x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        manager.save(1, failing, {"n": 2})
    with pytest.raises(TypeError, check=mentions("JSON")):
        manager.save(2, lambda _: pytest.fail("the writer ran"), {"bad": object()})
    assert manager.load_state() == {"n": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["global_step_1"]


def test_only_abandoned_partials_are_removed(tmp_path):
    manager = CheckpointManager(tmp_path)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    host = socket.gethostname()
    abandoned = [
        f".partial-{host}-{gone.pid}-a",
        f".partial-{host}-{os.getpid()}-b",
        ".partial-elsewhere-1-old",
    ]
    alive = [f".partial-{host}-{os.getppid()}-c", ".partial-elsewhere-1-new"]
    for name in abandoned + alive:
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".partial-elsewhere-1-old", (0, 0))
    manager.save(1, write(b"abc"), {})
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*alive, "global_step_1"])


def test_the_module_needs_no_torch():
    code = "import sys, verl.utils.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def written_by(rank: str, directory, *names: str, size: int = 3) -> WrittenFiles:
    return WrittenFiles(rank, {str(directory / name): size for name in names})


def test_a_save_without_a_ranks_files_says_who_wrote_them_and_leaves_nothing(tmp_path):
    """As on two nodes that share no storage: the other rank's file is on its own disk."""
    manager = CheckpointManager(tmp_path, seen_within_s=0.05)

    def writer(directory):
        (directory / "mine").write_bytes(b"abc")
        own = written_by("rank 0 on a", directory, "mine")
        return [own, written_by("rank 1 on b", directory, "mine", "theirs")]

    with pytest.raises(CheckpointError, check=mentions("theirs", "rank 1 on b")) as raised:
        manager.save(1, writer, {})
    assert "1 files" in str(raised.value)
    assert "trainer.default_local_dir=DIR" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_save_waits_for_a_file_that_another_node_wrote(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, seen_within_s=30.0)
    late = []

    def writer(directory):
        (directory / "part").write_bytes(b"a")  # seen, but not all of it
        late.append(directory / "part")
        return [written_by("rank 1 on b", directory, "part", size=3)]

    def sleep(seconds):
        assert 0 < seconds <= 1
        late.pop().write_bytes(b"abc")

    monkeypatch.setattr(checkpoint.time, "sleep", sleep)
    path = manager.save(1, writer, {})
    assert verify_checkpoint(path)["writers"] == {"rank 1 on b": ["part"]} and not late


def test_a_manifest_without_a_ranks_file_is_not_valid(tmp_path, caplog):
    manager = CheckpointManager(tmp_path)

    def writer(directory):
        for name in ("rank0", "rank1"):
            (directory / name).write_bytes(b"abc")
        return [written_by(f"rank {n} on a", directory, f"rank{n}") for n in range(2)]

    first = manager.save(1, writer, {})
    second = manager.save(2, writer, {})
    assert manager.find_latest_valid() == second
    manifest = json.loads((second / "manifest.json").read_text())
    del manifest["files"]["rank1"]
    (second / "manifest.json").write_text(json.dumps(manifest))
    (second / "rank1").unlink()
    assert manager.find_latest_valid() == first
    assert "rank1" in caplog.text and "rank 1 on a" in caplog.text


# ---- beside the run ------------------------------------------------------------------------------


class Held:
    """A writer that copies at once and writes when it may."""

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
        return [written_by("rank 0 on a", self.directory, "part")]


def test_a_checkpoint_is_there_when_all_of_it_is_written(tmp_path):
    manager = CheckpointManager(tmp_path, background=True)
    writer = Held()
    path = manager.save(1, writer, {"n": 1})
    assert not path.exists() and manager.find_latest_valid() is None
    assert [entry.name for entry in tmp_path.iterdir()] == [writer.directory.name]
    writer.may_write.set()
    manager.wait()
    assert manager.find_latest_valid() == path and manager.load_state() == {"n": 1}
    assert verify_checkpoint(path)["writers"] == {"rank 0 on a": ["part"]}
    assert [entry.name for entry in tmp_path.iterdir()] == ["global_step_1"]


def test_the_next_save_waits_for_the_last_one(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=1, background=True)
    first, second = Held(), Held()
    manager.save(1, first, {})
    second.may_write.set()
    threading.Timer(0.05, first.may_write.set).start()
    manager.save(2, second, {"n": 2})
    assert first.directory != second.directory
    manager.wait()
    assert saved_steps(manager) == [2] and manager.load_state() == {"n": 2}


@pytest.mark.parametrize("asks", [lambda m: m.save(2, write(b"abc"), {}), lambda m: m.wait()])
def test_a_write_that_failed_is_raised_when_next_asked(tmp_path, caplog, asks):
    manager = CheckpointManager(tmp_path, background=True)
    writer = Held(CheckpointError("rank 1 on b: its shards were not written: disk full"))
    manager.save(1, writer, {})
    writer.may_write.set()
    with pytest.raises(CheckpointError, check=mentions("step 1", "rank 1 on b: its shards")):
        asks(manager)
    assert "step 1" in caplog.text and not list(tmp_path.iterdir())
    manager.wait()  # said once
    manager.save(3, write(b"abc"), {"n": 3})
    manager.wait()
    assert manager.load_state() == {"n": 3}


def test_a_state_that_cannot_be_copied_is_raised_at_once(tmp_path):
    manager = CheckpointManager(tmp_path, background=True)
    with pytest.raises(ZeroDivisionError):
        manager.save(1, lambda _: 1 / 0, {})
    manager.wait()
    assert not list(tmp_path.iterdir())


def test_closing_gives_a_save_its_time_and_says_what_it_did_not_wait_for(tmp_path, caplog):
    manager = CheckpointManager(tmp_path, background=True)
    writer = Held()
    manager.save(1, writer, {})
    manager.close(timeout_s=0.01)
    assert "save-1" in caplog.text and "0.01 s" in caplog.text
    assert manager.find_latest_valid() is None
    writer.may_write.set()
    quick = Held()
    quick.may_write.set()
    other = CheckpointManager(tmp_path / "other", background=True)
    other.save(2, quick, {})
    other.close()
    assert list(other.find_checkpoints()) == [2]


def test_a_run_that_begins_again_keeps_what_it_saves(tmp_path):
    """Steps of the run before are higher, and its weights are not to be resumed from."""
    manager = CheckpointManager(tmp_path, max_to_keep=2)
    for step in (40, 50):
        manager.save(step, write(b"old"), {"n": "old"})
    (tmp_path / "global_step_60").mkdir()  # torn: left for inspection
    manager.set_aside_later_checkpoints(0)
    for step in (10, 20, 30):
        assert manager.save(step, write(b"new"), {"n": "new"}).is_dir()
        assert manager.load_state() == {"n": "new"}
    assert saved_steps(manager) == [20, 30, 60]
    aside = CheckpointManager(tmp_path / "given_up")
    assert saved_steps(aside) == [40, 50] and aside.load_state() == {"n": "old"}


def test_the_step_that_is_resumed_from_stays_and_nothing_put_aside_is_lost(tmp_path, caplog):
    manager = CheckpointManager(tmp_path)
    for payload in (b"first", b"second"):
        for step in (1, 2, 3):
            manager.save(step, write(payload), {})
        manager.set_aside_later_checkpoints(1)
    assert saved_steps(manager) == [1]
    given_up = tmp_path / "given_up"
    kept = {path.name: (path / "actor" / "weights.bin").read_bytes() for path in given_up.iterdir()}
    names = ("global_step_2", "global_step_3")
    assert kept == {name: b"second" for name in names} | {f"{name}.1": b"first" for name in names}
    assert f"{given_up}: global_step_2, global_step_3" in caplog.text


def test_what_was_just_saved_is_kept_beside_newer_ones(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    manager.save(5, write(b"a"), {})
    assert manager.save(4, write(b"b"), {}).is_dir()
