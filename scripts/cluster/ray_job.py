"""Submit a run to a running Ray cluster, print its log, and stop it when this script is stopped.

    RAY_ADDRESS=http://head:8265 python scripts/cluster/ray_job.py NAME \\
        trainer.default_local_dir=/shared/run [key=value ...]

NAME is a value of --config-name. The run directory is an absolute path on storage that all nodes
share. A failed run is submitted again up to three times and resumes from its newest checkpoint
(trainer.resume_mode=auto). The cluster's token is read from RAY_AUTH_TOKEN or ~/.ray/auth_token.
Set RAY_AUTH_MODE=disabled for a cluster without a token.

The job gets the environment variables that locate files (such as HF_HOME) or configure trackers
(such as WANDB_MODE), if they are set here. ``--env NAME`` passes another one, whose value the
dashboard shows. The repository is uploaded, with its folder ``data`` if an override names a path in
it.
"""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:  # connect() imports Ray at run time
    from ray.job_submission import JobDetails, JobSubmissionClient

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from verl.utils.commands import UsageError, run_and_report_mistakes

EXCLUDED_PATHS = [".venv", ".git", ".mutants", "build", "runs"]
# Environment variables for file locations and trackers. None of them is a secret.
PASSED_VARIABLES = (
    "ALFWORLD_DATA",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "MLFLOW_TRACKING_URI",
    "TOKENIZERS_PARALLELISM",
    "WANDB_ENTITY",
    "WANDB_MODE",
    "WANDB_PROJECT",
)
POLL_INTERVAL_S = 5.0  # seconds between two reads of the job's state and log
ANSWER_TIMEOUT_S = 600.0  # limit for a cluster that does not answer
INVALID_SETTINGS_STATUS = 2  # exit status for invalid settings; another attempt would fail too


class ClusterUnreachableError(RuntimeError):
    """The cluster does not answer, so the state of the job is unknown."""


def main(argv: Sequence[str]) -> int:
    """Submit the job, again after failures, and return the exit status of the last attempt.

    ``--attempts`` is the maximum number of further attempts. A job that was stopped, or that
    reports invalid settings, is not submitted again.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("words", nargs="*", metavar="key=value")
    parser.add_argument("--attempts", type=int, default=3, help="further ones after a failure")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME", help="variable to pass; repeatable"
    )
    parser.add_argument("--python", default="python", help="the interpreter on the cluster")
    args = parser.parse_intermixed_args(argv)
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        parser.error("RAY_ADDRESS is not set; fix: RAY_ADDRESS=http://head:8265")
    if missing_variables := [name for name in args.env if name not in os.environ]:
        parser.error(
            f"--env {missing_variables[0]}: not set here; "
            f"fix: {missing_variables[0]}=... before the command"
        )
    if args.attempts < 0:
        parser.error(f"--attempts={args.attempts}; allowed: 0 or more")
    client = connect(address)
    module_command = [args.python, "-m", "verl.trainer.main_ppo", "--config-name", args.name]
    command = shlex.join([*module_command, "trainer.resume_mode=auto", *args.words])
    runtime_env = build_runtime_env(args.words, args.env)
    for attempts_left in range(args.attempts, -1, -1):
        details = submit_and_follow(client, command, runtime_env)
        if details.status == "SUCCEEDED":
            return 0
        exit_status = details.driver_exit_code or 1
        if (
            details.status == "STOPPED"
            or exit_status == INVALID_SETTINGS_STATUS
            or not attempts_left
        ):
            return exit_status
        print(f"failed with status {exit_status}; attempts left: {attempts_left}", file=sys.stderr)
    return 1


def build_runtime_env(overrides: Sequence[str], variable_names: Sequence[str]) -> dict[str, Any]:
    """Return Ray's runtime environment for a run with ``overrides``: code and variables."""
    override_values = [override.partition("=")[2].lstrip("[\"'") for override in overrides]
    uses_data_folder = any(value.startswith(("data/", "./data/")) for value in override_values)
    env_variables = {
        name: os.environ[name]
        for name in (*PASSED_VARIABLES, *variable_names)
        if name in os.environ
    }
    excludes = EXCLUDED_PATHS if uses_data_folder else [*EXCLUDED_PATHS, "data"]
    return {"working_dir": str(ROOT), "excludes": excludes, "env_vars": env_variables}


def connect(address: str) -> "JobSubmissionClient":
    """Return a client of the cluster whose dashboard listens at ``address``.

    Raises ``UsageError`` if it is no http(s) address, or if no cluster answers there.
    """
    allowed = "allowed: the dashboard's URL; fix: RAY_ADDRESS=http://head:8265"
    try:
        url = urlsplit(address)
        is_dashboard = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_dashboard = False
    # Refuse other addresses here: for some of them Ray ends the process without an exception.
    if not is_dashboard:
        raise UsageError(
            f"RAY_ADDRESS={address!r}: no URL of a dashboard; {allowed}", "invalid_syntax"
        )
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads it when it is imported
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except AuthenticationError as error:
        fix = "RAY_AUTH_TOKEN=<the cluster's token>, or RAY_AUTH_MODE=disabled where it has none"
        raise UsageError(
            f"RAY_ADDRESS={address!r}: no token for this cluster; fix: {fix}", "failed_call"
        ) from error
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"RAY_ADDRESS={address!r}: {reason}; {allowed}", "failed_call") from error


def submit_and_follow(
    client: "JobSubmissionClient", command: str, runtime_env: dict[str, Any]
) -> "JobDetails":
    """Submit ``command`` and follow the job. An interrupt stops the job."""
    job = client.submit_job(entrypoint=command, runtime_env=runtime_env)
    try:
        return follow_job(client, job)
    except KeyboardInterrupt:
        client.stop_job(job)
        raise


def follow_job(client: "JobSubmissionClient", job: str) -> "JobDetails":
    """Print the log of ``job`` until it ends and return its details.

    Raises ``ClusterUnreachableError`` after ``ANSWER_TIMEOUT_S`` without an answer.
    """
    printed_length = 0
    last_answer_time = time.monotonic()
    while True:
        try:
            # Read the state first: the log is complete once the state is terminal.
            details = client.get_job_info(job)
            log = client.get_job_logs(job)
        except (OSError, RuntimeError) as error:
            if time.monotonic() - last_answer_time > ANSWER_TIMEOUT_S:
                raise ClusterUnreachableError(
                    f"job {job}: no answer for {ANSWER_TIMEOUT_S:g} s: {error}"
                ) from error
        else:
            last_answer_time = time.monotonic()
            print(log[printed_length:], end="", flush=True)
            printed_length = len(log)
            if details.status.is_terminal():
                return details
        time.sleep(POLL_INTERVAL_S)


if __name__ == "__main__":
    try:
        sys.exit(run_and_report_mistakes(main, sys.argv[1:]))
    except ClusterUnreachableError as lost:
        sys.exit(str(lost))
