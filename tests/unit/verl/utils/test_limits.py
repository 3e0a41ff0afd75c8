"""Tests of time and memory limits for foreign code."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.helpers.refusals import mentions
from verl.utils.limits import (
    TimeLimitError,
    describe_error,
    describe_raised_error,
    describe_user_line,
    time_limit,
)


def spin():
    while True:
        time.sleep(0.01)


def test_hanging_call_is_ended_and_named():
    with (
        pytest.raises(TimeLimitError, check=mentions("grader", "0.1 s")),
        time_limit(0.1, "the grader"),
    ):
        spin()


def test_alarm_is_repeated_if_it_is_swallowed(monkeypatch):
    monkeypatch.setattr("verl.utils.limits.REPEAT_S", 0.05)
    alarms = []
    with pytest.raises(TimeLimitError), time_limit(0.05, "it"):
        while len(alarms) < 2:
            try:
                spin()
            except TimeLimitError:
                alarms.append(1)
        spin()


def test_call_in_time_restores_the_previous_alarm():
    before = signal.getsignal(signal.SIGALRM)
    previous = signal.setitimer(signal.ITIMER_REAL, 1000)
    with time_limit(50, "it"):
        pass
    remaining = signal.setitimer(signal.ITIMER_REAL, *previous)
    assert signal.getsignal(signal.SIGALRM) is before and remaining[0] > 900


def swallow():
    with contextlib.suppress(BaseException):
        spin()
    return 0.0


def cancel():
    signal.alarm(0)
    time.sleep(0.1)


def replace_handler():
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    time.sleep(0.1)


def set_own_alarm():
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    time.sleep(0.1)


def cancel_and_hang():
    signal.alarm(0)
    spin()


def fail_late():
    with contextlib.suppress(BaseException):
        spin()
    raise ValueError("unreadable")  # a careless grader counts this as a wrong answer


@pytest.mark.parametrize(
    "graded", [spin, swallow, cancel, replace_handler, set_own_alarm, cancel_and_hang, fail_late]
)
def test_limit_holds_for_any_change_of_the_alarm(monkeypatch, graded):
    monkeypatch.setattr("verl.utils.limits.REPEAT_S", 0.05)
    before = signal.getsignal(signal.SIGALRM)
    previous = signal.setitimer(signal.ITIMER_REAL, 1000)
    with pytest.raises(TimeLimitError, check=mentions("0.05 s")), time_limit(0.05, "it"):
        graded()
    time.sleep(0.15)  # no alarm comes after the block
    remaining = signal.setitimer(signal.ITIMER_REAL, *previous)
    assert signal.getsignal(signal.SIGALRM) is before and remaining[0] > 900


@pytest.mark.parametrize("block", ["pass", "time.sleep(0.3)", "swallow()"])
def test_a_profiler_works_after_a_block(block):
    code = (
        "import sys, time\n"
        "from verl.utils import limits\n"
        "limits.REPEAT_S = 0.05\n"
        "def swallow():\n"
        "    until = time.monotonic() + 0.3\n"
        "    while time.monotonic() < until:\n"
        "        try: time.sleep(0.01)\n"
        "        except limits.TimeLimitError: pass\n"
        "try:\n"
        f"    with limits.time_limit(0.1, 'it'): {block}\n"
        "except limits.TimeLimitError: pass\n"
        "calls = []\n"
        "sys.setprofile(lambda _frame, event, _argument: calls.append(event))\n"
        "def add(): return 1\n"
        "total = sum(add() for _ in range(10))\n"
        "sys.setprofile(None)\n"
        "assert total == 10 and calls.count('call') >= 10\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("graded", [spin, swallow, fail_late, lambda: time.sleep(0.1)])
def test_limit_holds_in_other_threads(monkeypatch, graded):
    monkeypatch.setattr("verl.utils.limits.REPEAT_S", 0.05)
    messages = []

    def work():
        try:
            with time_limit(0.05, "it"):
                graded()
        except TimeLimitError as error:
            messages.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    (message,) = messages
    assert message.startswith("it ") and "0.05 s" in message


def test_errors_and_keyboard_interrupts_are_not_replaced():
    with pytest.raises(ValueError), time_limit(50, "it"):
        raise ValueError
    with pytest.raises(KeyboardInterrupt), time_limit(0.01, "it"):
        try:
            spin()
        except TimeLimitError:
            raise KeyboardInterrupt from None


def test_memory_limit_is_never_raised_and_can_be_lifted():
    code = (
        "import resource\n"
        "from verl.utils.limits import limit_memory, lift_memory_limit\n"
        "def soft(): return resource.getrlimit(resource.RLIMIT_AS)[0]\n"
        "limit_memory(2)\n"
        "limit_memory(3)\n"
        "assert soft() == 2 * 2**30\n"
        "with lift_memory_limit(): assert soft() == resource.getrlimit(resource.RLIMIT_AS)[1]\n"
        "assert soft() == 2 * 2**30\n"
        "limit_memory(1)\n"
        "print(soft() / 2**30)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "1.0\n", result.stderr


def test_process_cannot_exceed_its_memory_limit():
    code = (
        "from verl.utils.limits import limit_memory\n"
        "limit_memory(1)\n"
        "bytearray(2**29)\n"
        "try: bytearray(2**31)\n"
        "except MemoryError: print('refused')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.stdout == "refused\n", result.stderr


class UnreadableError(Exception):
    def __str__(self):
        raise ValueError("no message")

    __repr__ = __str__


@pytest.mark.parametrize("form", [str, repr])
def test_error_of_user_code_without_a_readable_message_is_named_by_its_type(form):
    assert describe_error(KeyError("a"), form) == form(KeyError("a"))
    assert describe_error(UnreadableError(), form).startswith("UnreadableError ")


def load_settings_file():
    return json.loads("{")


def test_error_names_the_line_of_user_code_that_raised_it():
    line = f" in {__file__}, line {load_settings_file.__code__.co_firstlineno + 1}"
    with pytest.raises(ValueError) as caught:
        load_settings_file()
    assert describe_user_line(caught.value) == line
    assert describe_raised_error(caught.value) == f"{caught.value!r}{line}"


def test_time_limit_error_names_the_line_that_was_running():
    with pytest.raises(TimeLimitError) as caught, time_limit(0.05, "it"):
        spin()
    line = spin.__code__.co_firstlineno + 2
    assert describe_user_line(caught.value) == f" in {__file__}, line {line}"


def test_error_with_a_fix_or_from_a_library_names_no_line_of_user_code():
    assert describe_raised_error(ValueError("n=0; fix: n=1")) == repr(ValueError("n=0; fix: n=1"))
    with pytest.raises(ValueError) as caught:
        exec("import json; json.loads('{')")
    error = caught.value
    assert error.__traceback__ is not None
    error = error.with_traceback(error.__traceback__.tb_next)
    assert describe_user_line(error) == ""
    assert "json" in describe_raised_error(error)
