"""Run one cell of the fault matrix: start a job, inject the fault, check how the job ends."""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from scripts.dev.chaos.cells import (
    COLLECTOR,
    DRIVER,
    ENGINE,
    ENVIRONMENT,
    HUNG,
    KILLED,
    NODE,
    OUT_OF_MEMORY,
    RANK,
    SAVE,
    Cell,
)
from scripts.dev.chaos.job import FAULT_OVERRIDES, NUM_STEPS, OVERRIDES, TRAJECTORIES_PER_STEP
from scripts.dev.chaos.two_nodes import run_two_nodes
from tests.helpers.jobs import AGENTS, Job, start
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointError, CheckpointManager, verify_checkpoint

STAGE_TIMEOUT_S = 900.0  # limit for the job to reach the stage; a busy machine starts Ray slowly
EXIT_TIMEOUT_S = 300.0  # limit for the job to end after the fault
CLEANUP_TIMEOUT_S = 30.0  # limit for all processes to end
SIGNALS = {KILLED: signal.SIGKILL, HUNG: signal.SIGSTOP}
# Part of the job → text in the command line of its process.
PROCESS_PATTERNS = {
    ENGINE: "ray::RolloutWorker",
    COLLECTOR: "ray::CollectorWorker",
    RANK: "ray::WorkerHost",
    ENVIRONMENT: "agent_system.environments.pool.worker",
}
# Names of each part of the job in log lines. A log line reports the failure of a part if it matches
# the pattern of the part and FAILURE_WORDS.
NAME_PATTERNS = {
    ENGINE: r"[Rr]ollout ?[Ww]orker|rollout engine|export of the weights",
    ENVIRONMENT: r"environment worker|env_\w+",
    COLLECTOR: r"collector-\d",
    RANK: r"actor\[rank 0\]|ActorWorker",
    NODE: r"\bnode\b|raylet",
    DRIVER: r"driver|^MemoryError",  # in errors of other parts, text precedes "MemoryError"
}
FAILURE_WORDS = re.compile(r"Error|Failed|Stalled|failed|died|gone|killed|not ready|raised in")
WRONG = "WRONG"
MAX_LOG_CHARACTERS = 300  # characters of the log of a job that did not reach its stage
# Parts that a save needs. If one of them fails during the save, no checkpoint may be complete.
CHECKPOINT_WRITERS = (RANK, NODE, DRIVER)


@dataclass
class CellResult:
    """Result of one test (cell) of the fault matrix.

    ``verdict`` is ``ends`` (nonzero exit status and no problem), ``continues`` (all steps were
    done), or ``WRONG`` with the problems. ``error_line`` is the log line with the error.
    """

    key: str  # PART/STAGE/FAULT
    verdict: str
    seconds: float = 0.0  # from the fault to the end of the job
    status: int = 0  # exit status of the job
    error_line: str = ""


@dataclass
class JobAfterFault:
    """Outcome of a job into which a fault was injected.

    ``status`` is the exit status, or None if the job did not end in time.
    """

    cell: Cell
    run_dir: Path
    log_text: str
    status: int | None
    remaining_processes: list[str]


def run_cell(cell: Cell, policy: Path, folder: Path) -> CellResult:
    """Run ``cell`` in ``folder``, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environ = {"CHAOS_CELL": cell.cell_key, "CHAOS_FOLDER": str(folder)}
    with run_two_nodes(environ) if cell.part == NODE else nullcontext() as cluster:
        overrides = [
            *OVERRIDES,
            *FAULT_OVERRIDES,
            f"actor_rollout_ref.model.path={policy}",
            f"trainer.default_local_dir={folder / 'run'}",
            f"ray_init.address={cluster.address if cluster is not None else 'null'}",
        ]
        job = start(overrides, folder / "log.txt", environ)
        try:
            return _inject_and_wait(
                cell, job, folder, cluster.raylet if cluster is not None else None
            )
        finally:
            job.end()


def _inject_and_wait(
    cell: Cell, job: Job, folder: Path, raylet: psutil.Process | None
) -> CellResult:
    injected_marker = folder / "struck"
    reached_marker = injected_marker if cell.fault == OUT_OF_MEMORY else folder / "reached"
    try:
        job.wait_for(reached_marker.exists, STAGE_TIMEOUT_S)
    except AssertionError:
        problem = f"{WRONG}: the job did not reach the stage"
        return CellResult(
            cell.cell_key, problem, error_line=job.read_log_end()[-MAX_LOG_CHARACTERS:]
        )
    if cell.fault != OUT_OF_MEMORY:
        target_processes = (
            [find_process(cell.part, job)]
            if raylet is None
            else [raylet, *raylet.children(recursive=True)]
        )
        for target_process in target_processes:
            with suppress(psutil.NoSuchProcess):
                target_process.send_signal(SIGNALS[cell.fault])
        injected_marker.touch()
    start_time_s = time.monotonic()
    try:
        status = job.process.wait(EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        status = None
    seconds = round(time.monotonic() - start_time_s, 1)
    # Exclude Ray's own processes, which may run for a minute after their driver was killed.
    remaining_processes = job.left_over(CLEANUP_TIMEOUT_S, apart_from=AGENTS)
    # Remove the path of the folder, which contains the name of the part: a path in the log must not
    # count as an error that names the part.
    log_text = job.log.read_text(errors="replace").replace(str(folder), "")
    job_after_fault = JobAfterFault(cell, folder / "run", log_text, status, remaining_processes)
    return CellResult(
        cell.cell_key,
        compute_verdict(job_after_fault),
        seconds,
        status or 0,
        find_error_line(job_after_fault),
    )


def find_process(part: str, job: Job) -> psutil.Process:
    """Return the process that is ``part`` of the job. Raises ``LookupError`` if there is none."""
    if part == DRIVER:
        return psutil.Process(job.process.pid)
    for process in psutil.Process(job.process.pid).children(recursive=True):
        if PROCESS_PATTERNS[part] in " ".join(process.cmdline()):
            return process
    raise LookupError(f"the job has no process of the part {part!r}")


def compute_verdict(job_after_fault: JobAfterFault) -> str:
    """Return the verdict about a job after its fault, as ``CellResult`` describes it."""
    problems = list(_find_problems(job_after_fault))
    if problems:
        return f"{WRONG}: {'; '.join(problems)}"
    return "ends" if job_after_fault.status else "continues"


def _find_problems(job_after_fault: JobAfterFault) -> Iterator[str]:
    if job_after_fault.status is None:
        yield f"it did not end within {EXIT_TIMEOUT_S:g} s"
    if job_after_fault.remaining_processes:
        yield f"left: {', '.join(job_after_fault.remaining_processes)}"
    valid_steps, invalid_steps = _verify_checkpoints(job_after_fault.run_dir)
    if invalid_steps:
        yield f"invalid checkpoints have a final name: {invalid_steps}"
    if job_after_fault.status == 0:
        steps = [record["step"] for record in jsonl.read(job_after_fault.run_dir / "metrics.jsonl")]
        if steps != list(range(1, NUM_STEPS + 1)) or NUM_STEPS not in valid_steps:
            yield f"exit status 0 after steps {steps} and checkpoints {valid_steps}"
        for step in steps:
            num_trajectories = _count_complete_trajectories(
                job_after_fault.run_dir / "rollouts" / f"{step}.jsonl"
            )
            if num_trajectories != TRAJECTORIES_PER_STEP:
                yield (
                    f"step {step} was trained on {num_trajectories} trajectories, "
                    f"not {TRAJECTORIES_PER_STEP}"
                )
    elif (
        valid_steps
        and job_after_fault.cell.stage == SAVE
        and job_after_fault.cell.part in CHECKPOINT_WRITERS
    ):
        yield f"the save with the fault left complete checkpoints: {valid_steps}"
    # A killed driver cannot log an error, so its exit status is accepted instead.
    if (
        job_after_fault.status
        and not find_error_line(job_after_fault)
        and job_after_fault.status != -signal.SIGKILL
    ):
        yield "no error line names the part"


def _count_complete_trajectories(file: Path) -> int:
    lines = jsonl.read(file)
    return len({line["traj_uid"] for line in lines if not line["aborted"] and line["steps"]})


def _verify_checkpoints(run: Path) -> tuple[list[int], list[int]]:
    """Return the steps of valid and of invalid checkpoints that have their final name."""
    valid_steps, invalid_steps = [], []
    for step, path in CheckpointManager(run / "checkpoints").find_checkpoints().items():
        try:
            verify_checkpoint(path)
        except CheckpointError:
            invalid_steps.append(step)
        else:
            valid_steps.append(step)
    return valid_steps, invalid_steps


def find_error_line(job_after_fault: JobAfterFault) -> str:
    """Return the last log line that reports a failure of the part with the fault, or ""."""
    part_name_pattern = re.compile(NAME_PATTERNS[job_after_fault.cell.part])
    for line in reversed(job_after_fault.log_text.splitlines()):
        if part_name_pattern.search(line) and FAILURE_WORDS.search(line):
            return line.strip()
    return ""
