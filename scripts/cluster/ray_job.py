"""Submit a run to a Ray cluster that is already up, follow its log, and stop it when this is
stopped.

    RAY_ADDRESS=http://head:8265 python scripts/cluster/ray_job.py NAME \\
        trainer.default_local_dir=/shared/run [key=value ...]

NAME is one that --config-name takes; the run directory is an absolute path on storage that all
nodes share. A run that fails is submitted again, three times, and goes on from its newest
checkpoint (trainer.resume_mode=auto). The cluster's token is read from RAY_AUTH_TOKEN or
~/.ray/auth_token; RAY_AUTH_MODE=disabled for a cluster without one.
"""

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported in connect
    from ray.job_submission import JobDetails, JobSubmissionClient

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = [".venv", ".git", ".mutants", "build", "runs", "data"]
PAUSE_S = 5.0
PATIENCE_S = 600.0  # with a cluster that does not answer
WRONG_SETTINGS = 2  # exit status that another attempt would only repeat


class Lost(RuntimeError):
    """The cluster does not answer, and nobody knows what became of the job."""


def main(argv: Sequence[str]) -> int:
    """The exit status of the last attempt."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--attempts", type=int, default=3, help="further ones after a failure")
    parser.add_argument("--python", default="python", help="the interpreter on the cluster")
    args = parser.parse_args(argv)
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        parser.error("RAY_ADDRESS is not set; fix: RAY_ADDRESS=http://head:8265")
    client = connect(address)
    module = [args.python, "-m", "verl.trainer.main_ppo", "--config-name", args.name]
    command = shlex.join([*module, "trainer.resume_mode=auto", *args.words])
    for left in range(args.attempts, -1, -1):
        details = play(client, command)
        if details.status == "SUCCEEDED":
            return 0
        status = details.driver_exit_code or 1
        if details.status == "STOPPED" or status == WRONG_SETTINGS or not left:
            return status
        print(f"failed with status {status}; attempts left: {left}", file=sys.stderr)
    return 1


def connect(address: str) -> "JobSubmissionClient":
    """The cluster whose dashboard listens at ``address``."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads it when it is imported
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(address)


def play(client: "JobSubmissionClient", command: str) -> "JobDetails":
    """Submit ``command`` and print its log until it has ended. A job that is not to be followed
    to its end is stopped. Raises ``Lost``.
    """
    runtime_env = {"working_dir": str(ROOT), "excludes": LEFT_OUT}
    job = client.submit_job(entrypoint=command, runtime_env=runtime_env)
    try:
        return follow(client, job)
    except KeyboardInterrupt:
        client.stop_job(job)
        raise


def follow(client: "JobSubmissionClient", job: str) -> "JobDetails":
    """What became of ``job``. A cluster that does not answer is asked again for ``PATIENCE_S``."""
    shown = 0
    heard = time.monotonic()
    while True:
        try:
            # In this order: nothing is written after the end.
            details = client.get_job_info(job)
            log = client.get_job_logs(job)
        except (OSError, RuntimeError) as error:
            if time.monotonic() - heard > PATIENCE_S:
                raise Lost(f"job {job}: no answer for {PATIENCE_S:g} s: {error}") from error
        else:
            heard = time.monotonic()
            print(log[shown:], end="", flush=True)
            shown = len(log)
            if details.status.is_terminal():
                return details
        time.sleep(PAUSE_S)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(143)
    except Lost as lost:
        sys.exit(str(lost))
