"""Processes of a test that are the two ranks of a gloo group."""

import faulthandler
import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, spawn

LOOPBACK = "127.0.0.1"
PYTHON_CRASHED = "Current thread"
"""What faulthandler writes where the thread that crashed was one of Python's."""


def run_two_ranks(play: Callable[..., None], *args: object) -> None:
    """Run ``play(rank, *args)`` in two processes that have the environment of ranks 0 and 1, on a
    thread each. A thread of torch 2.13's own gloo was seen to crash once in hundreds of runs; only
    where that is how a rank died are both run a second time, with a warning, and ``play`` must be
    able to write over what it left.

    Raises:
        ProcessRaisedException: ``play`` raised in one of them.
        ProcessExitedException: one of them died otherwise, or of gloo for the second time.
    """
    with tempfile.TemporaryDirectory() as notes:
        try:
            _spawn(play, args, Path(notes))
        except ProcessExitedException as died:
            said = (Path(notes) / str(died.error_index)).read_text()
            if died.signal_name != "SIGSEGV" or PYTHON_CRASHED in said:
                raise
            warnings.warn(f"{died} outside Python; once more. It said:\n{said}", stacklevel=2)
            _spawn(play, args, Path(notes))


def _spawn(play: Callable[..., None], args: tuple[object, ...], notes: Path) -> None:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    spawn(_be_rank, args=(port, notes, play, args), nprocs=2)


def _be_rank(
    number: int, port: int, notes: Path, play: Callable[..., None], args: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }
    with (notes / str(number)).open("w") as said:
        faulthandler.enable(said)
        play(number, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.disable()
