"""Calls beside the caller's work: their answers, their errors, their deadlines."""

import threading

import pytest

from tests.helpers.refusals import mentions
from verl.utils.background import BackgroundCall, BackgroundCalls


def test_the_answer_is_there_when_it_is_asked_for():
    caller = threading.current_thread()
    call = BackgroundCall(threading.current_thread, "asked")
    assert call.get_result(60).name == "asked" and call.get_result(60) is not caller
    assert call.get_result(60).daemon, "a process that is stopped does not wait for it"


def test_an_error_is_raised_where_the_answer_is_asked_for():
    call = BackgroundCall(lambda: {}["missing"], "asked")
    for _ in range(2):
        with pytest.raises(KeyError, match="missing"):
            call.get_result(60)


def test_a_call_that_goes_on_is_named():
    may_end = threading.Event()
    call = BackgroundCall(lambda: may_end.wait(60), "slow")
    with pytest.raises(TimeoutError, check=mentions("slow", "0.01 s")):
        call.get_result(0.01)
    may_end.set()
    assert call.get_result(60) is True


def fail() -> None:
    raise OSError("no space left on device")


def test_calls_are_made_in_their_order_and_waited_for():
    calls = BackgroundCalls("writing", max_waiting=2, timeout_s=60)
    made: list[int] = []
    for number in range(20):
        calls.add(lambda number=number: made.append(number))
    calls.wait()
    assert made == list(range(20))
    calls.add(lambda: made.append(20))
    calls.wait()
    assert made[-1] == 20, "a thread that had nothing to do begins again"


def test_no_more_than_a_few_wait():
    may_end = threading.Event()
    calls = BackgroundCalls("writing", max_waiting=2, timeout_s=0.05)
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


def test_after_an_error_nothing_is_done_and_everybody_hears_of_it():
    calls = BackgroundCalls("writing", max_waiting=3, timeout_s=60)
    made: list[str] = []
    may_fail = threading.Event()
    calls.add(lambda: may_fail.wait(60) and fail())
    calls.add(lambda: made.append("later"))
    may_fail.set()
    for _ in range(2):
        with pytest.raises(OSError, match="no space left"):
            calls.wait()
        with pytest.raises(OSError, match="no space left"):
            calls.add(lambda: made.append("too late"))
    assert made == []
