"""Tests of the commit message rules: length, form and body, also in git's hook."""

import subprocess
import sys

import pytest

from scripts.dev import check_commit_message
from scripts.dev.check_commit_message import count_changed_lines, find_message_problems


@pytest.mark.parametrize(
    ("message", "changed_lines", "problems"),
    [
        ("x" * 72, 30, 0),
        ("x" * 73, 30, 1),
        ("First line", 31, 1),
        ("First line\n\nWhy, and what was measured.", 31, 0),
        ("First line\n\n", 31, 1),
        ("First line\nNo empty line", 31, 1),
        ("", 1, 1),
        ("x" * 73, 31, 2),
    ],
)
def test_message_rules(message, changed_lines, problems):
    assert len(list(find_message_problems(message, changed_lines))) == problems


def test_text_lines_count_and_binary_files_do_not():
    assert count_changed_lines("20\t11\ta.py\n-\t-\tb.png\n0\t1\tc d.py\n") == 32


def test_hook_requires_a_body_except_for_merges(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        result = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True)
        return result.returncode

    assert git("init", "--initial-branch=main") == 0
    hook = tmp_path / ".git/hooks/commit-msg"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f'#!/bin/sh\nexec {sys.executable} {check_commit_message.__file__} "$1"\n')
    hook.chmod(0o755)
    (tmp_path / "short").write_text("line\n" * 30)
    git("add", "-A")
    assert git("commit", "-m", "x" * 73) != 0
    assert git("commit", "-m", "A short file") == 0
    git("checkout", "-b", "side")
    (tmp_path / "long").write_text("line\n" * 31)
    git("add", "-A")
    assert git("commit", "-m", "A long file") != 0
    assert git("commit", "-m", "A long file", "-m", "# is no reason\n\nIt is needed.") == 0
    git("checkout", "main")
    assert git("merge", "--no-ff", "side", "-m", "x" * 73) == 0
