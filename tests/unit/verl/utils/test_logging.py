"""Tests that logs mask secrets in messages, arguments, tracebacks and final errors."""

import logging
import os
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


CLOSED_TERMINAL = """
import logging
import os
from verl.record.console import TrainingConsole
from verl.utils.logging import setup_logging

setup_logging()
console = TrainingConsole(total_steps=2)
# A progress bar redirects print() to the terminal.
os.write(1, b"terminal\\n" if console.console.is_terminal else b"file\\n")
os.read(0, 1)  # the terminal is closed meanwhile
for step in (1, 2):
    console.step(step, {"episode/reward": 1.0})
    logging.info("step %d", step)
console.close()
os.write(1, b"finished\\n")
"""


def test_run_continues_after_its_terminal_was_closed():
    terminal, end_of_process = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CLOSED_TERMINAL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=end_of_process,
        text=True,
    )
    os.close(end_of_process)
    assert process.stdout and process.stdout.readline() == "terminal\n"
    os.close(terminal)
    output, _ = process.communicate("\n", timeout=120)
    assert output == "finished\n" and process.returncode == 0


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
