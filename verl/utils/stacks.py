"""Collection of the Python stacks of all processes of a run, even if they hang in native code.

process     install_stack_dump_handler("collector-0")  at SIGUSR1, write stacks to
                                               $VERL_STACKS_DIR/<host>-<pid>.txt
driver      collect_stacks(...)                signal all descendants, join their files
other node  collect_local_stacks(...)          signal all processes of the node with such a file
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

# Environment variable with the directory of the stack files. Child processes inherit it. init_ray
# passes it to workers on other nodes.
STACKS_DIR = "VERL_STACKS_DIR"
STACKS_SIGNAL = signal.SIGUSR1
ANSWER_WAIT_S = 2.0  # time to wait for the stacks; a running process writes within milliseconds


def install_stack_dump_handler(name: str) -> None:
    """Install a handler of SIGUSR1 that writes the Python stacks of this process to a file.

    ``name`` is the name of the process in the file. The function has no effect if the run does not
    collect stacks.
    """
    folder = os.environ.get(STACKS_DIR)
    # If the Ray cluster was started by an earlier run, STACKS_DIR may name a removed directory.
    if not folder or not Path(folder).is_dir():
        return
    # Do not close the file: the signal handler writes to it.
    file = _get_stack_file_path(Path(folder), os.getpid()).open("w", encoding="utf-8")
    file.write(f"{name}\n")
    file.flush()
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)


def _get_stack_file_path(folder: Path, pid: int) -> Path:
    # Add the host name: nodes share the directory, and process ids are unique only within a node.
    return folder / f"{socket.gethostname()}-{pid}.txt"


@dataclass(frozen=True)
class RemoteStacks:
    """Stacks of processes on other nodes, and a phrase about each node that did not answer."""

    stacks: str = ""
    silent_nodes: tuple[str, ...] = ()


@dataclass
class StackRequest:
    """Request to a process to append its stacks to ``path``, a file of ``size_before`` bytes."""

    process: psutil.Process
    name: str
    path: Path
    size_before: int

    def read_answer(self) -> str:
        """Return the text that the process wrote since the request; "" if it wrote nothing."""
        with self.path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self.size_before)
            return file.read()

    def format_section(self) -> str:
        """Return a heading and the stacks of the process, or a note that it did not answer."""
        return f"\n== {self.describe_process()}\n{self.read_answer() or 'it did not answer'}\n"

    def describe_process(self) -> str:
        """Return name, process id and status (running, stopped, ...) of the process."""
        return f"{self.name} (process {self.process.pid}, {_describe_status(self.process)})"


def collect_stacks(folder: Path, target: Path) -> list[StackRequest]:
    """Write the stacks of this process and its descendants to the file ``target``.

    Descendants that run Python write their stacks into ``folder``. Returns the unanswered requests.
    """
    descendants = psutil.Process().children(recursive=True)
    request_of_pid = {process.pid: _request_stacks(folder, process) for process in descendants}
    time.sleep(ANSWER_WAIT_S)
    unanswered_requests = []
    with target.open("w", encoding="utf-8") as file:
        file.write(f"== driver (process {os.getpid()})\n")
        file.flush()  # faulthandler writes directly to the file descriptor
        faulthandler.dump_traceback(file, all_threads=True)
        for process in descendants:
            request = request_of_pid[process.pid]
            if request is None:
                file.write(f"\n== process {process.pid}, {_describe_status(process)}: no stacks\n")
                continue
            file.write(request.format_section())
            if not request.read_answer():
                unanswered_requests.append(request)
    return unanswered_requests


def collect_local_stacks(folder: Path) -> str:
    """Return the stacks of all processes of this node that have a stack file in ``folder``."""
    requests = []
    for path in folder.glob(f"{socket.gethostname()}-*.txt"):
        pid = int(path.stem.rpartition("-")[2])
        if psutil.pid_exists(pid):
            requests.append(_request_stacks(folder, psutil.Process(pid)))
    time.sleep(ANSWER_WAIT_S)
    return "".join(request.format_section() for request in requests if request is not None)


def _request_stacks(folder: Path, process: psutil.Process) -> StackRequest | None:
    path = _get_stack_file_path(folder, process.pid)
    # Signal only a process that has the file open and therefore a handler. The signal would kill
    # other processes.
    if not _has_file_open(process, path):
        return None
    with path.open(encoding="utf-8") as file:
        name = file.readline().strip()
    request = StackRequest(process, name, path, path.stat().st_size)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(STACKS_SIGNAL)
    return request


def _has_file_open(process: psutil.Process, path: Path) -> bool:
    try:
        return str(path.resolve()) in {file.path for file in process.open_files()}
    except psutil.Error:
        return False


def _describe_status(process: psutil.Process) -> str:
    try:
        return f"{process.status()}, {process.name()}"
    except psutil.NoSuchProcess:
        return "gone"
