"""Files and directories that are there whole or not at all."""

import stat

import pytest

from verl.utils.files import atomic_write, publish_directory


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fill(folder, **files):
    for name, text in files.items():
        (folder / name).write_text(text)


def test_a_file_is_there_when_it_is_whole(tmp_path):
    target = tmp_path / "a" / "b" / "table.txt"
    with atomic_write(target) as file:
        file.write("first")
        file.flush()
        assert not target.exists()
    assert target.read_text() == "first"
    assert names(target.parent) == ["table.txt"]


def test_text_is_written_as_utf_8(tmp_path):
    with atomic_write(str(tmp_path / "text")) as file:
        file.write("é →")
    assert (tmp_path / "text").read_bytes() == "é →".encode()


def test_a_failure_leaves_the_old_file(tmp_path):
    target = tmp_path / "table.txt"
    target.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(target) as file:
        file.write("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert names(tmp_path) == ["table.txt"]


def test_a_second_write_replaces_the_first(tmp_path):
    target = tmp_path / "table.txt"
    for text in ("a long first text", "short"):
        with atomic_write(target) as file:
            file.write(text)
    assert target.read_text() == "short"


def test_a_directory_is_there_when_it_is_whole(tmp_path):
    target = tmp_path / "a" / "policy"
    with publish_directory(target) as folder:
        fill(folder, weights="w")
        assert not target.exists()
        assert folder.parent == target.parent  # the same disk: a rename is enough
    assert (target / "weights").read_text() == "w"
    assert names(target.parent) == ["policy"]


def test_a_directory_replaces_an_older_one(tmp_path):
    target = tmp_path / "policy"
    target.mkdir()
    fill(target, weights="old", extra="old")
    with publish_directory(str(target)) as folder:
        fill(folder, weights="new")
    assert names(target) == ["weights"]
    assert (target / "weights").read_text() == "new"
    assert names(tmp_path) == ["policy"]


def test_a_failure_leaves_the_old_directory(tmp_path):
    target = tmp_path / "policy"
    target.mkdir()
    fill(target, weights="old")
    with pytest.raises(RuntimeError), publish_directory(target) as folder:
        fill(folder, weights="half")
        raise RuntimeError
    assert (target / "weights").read_text() == "old"
    assert names(tmp_path) == ["policy"]


def test_others_may_read_what_is_published(tmp_path):
    target = tmp_path / "policy"
    with publish_directory(target) as folder:
        (folder / "below").mkdir()
        (folder / "below" / "weights").write_text("w")
        (folder / "below" / "weights").chmod(0o600)
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    assert stat.S_IMODE((target / "below" / "weights").stat().st_mode) == 0o644
