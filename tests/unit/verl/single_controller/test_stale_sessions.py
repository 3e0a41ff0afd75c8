"""Session directories of Ray are removed when their Ray has ended, and only then."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.single_controller.ray.local import KEPT_SESSIONS, remove_stale_sessions


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short path, as the address of a socket needs it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    return int(subprocess.check_output([sys.executable, "-c", "import os; print(os.getpid())"]))


def make(directory, start, pid):
    session = directory / f"session_2026-01-{start:02}_00-00-00_000000_{pid}"
    (session / "sockets").mkdir(parents=True)
    (session / "logs").mkdir()
    return session


def test_the_newest_that_ended_are_kept(directory, gone):
    ended = [make(directory, day, gone) for day in range(1, 7)]
    others = [directory / "user", directory / "session_notes"]
    for other in others:
        other.mkdir()
    (directory / "session_latest").symlink_to(ended[-1])
    remove_stale_sessions(directory)
    assert [path for path in ended if path.exists()] == ended[-KEPT_SESSIONS:]
    assert all(path.exists() for path in (*others, directory / "session_latest"))
    remove_stale_sessions(directory / "nowhere")


def test_what_runs_stays(directory, gone):
    for day in range(11, 11 + KEPT_SESSIONS):
        make(directory, day, gone)
    running = make(directory, 1, os.getpid())
    # In another container: its process is not seen, its Ray answers.
    elsewhere = make(directory, 2, gone)
    unnamed = make(directory, 3, "x")
    ended = make(directory, 4, gone)
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(str(elsewhere / "sockets" / "raylet"))
        raylet.listen()
        remove_stale_sessions(directory)
    assert running.exists() and elsewhere.exists() and unnamed.exists() and not ended.exists()


def test_sessions_of_others_stay(directory, gone, monkeypatch):
    sessions = [make(directory, day, gone) for day in range(1, 7)]
    monkeypatch.setattr(os, "getuid", lambda: sessions[0].stat().st_uid + 1)
    remove_stale_sessions(directory)
    assert all(session.exists() for session in sessions)
