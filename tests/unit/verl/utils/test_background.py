"""Tests of background calls: results, errors and deadlines."""

import threading

import pytest

from tests.helpers.refusals import mentions
from verl.utils.waits import BackgroundCall, BackgroundQueue


def test_result_is_available_later():
    caller = threading.current_thread()
    call = BackgroundCall(threading.current_thread, "named")
    assert call.get_result(60).name == "named" and call.get_result(60) is not caller
    assert call.get_result(60).daemon, "the thread would delay the end of the process"


def test_error_is_raised_by_get_result():
    call = BackgroundCall(lambda: {}["missing"], "named")
    for _ in range(2):
        with pytest.raises(KeyError, match="missing"):
            call.get_result(60)


def test_call_after_its_deadline_is_named():
    may_end = threading.Event()
    call = BackgroundCall(lambda: may_end.wait(60), "slow")
    with pytest.raises(TimeoutError, check=mentions("slow", "0.01 s")):
        call.get_result(0.01)
    may_end.set()
    assert call.get_result(60) is True


def fail() -> None:
    raise OSError("no space left on device")


def test_calls_run_in_order():
    calls = BackgroundQueue("writing", max_waiting=2, timeout_s=60)
    results: list[int] = []
    for number in range(20):
        calls.add(lambda number=number: results.append(number))
    calls.wait()
    assert results == list(range(20))
    calls.add(lambda: results.append(20))
    calls.wait()
    assert results[-1] == 20, "an idle thread did not start again"


def test_number_of_waiting_calls_is_limited():
    may_end = threading.Event()
    calls = BackgroundQueue("writing", max_waiting=2, timeout_s=0.05)
    begun = threading.Event()
    calls.add(lambda: begun.set() or may_end.wait(60))
    assert begun.wait(60)
    for _ in range(2):
        calls.add(lambda: None)
    with pytest.raises(TimeoutError, check=mentions("writing", "0.05 s")):
        calls.add(lambda: None)
    with pytest.raises(TimeoutError, check=mentions("writing")):
        calls.wait()
    may_end.set()


def test_error_stops_later_calls_and_is_raised_by_all():
    calls = BackgroundQueue("writing", max_waiting=3, timeout_s=60)
    results: list[str] = []
    may_fail = threading.Event()
    calls.add(lambda: may_fail.wait(60) and fail())
    calls.add(lambda: results.append("later"))
    may_fail.set()
    for _ in range(2):
        with pytest.raises(OSError, match="no space left"):
            calls.wait()
        with pytest.raises(OSError, match="no space left"):
            calls.add(lambda: results.append("too late"))
    assert results == []
