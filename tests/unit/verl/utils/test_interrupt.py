"""Tests of SIGTERM, SIGHUP and Ctrl-C: the first signal ends a block in order, the second ends the
process.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import ray._private.utils as ray_utils

from verl.names import ResumeMode
from verl.record.run_dir import RunDirectory
from verl.single_controller.ray.local import keep_sigterm_handler
from verl.trainer import cli
from verl.utils import commands
from verl.utils.checkpoint import CheckpointManager
from verl.utils.commands import InterruptOnSignal, run_and_report_mistakes
from verl.utils.files import publish_directory


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_that_a_parent_forwards_does_not_stop_the_cleanup(number):
    steps = []
    with InterruptOnSignal() as interruption:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)
            steps.append("clean up")
    assert steps == ["clean up"] and interruption.exit_status == 128 + number


def test_same_signal_after_a_while_ends_the_process(monkeypatch):
    monkeypatch.setattr(commands, "SAME_SIGNAL_S", 0.0)
    statuses = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    with InterruptOnSignal():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
    assert statuses == [143]


def test_hangup_that_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with InterruptOnSignal() as interruption:
        os.kill(os.getpid(), signal.SIGHUP)
    assert interruption.exit_status == 0


def test_ray_does_not_replace_the_sigterm_handler_after_its_start():
    with InterruptOnSignal() as interruption:
        with keep_sigterm_handler():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ray's"))
        os.kill(os.getpid(), signal.SIGTERM)
    assert interruption.exit_status == 143


def test_ray_does_not_replace_the_sigterm_handler_during_its_start():
    with InterruptOnSignal() as interruption, keep_sigterm_handler():
        ray_utils.set_sigterm_handler(lambda *_: sys.exit("Ray's"))  # as ray.init does
        os.kill(os.getpid(), signal.SIGTERM)
    assert interruption.exit_status == 143
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray_utils.set_sigterm_handler(signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_in_small_steps() -> None:
    for _ in range(1000):
        time.sleep(0.01)


def test_signal_during_logging_leaves_no_lock_of_logging():
    """Other threads would wait for the lock for ever, among them the watchdog."""

    class SignalHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            records.append(record)

    handler, records = SignalHandler(), []
    logger = logging.Logger("of the test")
    logger.addHandler(handler)
    with InterruptOnSignal() as interruption:
        logger.warning("whole")
        wait_in_small_steps()
    assert interruption.exit_status == 143 and len(records) == 1


def test_signal_during_a_fork_is_not_lost():
    """Python ignores exceptions of functions that it calls at a fork. Some are those of logging."""
    code = (
        "import functools, os, signal\n"
        "kill = functools.partial(os.kill, os.getpid(), signal.SIGTERM)\n"
        "os.register_at_fork(after_in_parent=kill)\n"
        "import logging, subprocess, threading, time  # logging releases its lock after the call\n"
        "from verl.utils.commands import InterruptOnSignal\n"
        "with InterruptOnSignal() as interruption:\n"
        "    subprocess.run(['true'], preexec_fn=lambda: None)\n"
        "    time.sleep(30)\n"
        "thread = threading.Thread(target=logging.getLogger('new').warning, args=('log',))\n"
        "thread.start()\n"
        "thread.join(10)\n"
        "os._exit(1 if thread.is_alive() else interruption.exit_status)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert result.returncode == 143, result.stderr


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signal_whose_exception_python_ignores_is_sent_again():
    class Interrupted:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            steps.append("never")

    steps = []
    with InterruptOnSignal() as interruption:
        Interrupted()
        wait_in_small_steps()
        steps.append("never")
    assert interruption.exit_status == 143 and steps == []


def test_forked_child_ends_without_a_message():
    """A pool ends its idle workers by SIGTERM, also if no signal came from outside."""
    code = (
        "import multiprocessing, time\n"
        "from verl.utils.commands import InterruptOnSignal\n"
        "context = multiprocessing.get_context('fork')\n"
        "started = context.Event()\n"
        "def work():\n"
        "    started.set()\n"
        "    time.sleep(60)\n"
        "with InterruptOnSignal() as interruption:\n"
        "    child = context.Process(target=work)\n"
        "    child.start()\n"
        "    started.wait()\n"
        "    child.terminate()\n"
        "    child.join()\n"
        "    print(child.exitcode, interruption.exit_status)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (result.stdout, result.stderr) == (b"143 0\n", b"")


def test_logging_that_does_not_end_is_interrupted(monkeypatch):
    monkeypatch.setattr(commands, "RESEND_S", 0.01)
    handler = logging.Handler()
    handler.emit = lambda record: wait_in_small_steps()
    logger = logging.Logger("of the test")
    logger.addHandler(handler)
    with InterruptOnSignal() as interruption:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        logger.warning("to a pipe that nobody reads")
    assert interruption.exit_status == 143


def test_command_line_ends_with_the_status_of_the_signal():
    started = []

    def main(cfg):
        started.append(cfg.trainer.seed)
        os.kill(os.getpid(), signal.SIGTERM)

    assert cli.run(main, "quickstart", argv=["-m", "trainer.seed=1,2"]) == 143
    assert started == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_every_command_cleans_up_after_a_signal(tmp_path, number):
    def export() -> None:
        with publish_directory(tmp_path / "policy"):
            os.kill(os.getpid(), number)

    assert run_and_report_mistakes(export) == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_last_line_names_the_newest_checkpoint(tmp_path, caplog):
    run = RunDirectory(tmp_path)

    def interrupt(resume_mode: ResumeMode = "auto") -> str:
        with pytest.raises(KeyboardInterrupt), run.log_resume_hint_on_interrupt(resume_mode):
            raise KeyboardInterrupt
        return caplog.records[-1].getMessage()

    assert "global_step" not in interrupt()
    assert "=resume_path" not in interrupt("resume_path")  # as an audit, which saves nothing
    for step in (9, 10):
        CheckpointManager(run.checkpoints).save(step, lambda path: (path / "x").touch(), {})
    assert f"{run.checkpoints}/global_step_10" in interrupt() and "disable" not in interrupt()
    # The same command would start again from step 0.
    assert "resume_mode=disable" in interrupt("disable")
