"""Stacks of all processes of a run, also of those that hang in native code.

process   answer_with_stacks("collector-0")   SIGUSR1 writes to $VERL_STACKS_DIR/<pid>.txt
driver    collect_stacks(...)                 asks its descendants, joins what they wrote
"""

import contextlib
import faulthandler
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

# In the environment: whatever the driver starts on its machine inherits it.
STACKS_DIR = "VERL_STACKS_DIR"
ASKS = signal.SIGUSR1
ANSWER_S = 2.0  # a process that runs at all answers within milliseconds


def answer_with_stacks(name: str) -> None:
    """Have this process, called ``name``, write the stacks of its threads when it gets SIGUSR1;
    nothing where the run collects none.
    """
    folder = os.environ.get(STACKS_DIR)
    # A Ray that was there before the run may remember the directory of one that has ended.
    if not folder or not Path(folder).is_dir():
        return
    # The handler keeps the file, which stays open as long as the process lives.
    file = (Path(folder) / f"{os.getpid()}.txt").open("w", encoding="utf-8")
    file.write(f"{name}\n")
    file.flush()
    faulthandler.register(ASKS, file=file, all_threads=True)


@dataclass
class Asked:
    """A process that can write its stacks: what it is called, its file, and how long that was."""

    process: psutil.Process
    name: str
    path: Path
    before: int

    def answer(self) -> str:
        """What it wrote since it was asked; empty where it does not run."""
        with self.path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self.before)
            return file.read()

    def described(self) -> str:
        """Its name, its number, and what the system says that it does."""
        return f"{self.name} (process {self.process.pid}, {_status(self.process)})"


def collect_stacks(folder: Path, target: Path) -> list[Asked]:
    """Write the stacks of this process and of all that it started to ``target``; returns those that
    could have answered and did not.

    ``folder`` is where the processes answer. Those that hold no Python, such as Ray's servers, and
    those on other machines have no stacks.
    """
    family = psutil.Process().children(recursive=True)
    asked = {process.pid: _ask(folder, process) for process in family}
    time.sleep(ANSWER_S)
    silent = []
    with target.open("w", encoding="utf-8") as file:
        _write_own(file)
        for process in family:
            one = asked[process.pid]
            if one is None:
                file.write(f"\n== process {process.pid}, {_status(process)}: no stacks\n")
                continue
            answer = one.answer()
            file.write(f"\n== {one.described()}\n{answer or 'it did not answer'}\n")
            if not answer:
                silent.append(one)
    return silent


def _ask(folder: Path, process: psutil.Process) -> Asked | None:
    path = folder / f"{process.pid}.txt"
    # Only who has a file has a handler: the signal would end any other process.
    if not path.exists():
        return None
    with path.open(encoding="utf-8") as file:
        name = file.readline().strip()
    asked = Asked(process, name, path, path.stat().st_size)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(ASKS)
    return asked


def _write_own(file: TextIO) -> None:
    file.write(f"== driver (process {os.getpid()})\n")
    file.flush()  # what follows goes past this object's buffer
    faulthandler.dump_traceback(file, all_threads=True)


def _status(process: psutil.Process) -> str:
    try:
        return f"{process.status()}, {process.name()}"
    except psutil.NoSuchProcess:
        return "gone"
