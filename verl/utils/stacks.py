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

import psutil

# Environment variable with the directory. Child processes inherit it, and init_ray passes it to the
# workers of a cluster.
STACKS_DIR = "VERL_STACKS_DIR"
STACKS_SIGNAL = signal.SIGUSR1
ANSWER_WAIT_S = 2.0  # a running process answers within milliseconds


def answer_with_stacks(name: str) -> None:
    """Make this process write its stacks as ``name`` at SIGUSR1, if the run collects stacks."""
    folder = os.environ.get(STACKS_DIR)
    # A Ray cluster older than the run may have the directory of an ended run.
    if not folder or not Path(folder).is_dir():
        return
    # The handler needs the file, which stays open until the process ends.
    file = _get_answer_path(Path(folder), os.getpid()).open("w", encoding="utf-8")
    file.write(f"{name}\n")
    file.flush()
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)


def _get_answer_path(folder: Path, pid: int) -> Path:
    # Nodes share the directory, and process ids are unique only within a node.
    return folder / f"{socket.gethostname()}-{pid}.txt"


@dataclass(frozen=True)
class RemoteStacks:
    """Stacks from other nodes, and a phrase about each node that did not answer."""

    stacks: str = ""
    silent_nodes: tuple[str, ...] = ()


@dataclass
class StackRequest:
    """Process that was signalled to write its stacks to ``path``, after ``size_before`` bytes."""

    process: psutil.Process
    name: str
    path: Path
    size_before: int

    def read_answer(self) -> str:
        """Return the text written since the signal; empty if the process does not run."""
        with self.path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self.size_before)
            return file.read()

    def format_section(self) -> str:
        """Return a heading and the stacks of the process, or a note that it did not answer."""
        return f"\n== {self.describe_process()}\n{self.read_answer() or 'it did not answer'}\n"

    def describe_process(self) -> str:
        """Return name, process id and system status of the process."""
        return f"{self.name} (process {self.process.pid}, {_describe_status(self.process)})"


def collect_stacks(folder: Path, target: Path) -> list[StackRequest]:
    """Write the stacks of this process and its descendants to ``target``.

    The processes write into ``folder``. Those without Python have no stacks. Returns the processes
    that were signalled and did not answer.
    """
    descendants = psutil.Process().children(recursive=True)
    requests = {process.pid: _request_stacks(folder, process) for process in descendants}
    time.sleep(ANSWER_WAIT_S)
    silent = []
    with target.open("w", encoding="utf-8") as file:
        file.write(f"== driver (process {os.getpid()})\n")
        file.flush()  # faulthandler writes directly to the file descriptor
        faulthandler.dump_traceback(file, all_threads=True)
        for process in descendants:
            request = requests[process.pid]
            if request is None:
                file.write(f"\n== process {process.pid}, {_describe_status(process)}: no stacks\n")
                continue
            file.write(request.format_section())
            if not request.read_answer():
                silent.append(request)
    return silent


def collect_local_stacks(folder: Path) -> str:
    """Return the stacks of all processes of this node that write them to files in ``folder``."""
    requests = []
    for path in folder.glob(f"{socket.gethostname()}-*.txt"):
        pid = int(path.stem.rpartition("-")[2])
        if psutil.pid_exists(pid):
            requests.append(_request_stacks(folder, psutil.Process(pid)))
    time.sleep(ANSWER_WAIT_S)
    return "".join(request.format_section() for request in requests if request is not None)


def _request_stacks(folder: Path, process: psutil.Process) -> StackRequest | None:
    path = _get_answer_path(folder, process.pid)
    # Only a process that has the file open has a handler: the signal would end any other.
    if not _has_open(process, path):
        return None
    with path.open(encoding="utf-8") as file:
        name = file.readline().strip()
    request = StackRequest(process, name, path, path.stat().st_size)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(STACKS_SIGNAL)
    return request


def _has_open(process: psutil.Process, path: Path) -> bool:
    try:
        return str(path.resolve()) in {file.path for file in process.open_files()}
    except psutil.Error:
        return False


def _describe_status(process: psutil.Process) -> str:
    try:
        return f"{process.status()}, {process.name()}"
    except psutil.NoSuchProcess:
        return "gone"
