"""Tests that the ranks of a test run a second time only after a crash outside Python."""

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessExitedException

from tests.helpers.ranks import run_two_ranks
from tests.helpers.refusals import mentions

INVALID_ADDRESS = 16


def crash_outside_python() -> None:
    """Start a thread of the C library at an invalid address."""
    ctypes.CDLL(None).pthread_create(
        ctypes.byref(ctypes.c_ulong()), None, ctypes.c_void_p(INVALID_ADDRESS), None
    )
    time.sleep(60)


def crash_outside_python_until(rank: int, times: int, directory: Path) -> None:
    if rank == 1 and len(list(directory.iterdir())) < times:
        (directory / f"crash{time.monotonic_ns()}").touch()
        crash_outside_python()


def crash_in_python(rank: int, directory: Path) -> None:
    if rank == 0:
        (directory / f"crash{time.monotonic_ns()}").touch()
        os.kill(os.getpid(), signal.SIGSEGV)


def test_one_crash_outside_python_is_reported_as_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="SIGSEGV") as warned:
        run_two_ranks(crash_outside_python_until, 1, tmp_path)
    assert "Segmentation fault" in str(warned[0].message)


@pytest.mark.filterwarnings("ignore:process 1 terminated")
def test_second_crash_fails(tmp_path):
    with pytest.raises(ProcessExitedException, check=mentions("SIGSEGV")):
        run_two_ranks(crash_outside_python_until, 2, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_crash_in_python_fails_at_once(tmp_path):
    with pytest.raises(ProcessExitedException, check=mentions("SIGSEGV")):
        run_two_ranks(crash_in_python, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
