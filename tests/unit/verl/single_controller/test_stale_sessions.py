"""Session directories of Ray are removed only after their Ray has ended."""

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
    """Return a directory with a short path, because the path of a socket is limited."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def ended_pid() -> int:
    """Return the id of a process that has ended."""
    return int(subprocess.check_output([sys.executable, "-c", "import os; print(os.getpid())"]))


def make_session(directory, start, pid):
    session = directory / f"session_2026-01-{start:02}_00-00-00_000000_{pid}"
    (session / "sockets").mkdir(parents=True)
    (session / "logs").mkdir()
    return session


def test_newest_ended_sessions_are_kept(directory, ended_pid):
    ended = [make_session(directory, day, ended_pid) for day in range(1, 7)]
    others = [directory / "user", directory / "session_notes"]
    for other in others:
        other.mkdir()
    (directory / "session_latest").symlink_to(ended[-1])
    remove_stale_sessions(directory)
    assert [path for path in ended if path.exists()] == ended[-KEPT_SESSIONS:]
    assert all(path.exists() for path in (*others, directory / "session_latest"))
    remove_stale_sessions(directory / "nowhere")


def test_running_sessions_are_kept(directory, ended_pid):
    for day in range(11, 11 + KEPT_SESSIONS):
        make_session(directory, day, ended_pid)
    running = make_session(directory, 1, os.getpid())
    # In another container: its process is not visible, and its Ray answers.
    elsewhere = make_session(directory, 2, ended_pid)
    unnamed = make_session(directory, 3, "x")
    ended = make_session(directory, 4, ended_pid)
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(str(elsewhere / "sockets" / "raylet"))
        raylet.listen()
        remove_stale_sessions(directory)
    assert running.exists() and elsewhere.exists() and unnamed.exists() and not ended.exists()


def test_sessions_of_other_users_are_kept(directory, ended_pid, monkeypatch):
    sessions = [make_session(directory, day, ended_pid) for day in range(1, 7)]
    monkeypatch.setattr(os, "getuid", lambda: sessions[0].stat().st_uid + 1)
    remove_stale_sessions(directory)
    assert all(session.exists() for session in sessions)
