"""Tests of a job that is ended by ``kill -9``, then by SIGTERM: the same command continues from the
last checkpoint.

killed ──▶ terminated ──▶ resumed      three starts of one command
"""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.jobs import AGENTS, Job, start
from tests.helpers.refusals import list_log_lines
from tests.helpers.smoke_job import NEEDS_VLLM, STEPS, TIMEOUT_S, smoke_words
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointManager, verify_checkpoint

pytestmark = [NEEDS_VLLM, pytest.mark.slow, pytest.mark.timeout(3 * TIMEOUT_S)]
TRAINER = "verl.trainer.ppo.ray_trainer"
TOTAL = 4
GONE_S = 30
AGENTS_GONE_S = 90
SCHEDULE = [
    "algorithm.adv_estimator=grpo",
    f"trainer.total_training_steps={TOTAL}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=null",
]


@dataclass
class KilledJob:
    """Job whose driver was killed: overrides, run directory, newest checkpoint and surviving
    processes.
    """

    job: Job
    overrides: list[str]
    run: Path
    newest: int
    survivors: list[str]


@pytest.fixture(scope="module")
def killed(main_job):
    """Return the job right after its driver was killed, as soon as there was a checkpoint."""
    overrides, run = smoke_words(main_job.root, "killed", *SCHEDULE), main_job.root / "killed"
    checkpoints = CheckpointManager(run / "checkpoints")
    job = start(overrides, main_job.root / "killed.txt")
    job.wait_for(checkpoints.find_checkpoints, TIMEOUT_S)
    job.kill_driver()
    survivors = job.left_over(GONE_S, apart_from=AGENTS)
    yield KilledJob(job, overrides, run, max(checkpoints.find_checkpoints()), survivors)
    job.end()


@pytest.fixture(scope="module")
def terminated(main_job, killed):
    """Start the command again and send SIGTERM during the rollout; return the job and its exit
    status.
    """
    job = start(killed.overrides, main_job.root / "terminated.txt")
    job.wait_for(lambda: list_resume_lines(job, killed), TIMEOUT_S)
    job.process.send_signal(signal.SIGTERM)
    yield job, job.wait(GONE_S)
    job.end()


@pytest.fixture(scope="module")
def resumed(main_job, killed, terminated):
    """Run the command a third time, to its end."""
    job = start(killed.overrides, main_job.root / "resumed.txt")
    job.finish(TIMEOUT_S)
    return job


def list_resume_lines(job: Job, killed: KilledJob) -> list[str]:
    """Return the log lines about resuming at the newest checkpoint of the killed job."""
    directory = f"{killed.run}/checkpoints/global_step_{killed.newest}"
    return list_log_lines(job.read_log_end(), TRAINER, directory, killed.newest)


def list_task_ids(run: Path, step: int) -> list[str]:
    """Return the tasks of ``step``, one per trajectory."""
    return sorted(row["task_id"] for row in jsonl.read(run / "rollouts" / f"{step}.jsonl"))


def test_processes_of_a_killed_driver_end(killed):
    assert killed.survivors == []


def test_sigterm_ends_all_processes_and_says_how_to_continue(killed, terminated):
    job, status = terminated
    assert status == 128 + signal.SIGTERM
    assert job.family() == [], "a process outlived the driver, for example one of Ray's agents"
    last = job.read_log_end().strip().splitlines()[-1]
    assert f"{killed.run}/checkpoints/global_step_" in last and "resume_mode=auto" in last
    assert not list((killed.run / "checkpoints").glob(".partial-*"))


def test_sigterm_to_the_process_group_ends_all_processes(tmp_path):
    """A cluster's scheduler sends SIGTERM to all processes of a job, also to those of Ray."""
    policy = "actor_rollout_ref.model.path=experiments/policies/relay"
    overrides = [
        policy,
        "trainer.val_before_train=false",
        f"trainer.default_local_dir={tmp_path}/r",
    ]
    job = start(["--config-name", "relay", *overrides], tmp_path / "log.txt")
    job.wait_for(lambda: "step 1:" in job.read_log_end(), TIMEOUT_S)
    os.killpg(job.process.pid, signal.SIGTERM)
    status = job.wait(GONE_S)
    assert job.left_over(GONE_S) == []
    # Without its node process, Ray exits the driver in a call that needs that process. Such a call
    # may come before the end of the cleanup. The guard then reports the end.
    if status == 1:
        assert f"driver (process {job.process.pid})" in job.read_log_end()
        return
    assert status == 128 + signal.SIGTERM
    (last,) = list_log_lines(job.read_log_end(), "verl.record.run_dir", "resume_mode=auto")
    assert "global_step_" not in last


def test_command_continues_from_the_newest_checkpoint(killed, resumed):
    assert killed.newest < TOTAL
    assert list_resume_lines(resumed, killed)
    steps = CheckpointManager(killed.run / "checkpoints").find_checkpoints()
    assert list(steps) == list(range(1, TOTAL + 1))
    for path in steps.values():
        verify_checkpoint(path)


def test_every_step_is_recorded_once(killed, resumed):
    records = list(jsonl.read(killed.run / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, TOTAL + 1))
    assert [path.name for path in killed.run.glob("metrics*")] == ["metrics.jsonl"]


def test_steps_have_the_tasks_of_an_uninterrupted_run(main_job, killed, resumed):
    for step in range(1, STEPS + 1):
        assert list_task_ids(killed.run, step) == list_task_ids(main_job.run, step)
    assert len({tuple(list_task_ids(killed.run, step)) for step in range(1, TOTAL + 1)}) == TOTAL


def test_no_process_is_left_at_the_end(killed, resumed):
    assert resumed.left_over(GONE_S) == []
    assert killed.job.left_over(AGENTS_GONE_S) == []
