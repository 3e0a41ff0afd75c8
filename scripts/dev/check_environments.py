"""Run ``python -m agent_system.environments check`` on every listed environment.

    python scripts/dev/check_environments.py RESULTS.jsonl [NAME ...] [--jobs 2] [--timeout 120]

Each check runs in a child process with a deadline, so an environment that hangs or crashes affects
only its own result. Each result is added to RESULTS.jsonl as one JSON object with the keys::

    name       name of the environment
    status     exit status of the check: 0 no problem, 1 problems, 2 cannot be checked;
               -9 if the deadline passed
    seconds    duration of the check
    problems   one line per problem, or the error message
    remarks    one line per condition that could not be checked

Names that have a result are skipped, so an interrupted scan continues. To check a name again,
remove its line. Prints one line per check and, at the end, the number of names of each outcome.

The outcome "named" means that the check found problems, and that the command ``list`` prints a
remark about this name. The exit status is 1 if any other check found a problem or did not finish.
"""

import argparse
import collections
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TextIO

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from agent_system.environments.cli.names import collect_name_remarks, list_names
from verl.utils import jsonl
from verl.utils.processes import wait_and_kill

COMMAND = (sys.executable, "-m", "agent_system.environments", "check")
PROBLEM_PREFIX, REMARK_PREFIX = "WRONG: ", "open: "  # first characters of output lines
TIMED_OUT_STATUS = -signal.SIGKILL
# Outcomes of environments for which this script exits with status 1.
PROBLEMS_OUTCOME, NOT_FINISHED_OUTCOME = "problems", "not finished"


def run_environment_check(
    name: str, timeout_s: float, command: Sequence[str] = COMMAND
) -> dict[str, Any]:
    """Run ``command`` on ``name`` in a child process and return the result.

    The child process and its descendants are killed after ``timeout_s`` seconds.
    """
    start_time = time.monotonic()
    # Use files instead of pipes: a process that survives the deadline would keep a pipe open.
    with (
        tempfile.TemporaryFile("w+", errors="replace") as stdout,
        tempfile.TemporaryFile("w+", errors="replace") as stderr,
    ):
        with subprocess.Popen(
            [*command, name], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        ) as child:
            try:
                status = child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process = psutil.Process(child.pid)
                wait_and_kill([process, *process.children(recursive=True)], 0.0)
                status = TIMED_OUT_STATUS
        output, errors = _read_text(stdout), _read_text(stderr)
    if status == TIMED_OUT_STATUS:
        errors = f"not finished after {timeout_s:g} s"
    lines = output.splitlines()
    problems = [
        line.removeprefix(PROBLEM_PREFIX) for line in lines if line.startswith(PROBLEM_PREFIX)
    ]
    return {
        "name": name,
        "status": status,
        "seconds": round(time.monotonic() - start_time, 1),
        "problems": problems or ([line for line in errors.splitlines() if line] if status else []),
        "remarks": [
            line.removeprefix(REMARK_PREFIX) for line in lines if line.startswith(REMARK_PREFIX)
        ],
    }


def _read_text(file: TextIO) -> str:
    file.seek(0)
    return file.read()


def check_names(
    names: Sequence[str],
    path: Path,
    jobs: int,
    timeout_s: float,
    command: Sequence[str] = COMMAND,
) -> dict[str, dict[str, Any]]:
    """Check the environments without a result in ``path``, ``jobs`` at a time, and add the results.

    Return the results of all environments ``names``.
    """
    results = {result["name"]: result for result in jsonl.read(path)}
    pool = ThreadPoolExecutor(jobs)
    try:
        check_futures = [
            pool.submit(run_environment_check, name, timeout_s, command)
            for name in names
            if name not in results
        ]
        for finished_check in as_completed(check_futures):
            result = finished_check.result()
            results[result["name"]] = result
            jsonl.write(path, results.values())
            outcome = f"{result['status']}, {result['seconds']} s"
            print(f"{result['name']}: {outcome} {' | '.join(result['problems'])[:300]}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return {name: results[name] for name in names}


def main(argv: Sequence[str] | None = None) -> int:
    """Check environments. Return 1 if a check did not finish or found an unknown problem."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="file of the results")
    parser.add_argument("names", nargs="*", help="names to check; default: all listed names")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="checks at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of one check")
    parser.add_argument("--steps", type=int, default=50, help="actions of an episode, at most")
    args = parser.parse_intermixed_args(argv)
    results = check_names(
        args.names or list_names(),
        args.results,
        args.jobs,
        args.timeout,
        (*COMMAND, f"--steps={args.steps}"),
    )
    remarks = collect_name_remarks()
    outcome_counts = collections.Counter(
        describe_outcome(result, name in remarks) for name, result in results.items()
    )
    summary = "; ".join(f"{outcome}: {count}" for outcome, count in sorted(outcome_counts.items()))
    sys.stdout.write(f"{len(results)} names; {summary}\n")
    return 1 if outcome_counts[PROBLEMS_OUTCOME] + outcome_counts[NOT_FINISHED_OUTCOME] else 0


def describe_outcome(result: Mapping[str, Any], has_remark: bool) -> str:
    """Return the outcome of a check: no problem, not checked, not finished, named or problems.

    It is "named" if there are problems and ``list`` prints a remark about the environment.
    """
    outcomes = {0: "no problem", 2: "not checked", TIMED_OUT_STATUS: NOT_FINISHED_OUTCOME}
    outcome = outcomes.get(result["status"], PROBLEMS_OUTCOME)
    return "named" if outcome == PROBLEMS_OUTCOME and has_remark else outcome


if __name__ == "__main__":
    sys.exit(main())
