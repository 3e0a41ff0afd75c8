"""Tests of SIGTERM, SIGHUP and Ctrl-C: the first signal ends a block in order, the second ends the
process.
"""

import os
import signal
import subprocess
import sys

import pytest

from verl.names import ResumeMode
from verl.record.run_dir import RunDirectory
from verl.single_controller.ray.local import keep_sigterm_handler
from verl.trainer import cli
from verl.utils.checkpoint import CheckpointManager
from verl.utils.commands import InterruptOnSignal


@pytest.fixture(autouse=True)
def hangup_is_not_ignored():
    """Restore the default of SIGHUP, which ``nohup pytest`` ignores."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_ends_the_block_in_order(number):
    before, steps = signal.getsignal(number), []
    with InterruptOnSignal() as interruption:
        try:
            steps.append("work")
            os.kill(os.getpid(), number)
            steps.append("never")
        finally:
            steps.append("clean up")
    assert steps == ["work", "clean up"]
    assert interruption.exit_status == 128 + number and signal.getsignal(number) is before


def test_keyboard_interrupt_without_signal_is_raised():
    with InterruptOnSignal() as interruption:
        pass
    assert interruption.exit_status == 0
    with pytest.raises(KeyboardInterrupt), InterruptOnSignal():
        raise KeyboardInterrupt


def test_second_signal_ends_the_process_at_once():
    code = (
        "import os, signal, time\n"
        "from verl.utils.commands import InterruptOnSignal\n"
        "with InterruptOnSignal():\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(60)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30
    )
    assert result.returncode == 143
    first_line, second_line = result.stderr.splitlines()
    assert first_line.startswith("SIGINT: ") and second_line.startswith("SIGTERM: ")


def test_repeated_hangup_does_not_stop_the_cleanup():
    steps = []
    with InterruptOnSignal() as interruption:
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            steps.append("clean up")
    assert steps == ["clean up"] and interruption.exit_status == 128 + signal.SIGHUP


def test_hangup_that_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with InterruptOnSignal() as interruption:
        os.kill(os.getpid(), signal.SIGHUP)
    assert interruption.exit_status == 0


def test_library_does_not_replace_the_sigterm_handler():
    with InterruptOnSignal() as interruption:
        with keep_sigterm_handler():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("the library's"))
        os.kill(os.getpid(), signal.SIGTERM)
    assert interruption.exit_status == 143


def test_command_line_ends_with_the_status_of_the_signal():
    started = []

    def main(cfg):
        started.append(cfg.trainer.seed)
        os.kill(os.getpid(), signal.SIGTERM)

    assert cli.run(main, "quickstart", argv=["-m", "trainer.seed=1,2"]) == 143
    assert started == [1]


def test_last_line_names_the_newest_checkpoint(tmp_path, caplog):
    run = RunDirectory(tmp_path)

    def interrupt(resume_mode: ResumeMode = "auto") -> str:
        with pytest.raises(KeyboardInterrupt), run.log_resume_hint_on_interrupt(resume_mode):
            raise KeyboardInterrupt
        return caplog.records[-1].getMessage()

    assert "global_step" not in interrupt()
    for step in (9, 10):
        CheckpointManager(run.checkpoints).save(step, lambda path: (path / "x").touch(), {})
    assert f"{run.checkpoints}/global_step_10" in interrupt() and "disable" not in interrupt()
    # The same command would start again from step 0.
    assert "resume_mode=disable" in interrupt("disable")
