"""Tests that logs mask secrets in messages, arguments, tracebacks and final errors."""

import logging
import subprocess
import sys

import pytest

from verl.config.settings import secret_values
from verl.utils.logging import LINE_FORMAT, MaskingFormatter, escape_control_characters

SECRET = "hf_abcdefgh1234"


@pytest.fixture
def formatter(monkeypatch):
    monkeypatch.setattr(secret_values, "_registered_secrets", {SECRET})
    return MaskingFormatter(LINE_FORMAT)


def make_record(message: str, *args: object, error: Exception | None = None) -> logging.LogRecord:
    trace = (type(error), error, None) if error else None
    return logging.LogRecord("verl", logging.WARNING, "file.py", 1, message, args, trace)


@pytest.mark.parametrize(
    "entry",
    [
        make_record("kwargs %s", {"api_key": SECRET}),
        make_record(f"API_KEY={SECRET}"),
        make_record("the server refused %s", SECRET),
        make_record("failed", error=ValueError(f"401: {SECRET}")),
        make_record("the environment was %r", {"env": {"PLAIN": SECRET}}),
        make_record("asked http://me:%s@host/x", SECRET),
    ],
)
def test_secrets_are_masked(formatter, entry):
    text = formatter.format(entry)
    assert SECRET not in text and "***" in text


def test_other_texts_are_unchanged(formatter):
    line = formatter.format(make_record("max_tokens=%d, pad_token=%s", 12, "<pad>"))
    assert line.endswith("max_tokens=12, pad_token=<pad>")


def test_text_of_a_record_imitates_no_record_and_controls_no_terminal(formatter):
    forged = "2026-01-01 00:00:00,000 INFO verl: step 9: success 100%"
    text = formatter.format(make_record("failed: %s", f"\x1b[2J\r\x9b1m\n{forged}"))
    assert text.endswith(r"failed: \x1b[2J\r\x9b1m" + f"\n    {forged}")
    assert escape_control_characters("a\tb\né\ud800") == "a\tb\né\\ud800"


def test_error_that_ends_the_process_is_masked():
    code = "\n".join(
        [
            "import os",
            "from verl.utils.logging import setup_logging",
            f"os.environ['SERVICE_TOKEN'] = '{SECRET}'",
            "setup_logging()",
            "raise ValueError('refused ' + os.environ['SERVICE_TOKEN'])",
        ]
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "ValueError: refused ***" in result.stderr and SECRET not in result.stderr
