"""Collection of the stacks of all processes of a run, also of those that hang in native code.

process     answer_with_stacks("collector-0")  SIGUSR1 writes to $VERL_STACKS_DIR/<host>-<pid>.txt
driver      collect_stacks(...)                signals its descendants, joins their files
other node  collect_local_stacks(...)          signals all local processes with such a file
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

# Environment variable with the directory. Child processes inherit it, and init_ray passes it to the
# workers of a cluster.
STACKS_DIR = "VERL_STACKS_DIR"
ASKS = signal.SIGUSR1
ANSWER_S = 2.0  # a running process answers within milliseconds


def answer_with_stacks(name: str) -> None:
    """Make this process write the stacks of its threads at SIGUSR1, under the name ``name``.

    Does nothing if the run does not collect stacks.
    """
    folder = os.environ.get(STACKS_DIR)
    # A Ray cluster older than the run may have the directory of an ended run.
    if not folder or not Path(folder).is_dir():
        return
    # The handler needs the file, which stays open until the process ends.
    file = _answer_of(Path(folder), os.getpid()).open("w", encoding="utf-8")
    file.write(f"{name}\n")
    file.flush()
    faulthandler.register(ASKS, file=file, all_threads=True)


def _answer_of(folder: Path, pid: int) -> Path:
    # Nodes share the directory, and process ids are unique only within a node.
    return folder / f"{socket.gethostname()}-{pid}.txt"


@dataclass(frozen=True)
class Elsewhere:
    """Stacks from other nodes, and a phrase about each node that did not answer."""

    told: str = ""
    silent: tuple[str, ...] = ()


@dataclass
class Asked:
    """Process that was signalled to write its stacks to ``path``.

    ``size_before`` is the size of the file in bytes before the signal.
    """

    process: psutil.Process
    name: str
    path: Path
    before: int

    def answer(self) -> str:
        """Return the text written since the signal; empty if the process does not run."""
        with self.path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self.before)
            return file.read()

    def told(self) -> str:
        """Return the section of the process in the file of stacks."""
        return f"\n== {self.described()}\n{self.answer() or 'it did not answer'}\n"

    def described(self) -> str:
        """Return name, process id and system status of the process."""
        return f"{self.name} (process {self.process.pid}, {_status(self.process)})"


def collect_stacks(folder: Path, target: Path) -> list[Asked]:
    """Write the stacks of this process and its descendants to ``target``.

    The processes write into ``folder``. Processes without Python, such as Ray's servers, have no
    stacks. Returns the processes that were signalled and did not answer.
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
    """Return the stacks of all processes of this node that answer in ``folder``."""
    asked = []
    for path in folder.glob(f"{socket.gethostname()}-*.txt"):
        pid = int(path.stem.rpartition("-")[2])
        if psutil.pid_exists(pid):
            asked.append(_ask(folder, psutil.Process(pid)))
    time.sleep(ANSWER_S)
    return "".join(one.told() for one in asked if one is not None)


def _ask(folder: Path, process: psutil.Process) -> Asked | None:
    path = _answer_of(folder, process.pid)
    # Only a process that has the file open has a handler: the signal would end any other.
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
    file.flush()  # faulthandler writes directly to the file descriptor
    faulthandler.dump_traceback(file, all_threads=True)


def _status(process: psutil.Process) -> str:
    try:
        return f"{process.status()}, {process.name()}"
    except psutil.NoSuchProcess:
        return "gone"
