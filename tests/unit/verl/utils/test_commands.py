"""Tests of mistakes on command lines: one message, status 2, and no traceback."""

import errno
import os
import subprocess
import sys

import pytest

from verl.config.settings import ConfigError
from verl.utils.commands import (
    MISTAKE_STATUS,
    UsageError,
    read_yaml_mapping,
    run_and_report_mistakes,
)


def make_raising(error):
    def main():
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UsageError("a: wrong", "wrong_type"), "a: wrong"),
        (ConfigError("b=1: wrong", "wrong_type"), "b=1: wrong"),
        (SystemExit("c: wrong"), "c: wrong"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "d"), "d: No such file"),
        (FileNotFoundError("e is no run directory"), "e is no run directory"),
    ],
)
def test_mistake_gives_a_message_and_status_two(capsys, error, message):
    assert run_and_report_mistakes(make_raising(error)) == MISTAKE_STATUS
    assert message in capsys.readouterr().err


def test_text_beyond_the_encoding_of_the_locale_is_escaped():
    code = (
        "from verl.utils.commands import run_and_report_mistakes\n"
        "run_and_report_mistakes(lambda: print('d\\u00fcr'))"
    )
    environ = os.environ | {"PYTHONIOENCODING": "ascii"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environ)
    assert result.stdout == b"d\\xfcr\n" and not result.stderr


def test_os_error_inside_a_run_is_raised():
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", "d")
    with pytest.raises(FileNotFoundError):
        run_and_report_mistakes(make_raising(error), catches_os_errors=False)


@pytest.mark.parametrize(
    "error", [RuntimeError("fault"), OSError(errno.EIO, "no file"), SystemExit(3), KeyError("x")]
)
def test_program_fault_is_raised(error):
    with pytest.raises(type(error)):
        run_and_report_mistakes(make_raising(error))


def test_status_of_the_command_is_returned():
    assert run_and_report_mistakes(lambda status: status, 1) == 1
    assert run_and_report_mistakes(lambda: None) == 0


BOMB = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}, *{old}, *{old}]\n"
    for old, new in zip("abcdefghijklmn", "bcdefghijklmno", strict=True)
)


@pytest.mark.parametrize(
    "content",
    [
        b"- a\n- b\n",
        b"",
        b"text",
        b"a: [1\n",
        b"1: 2\n",
        b"a: \xff\n",
        b"arms: {grpo: {seeds: [1]}, grpo: {seeds: [2]}}\n",
        BOMB.encode(),
        b"a: " + b"[" * 100_000,
        b"#" * 2_000_001,
        b"!!python/object/apply:os.system ['true']",
    ],
)
def test_yaml_without_a_safe_mapping_is_refused(tmp_path, content):
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError):
        read_yaml_mapping(path)


def test_mapping_is_read(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_bytes(b"\xef\xbb\xbfconfig: relay\narms: {a: {seeds: [0]}}\n")
    assert read_yaml_mapping(path) == {"config": "relay", "arms": {"a": {"seeds": [0]}}}
