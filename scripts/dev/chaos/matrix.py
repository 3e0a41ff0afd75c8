"""One cell of the matrix: play a job, strike the part, and judge how the job ends."""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from scripts.dev.chaos.cells import (
    COLLECTOR,
    DRIVER,
    ENGINE,
    ENVIRONMENT,
    HUNG,
    KILLED,
    MEMORY,
    NODE,
    RANK,
    SAVE,
    Cell,
)
from scripts.dev.chaos.job import PLAYS, STRUCK_WORDS, TOTAL, WORDS
from scripts.dev.chaos.node import two_nodes
from tests.helpers.jobs import AGENTS, Job, start
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointError, CheckpointManager, verify_checkpoint

START_S = 900.0  # for a job to come to the stage; a busy machine starts Ray slowly
DEADLINE_S = 300.0  # for it to end, once a part was struck
GONE_S = 30.0
SIGNALS = {KILLED: signal.SIGKILL, HUNG: signal.SIGSTOP}
# How the command line of a part's process begins, or a word of it.
PROCESSES = {
    ENGINE: "ray::RolloutWorker",
    COLLECTOR: "ray::CollectorWorker",
    RANK: "ray::WorkerHost",
    ENVIRONMENT: "agent_system.environments.pool.worker",
}
# What a sentence about a part has in it, beside one of the words below.
NAMES = {
    ENGINE: r"[Rr]ollout ?[Ww]orker|rollout engine|export of the weights",
    ENVIRONMENT: r"environment worker|env_\w+",
    COLLECTOR: r"collector-\d",
    RANK: r"actor\[rank 0\]|ActorWorker",
    NODE: r"\bnode\b|raylet",
    DRIVER: r"driver|^MemoryError",  # an error of others comes with their name
}
FAILS = re.compile(r"Error|Failed|Stalled|failed|died|gone|killed|not ready|raised in")
WRONG = "WRONG"
SHOWN = 300  # characters of what a job said that did not come to its stage
# Of these a save is made: without them there is none.
WRITERS = (RANK, NODE, DRIVER)


@dataclass
class CellResult:
    """What became of a cell: ``verdict`` is ``ends``, ``goes on``, or ``WRONG`` and why."""

    key: str
    verdict: str
    seconds: float = 0.0
    status: int = 0
    sentence: str = ""


@dataclass
class Ended:
    """A struck job once all of it is gone."""

    cell: Cell
    run: Path
    said: str
    status: int | None
    left: list[str]


def play(cell: Cell, policy: Path, folder: Path) -> CellResult:
    """Play ``cell`` in ``folder``, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environ = {"CHAOS_CELL": cell.key, "CHAOS_FOLDER": str(folder)}
    with two_nodes(environ) if cell.part == NODE else nullcontext() as nodes:
        words = [
            *WORDS,
            *STRUCK_WORDS,
            f"actor_rollout_ref.model.path={policy}",
            f"trainer.default_local_dir={folder / 'run'}",
            f"ray_init.address={nodes.address if nodes is not None else 'null'}",
        ]
        job = start(words, folder / "log.txt", environ)
        try:
            return _judged(cell, job, folder, nodes.raylet if nodes is not None else None)
        finally:
            job.end()


def _judged(cell: Cell, job: Job, folder: Path, raylet: psutil.Process | None) -> CellResult:
    struck = folder / "struck"
    reached = struck if cell.deed == MEMORY else folder / "reached"
    try:
        job.wait_for(reached.exists, START_S)
    except AssertionError:
        return CellResult(cell.key, f"{WRONG}: the stage never came", sentence=job.said()[-SHOWN:])
    if cell.deed != MEMORY:
        targets = family(raylet) if raylet is not None else [find(cell.part, job)]
        for target in targets:
            with suppress(psutil.NoSuchProcess):
                target.send_signal(SIGNALS[cell.deed])
        struck.touch()
    began = time.monotonic()
    try:
        status = job.process.wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        status = None
    seconds = round(time.monotonic() - began, 1)
    # Those of Ray wait for a minute where their driver did not end in order.
    left = job.left_over(GONE_S, apart_from=AGENTS)
    # The folder is called after the cell, and so names the part wherever a path is said.
    said = job.log.read_text(errors="replace").replace(str(folder), "")
    ended = Ended(cell, folder / "run", said, status, left)
    return CellResult(cell.key, verdict(ended), seconds, status or 0, sentence(ended))


def family(raylet: psutil.Process) -> list[psutil.Process]:
    """Everything that runs on the node of ``raylet``."""
    return [raylet, *raylet.children(recursive=True)]


def find(part: str, job: Job) -> psutil.Process:
    """The process of ``part``. Raises ``LookupError`` where there is none."""
    if part == DRIVER:
        return psutil.Process(job.process.pid)
    for process in psutil.Process(job.process.pid).children(recursive=True):
        if PROCESSES[part] in " ".join(process.cmdline()):
            return process
    raise LookupError(f"the job has no {part}")


def verdict(ended: Ended) -> str:
    """Whether the job ended as it should."""
    wrong = list(_wrong(ended))
    if wrong:
        return f"{WRONG}: {'; '.join(wrong)}"
    return "ends" if ended.status else "goes on"


def _wrong(ended: Ended) -> Iterator[str]:
    if ended.status is None:
        yield f"it did not end within {DEADLINE_S:g} s"
    if ended.left:
        yield f"left: {', '.join(ended.left)}"
    whole, torn = _checkpoints(ended.run)
    if torn:
        yield f"torn checkpoints bear a name: {torn}"
    if ended.status == 0:
        steps = [record["step"] for record in jsonl.read(ended.run / "metrics.jsonl")]
        if steps != list(range(1, TOTAL + 1)) or TOTAL not in whole:
            yield f"success was reported after steps {steps} and checkpoints {whole}"
        for step in steps:
            plays = {line["traj_uid"] for line in _whole_plays(ended.run, step)}
            if len(plays) != PLAYS:
                yield f"step {step} learnt from {len(plays)} plays, not {PLAYS}"
    elif whole and ended.cell.stage == SAVE and ended.cell.part in WRITERS:
        yield f"the save that was struck counts: {whole}"
    # Who is killed says nothing; its status does.
    if ended.status and not sentence(ended) and ended.status != -signal.SIGKILL:
        yield "no sentence names the part"


def _whole_plays(run: Path, step: int) -> Iterator[dict[str, Any]]:
    lines = jsonl.read(run / "rollouts" / f"{step}.jsonl")
    return (line for line in lines if not line["aborted"] and line["steps"])


def _checkpoints(run: Path) -> tuple[list[int], list[int]]:
    """Steps of checkpoints that verify, and of others that bear the name of one."""
    whole, torn = [], []
    for step, path in CheckpointManager(run / "checkpoints").steps().items():
        try:
            verify_checkpoint(path)
        except CheckpointError:
            torn.append(step)
        else:
            whole.append(step)
    return whole, torn


def sentence(ended: Ended) -> str:
    """The last line of what the job said that names the part and a failure; empty where there is
    none.
    """
    name = re.compile(NAMES[ended.cell.part])
    for line in reversed(ended.said.splitlines()):
        if name.search(line) and FAILS.search(line):
            return line.strip()
    return ""
