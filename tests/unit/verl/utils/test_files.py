"""Tests of files and directories that are published complete or not at all."""

import errno
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.refusals import has_problem, mentions
from verl.config.settings import ConfigError
from verl.utils import files
from verl.utils.files import (
    atomic_write,
    publish_directory,
    require_new_file,
    require_replaceable_directory,
    write_html_or_svg,
)


def list_names(folder):
    return sorted(path.name for path in folder.iterdir())


def write_files(folder, **files):
    for name, text in files.items():
        (folder / name).write_text(text)


def test_file_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "a" / "b" / "table.txt"
    with atomic_write(target) as file:
        file.write("first")
        file.flush()
        assert not target.exists()
    assert target.read_text() == "first"
    assert list_names(target.parent) == ["table.txt"]


def test_text_is_written_as_utf_8(tmp_path):
    with atomic_write(str(tmp_path / "text")) as file:
        file.write("é →")
    assert (tmp_path / "text").read_bytes() == "é →".encode()


def test_failure_keeps_the_old_file(tmp_path):
    target = tmp_path / "table.txt"
    target.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(target) as file:
        file.write("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert list_names(tmp_path) == ["table.txt"]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null"), os.mkdir])
def test_device_pipe_or_directory_is_never_replaced(tmp_path, make):
    path = tmp_path / "place"
    make(path)
    kind = path.lstat().st_mode
    with pytest.raises(OSError) as caught, atomic_write(path) as file:
        file.write("new")
    assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, str(path))
    with pytest.raises(ConfigError, check=has_problem("file_exists", "key")):
        require_new_file(path, "key", overwrite=True, fix="overwrite=true")
    assert path.lstat().st_mode == kind and list_names(tmp_path) == ["place"]


def test_second_write_replaces_the_first(tmp_path):
    target = tmp_path / "table.txt"
    for text in ("a long first text", "short"):
        with atomic_write(target) as file:
            file.write(text)
    assert target.read_text() == "short"


def test_directory_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "a" / "policy"
    with publish_directory(target) as folder:
        write_files(folder, weights="w")
        assert not target.exists()
        assert folder.parent == target.parent  # the same disk, so that a rename is enough
    assert (target / "weights").read_text() == "w"
    assert list_names(target.parent) == ["policy"]


def test_directory_replaces_an_older_one(tmp_path):
    target = tmp_path / "policy"
    with publish_directory(target) as folder:
        write_files(folder, weights="old", extra="old")
    with publish_directory(str(target)) as folder:
        write_files(folder, weights="new")
    assert list_names(target) == [".published.json", "weights"]
    assert (target / "weights").read_text() == "new"
    assert list_names(tmp_path) == ["policy"]


def test_failure_keeps_the_old_directory(tmp_path):
    target = tmp_path / "policy"
    with publish_directory(target) as folder:
        write_files(folder, weights="old")
    with pytest.raises(RuntimeError), publish_directory(target) as folder:
        write_files(folder, weights="half")
        raise RuntimeError
    assert (target / "weights").read_text() == "old"
    assert list_names(tmp_path) == ["policy"]


def test_published_files_are_readable_by_others(tmp_path):
    target = tmp_path / "policy"
    with publish_directory(target) as folder:
        (folder / "below").mkdir()
        (folder / "below" / "weights").write_text("w")
        (folder / "below" / "weights").chmod(0o600)
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    assert stat.S_IMODE((target / "below" / "weights").stat().st_mode) == 0o644


# ---- replaceable targets ------------------------------------------------------------------------


def publish(target, overwrite=False, **files):
    with publish_directory(target, overwrite) as folder:
        write_files(folder, **files)


def test_directory_of_a_killed_process_is_removed_by_the_next_one(tmp_path):
    code = (
        "import os, sys; from verl.utils.files import publish_directory\n"
        "with publish_directory(sys.argv[1]) as directory:\n"
        "    (directory / 'weights').write_bytes(bytes(1000))\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    target, other = tmp_path / "policy", tmp_path / "policy.partial"
    for path in (target, other):
        subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    with publish_directory(target) as directory:
        (directory / "weights").write_bytes(b"abc")
    left = [path.name for path in tmp_path.iterdir() if path != target]
    assert len(left) == 1 and left[0].startswith(".policy.partial.partial-")
    assert (target / "weights").read_bytes() == b"abc"


def test_published_directory_is_replaced_again(tmp_path):
    for text in ("old", "new"):
        publish(tmp_path / "policy", weights=text)
    assert (tmp_path / "policy" / "weights").read_text() == "new"


def test_directory_of_another_command_is_not_replaced(tmp_path):
    """Otherwise an export would replace the policy of a supervised run."""
    target = tmp_path / "policy"
    with publish_directory(target, command="main_sft") as folder:
        write_files(folder, weights="trained")
    with pytest.raises(ConfigError, check=mentions("weights", "overwrite=true")):
        require_replaceable_directory(target, "target", False, command="main_export")
    require_replaceable_directory(target, "target", False, command="main_sft")
    file_list = json.loads((target / ".published.json").read_text())
    del file_list["command"]  # as in the list of an earlier version
    (target / ".published.json").write_text(json.dumps(file_list))
    require_replaceable_directory(target, "target", False, command="main_export")


def add_file(target):
    (target / "thesis.txt").write_text("mine")


def edit_file(target):
    (target / "weights").write_text("x")


def add_link(target):
    (target / "link").symlink_to("weights")


@pytest.mark.parametrize("change", [add_file, edit_file, add_link])
def test_changed_directory_is_not_replaced(tmp_path, change):
    target = tmp_path / "policy"
    publish(target, weights="w")
    change(target)
    before = list_names(target)
    with pytest.raises(ConfigError, check=mentions("overwrite=true")):
        require_replaceable_directory(target, "target", False)
    with pytest.raises(ConfigError):
        publish(target, weights="new")
    assert list_names(target) == before and list_names(tmp_path) == ["policy"]
    publish(target, overwrite=True, weights="new")
    assert (target / "weights").read_text() == "new"


def make_file(path):
    path.write_text("mine")


def make_link(path):
    (path.parent / "elsewhere").mkdir()
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("make", [make_file, make_link])
def test_files_and_links_are_never_replaced(tmp_path, make):
    make(tmp_path / "place")
    with pytest.raises(ConfigError, check=mentions("place")):
        publish(tmp_path / "place", overwrite=True, weights="w")


def test_target_above_protected_directories_is_refused(tmp_path, monkeypatch):
    protected = tmp_path / "run" / "checkpoints"
    protected.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for target in (protected, protected.parent, tmp_path, Path("/"), Path.home(), Path(".")):
        with pytest.raises(ConfigError):
            require_replaceable_directory(target, "target", True, [protected])


@pytest.mark.parametrize("exchange", [True, False])
def test_readers_find_a_complete_version_beside_two_writers(tmp_path, monkeypatch, exchange):
    monkeypatch.setattr(files, "flush_to_disk", lambda path: None)
    if not exchange:
        monkeypatch.setattr(files, "_exchange_directories", lambda one, other: False)
    target = tmp_path / "policy"
    publish(target, one="start", other="start")
    errors = []

    def write(name):
        try:
            for number in range(100):
                publish(target, one=f"{name}{number}", other=f"{name}{number}")
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for writer in writers:
        writer.start()
    missing = mixed = 0
    while any(writer.is_alive() for writer in writers):
        try:
            descriptor = os.open(
                target, os.O_RDONLY
            )  # an open file keeps its inode number from reuse
            texts = {(target / name).read_text() for name in ("one", "other")}
            mixed += len(texts) > 1 and os.path.samestat(target.stat(), os.fstat(descriptor))
            os.close(descriptor)
        except FileNotFoundError:
            missing += 1
    assert not errors and mixed == 0 and list_names(tmp_path) == ["policy"]
    assert missing == 0 or not exchange
    assert len({(target / name).read_text() for name in ("one", "other")}) == 1


@pytest.mark.parametrize("name", ["page.html", "below/picture.svg"])
def test_page_replaces_only_pages(tmp_path, name):
    path = tmp_path / name
    write_html_or_svg(path, "<svg>1</svg>", "--out")
    write_html_or_svg(path, "<svg>2</svg>", "--out")
    assert path.read_text().startswith("<svg>2</svg>\n")
    for text in ("notes", "<svg>3</svg>\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, check=has_problem("file_exists", "--out")):
            write_html_or_svg(path, "<svg>4</svg>", "--out")
        assert path.read_text() == text
    path.write_text("")
    write_html_or_svg(path, "<svg>5</svg>", "--out")
    with pytest.raises(OSError):
        write_html_or_svg(tmp_path, "<svg>6</svg>", "--out")
