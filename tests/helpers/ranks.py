"""Run a test function as the two ranks of a gloo group."""

import faulthandler
import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

LOOPBACK = "127.0.0.1"
# The ranks fork from a process that imported these modules, because an import takes ten seconds.
LOADED_ONCE = ["tests.helpers.policy_rows", "verl.workers.actor", "verl.workers.critic"]
# vLLM on CPU sets it in its process, which in other tests is the test process.
NOT_PASSED = "TORCH_COMPILE_DISABLE"
PYTHON_CRASHED = "Current thread"
"""Line that faulthandler writes if the crashed thread was a Python thread."""


def run_two_ranks(function: Callable[..., None], *args: object) -> None:
    """Run ``function(rank, *args)`` in two processes with the environment of ranks 0 and 1.

    Each rank has one thread. In rare cases (about once in hundreds of runs) a gloo thread of torch
    2.13 crashes. Only after such a crash both ranks run a second time, with a warning. So
    ``function`` must be able to overwrite its files.

    Raises:
        ProcessRaisedException: ``function`` raised in a rank.
        ProcessExitedException: a rank died otherwise, or crashed in gloo a second time.
    """
    with tempfile.TemporaryDirectory() as notes:
        try:
            _spawn(function, args, Path(notes))
        except ProcessExitedException as died:
            traceback = (Path(notes) / str(died.error_index)).read_text()
            if died.signal_name != "SIGSEGV" or PYTHON_CRASHED in traceback:
                raise
            message = f"{died} outside Python; the ranks run a second time. Output:\n{traceback}"
            warnings.warn(message, stacklevel=2)
            _spawn(function, args, Path(notes))


def _spawn(function: Callable[..., None], args: tuple[object, ...], notes: Path) -> None:
    with socket.socket() as free:
        free.bind((LOOPBACK, 0))
        port = free.getsockname()[1]
    mp.set_forkserver_preload(LOADED_ONCE)
    previous = os.environ.pop(NOT_PASSED, None)
    try:
        arguments = (port, notes, function, args)
        start_processes(_run_as_rank, arguments, nprocs=2, start_method="forkserver")
    finally:
        if previous is not None:
            os.environ[NOT_PASSED] = previous


def _run_as_rank(
    number: int, port: int, notes: Path, function: Callable[..., None], args: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }
    with (notes / str(number)).open("w") as output:
        faulthandler.enable(output)
        function(number, *args)
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.disable()
