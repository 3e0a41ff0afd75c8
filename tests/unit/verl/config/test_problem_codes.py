"""Tests of the codes that name kinds of mistakes."""

import pickle
from pathlib import Path
from typing import get_args

import pytest

from verl.config.settings import ConfigError, Problem
from verl.config.settings.errors import ProblemCode, UserError, get_problem_code
from verl.utils.commands import UsageError
from verl.utils.message_rows import DataRow, InvalidRowError

ROOT = Path(__file__).parents[4]
PACKAGES = ("verl", "agent_system", "rlvcr", "scripts")


def test_every_code_is_used():
    errors_file = ROOT / "verl/config/settings/errors.py"
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    source = "".join(path.read_text() for path in files if path != errors_file)
    assert [code for code in get_args(ProblemCode) if f'"{code}"' not in source] == []


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("trainer.nnodes=2: why", "trainer.nnodes"),
        ("trainer.default_local_dir: why", "trainer.default_local_dir"),
        ("cold start: data.levels=1: why", "cold start: data.levels"),
        ("--on 8xA100: why", "--on"),
        ("", ""),
    ],
)
def test_key_is_the_first_part_of_the_message(text, key):
    assert Problem(text, "does_not_fit").key_path == key


def test_message_keeps_its_code_in_a_list_of_other_messages():
    error = ConfigError([Problem("a=1: why", "no_effect"), Problem("b=1: why", "missing_key")])
    assert [problem.code for problem in error.problems] == ["no_effect", "missing_key"]
    assert ConfigError("a=1: why", "file_exists").problems[0].code == "file_exists"


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a=1: why", "no_effect"),
        DataRow("data.path='a'", 0, {}).make_error("prompt", "is null", "a text", "remove it"),
        UsageError("--a=1", "file_exists"),
    ],
)
def test_errors_are_equal_after_the_way_to_another_process(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error)
    if isinstance(error, ConfigError):
        assert [problem.code for problem in copy.problems] == [error.problems[0].code]
    else:
        assert copy.code == error.code
    if isinstance(error, InvalidRowError):
        assert copy.column == "prompt"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("a", "no_rows"), "no_rows"),
        (FileNotFoundError("a"), "missing_file"),
        (PermissionError("a"), "unreadable_file"),
        (ModuleNotFoundError("a"), "missing_package"),
        (KeyError("a"), "unknown_name"),
        (AttributeError("a"), "unknown_name"),
        (TypeError("a"), "wrong_type"),
        (ValueError("a"), "failed_call"),
    ],
)
def test_other_errors_have_the_code_of_their_type(error, code):
    assert get_problem_code(error, "failed_call") == code
