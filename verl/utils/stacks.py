"""Stacks of all processes of a run, also of those that hang in native code.

process   answer_with_stacks("collector-0")   SIGUSR1 writes to $VERL_STACKS_DIR/<host>-<pid>.txt
driver    collect_stacks(...)                 asks its descendants, joins what they wrote
elsewhere stacks_of_this_machine(...)         asks whoever there answers to that directory
"""

import contextlib
import faulthandler
import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import psutil

# In the environment: whatever the driver starts on its machine inherits it, and Ray hands it on to
# the workers of a cluster that was joined.
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
    file = _answer_of(Path(folder), os.getpid()).open("w", encoding="utf-8")
    file.write(f"{name}\n")
    file.flush()
    faulthandler.register(ASKS, file=file, all_threads=True)


def _answer_of(folder: Path, pid: int) -> Path:
    # Nodes share the directory, and number their processes alike.
    return folder / f"{socket.gethostname()}-{pid}.txt"


@dataclass(frozen=True)
class Elsewhere:
    """What other machines tell, and a phrase for each of which nothing is heard."""

    told: str = ""
    silent: tuple[str, ...] = ()


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

    def told(self) -> str:
        """What a file of stacks says of it."""
        return f"\n== {self.described()}\n{self.answer() or 'it did not answer'}\n"

    def described(self) -> str:
        """Its name, its number, and what the system says that it does."""
        return f"{self.name} (process {self.process.pid}, {_status(self.process)})"


def collect_stacks(folder: Path, target: Path) -> list[Asked]:
    """Write the stacks of this process and of all that it started to ``target``; returns those that
    could have answered and did not.

    ``folder`` is where the processes answer. Those that hold no Python, such as Ray's servers, have
    no stacks.
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
            file.write(one.told())
            if not one.answer():
                silent.append(one)
    return silent


def stacks_of_this_machine(folder: Path) -> str:
    """The stacks of every process here that answers to ``folder``, whoever started it."""
    asked = []
    for path in folder.glob(f"{socket.gethostname()}-*.txt"):
        pid = int(path.stem.rpartition("-")[2])
        if psutil.pid_exists(pid):
            asked.append(_ask(folder, psutil.Process(pid)))
    time.sleep(ANSWER_S)
    return "".join(one.told() for one in asked if one is not None)


def _ask(folder: Path, process: psutil.Process) -> Asked | None:
    path = _answer_of(folder, process.pid)
    # Only who has the file open has a handler: the signal would end any other process.
    if not _has_open(process, path):
        return None
    with path.open(encoding="utf-8") as file:
        name = file.readline().strip()
    asked = Asked(process, name, path, path.stat().st_size)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(ASKS)
    return asked


def _has_open(process: psutil.Process, path: Path) -> bool:
    try:
        return str(path.resolve()) in {file.path for file in process.open_files()}
    except psutil.Error:
        return False


def _write_own(file: TextIO) -> None:
    file.write(f"== driver (process {os.getpid()})\n")
    file.flush()  # what follows goes past this object's buffer
    faulthandler.dump_traceback(file, all_threads=True)


def _status(process: psutil.Process) -> str:
    try:
        return f"{process.status()}, {process.name()}"
    except psutil.NoSuchProcess:
        return "gone"
