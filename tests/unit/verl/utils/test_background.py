"""A call beside the caller's work: its answer, its error, its deadline."""

import threading

import pytest

from verl.utils.background import BackgroundCall


def test_the_answer_is_there_when_it_is_asked_for():
    caller = threading.current_thread()
    call = BackgroundCall(threading.current_thread, "asked")
    assert call.result(60).name == "asked" and call.result(60) is not caller
    assert call.result(60).daemon, "a process that is stopped does not wait for it"


def test_an_error_is_raised_where_the_answer_is_asked_for():
    call = BackgroundCall(lambda: {}["missing"], "asked")
    for _ in range(2):
        with pytest.raises(KeyError, match="missing"):
            call.result(60)


def test_a_call_that_goes_on_is_named():
    may_end = threading.Event()
    call = BackgroundCall(lambda: may_end.wait(60), "slow")
    with pytest.raises(TimeoutError, match=r"slow: no end after 0\.01 s"):
        call.result(0.01)
    may_end.set()
    assert call.result(60) is True
