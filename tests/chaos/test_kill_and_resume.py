"""``kill -9`` on a running job, then the same command again: training goes on where the last checkpoint is."""

from pathlib import Path

import pytest

from tests.helpers.jobs import start
from tests.helpers.smoke_job import NEEDS_VLLM, STEPS, TIMEOUT_S, smoke_words
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointManager, verify_checkpoint

pytestmark = [NEEDS_VLLM, pytest.mark.slow, pytest.mark.timeout(3 * TIMEOUT_S)]
TOTAL = 4
GONE_S = 30
SCHEDULE = [
    "algorithm.adv_estimator=grpo",
    f"trainer.total_training_steps={TOTAL}",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=null",
]


@pytest.fixture(scope="module")
def killed(main_job):
    """``(run directory, words, leftovers, newest checkpoint)`` of a job whose driver was killed after a checkpoint."""
    words = smoke_words(main_job.root, "killed", *SCHEDULE)
    run = main_job.root / "killed"
    checkpoints = CheckpointManager(run / "checkpoints")
    job = start(words, main_job.root / "killed.txt")
    job.wait_for(checkpoints.steps, TIMEOUT_S)
    job.kill_driver()
    left = job.left_over(GONE_S)
    job.end()
    return run, words, left, max(checkpoints.steps())


@pytest.fixture(scope="module")
def resumed(main_job, killed):
    """The run directory after the same command ran to its end, and what it printed."""
    run, words, _, _ = killed
    job = start(words, main_job.root / "resumed.txt")
    job.finish(TIMEOUT_S)
    return run, job


def task_ids(run: Path, step: int) -> list[str]:
    """Tasks of ``step``, one per trajectory."""
    return sorted(row["task_id"] for row in jsonl.read(run / "rollouts" / f"{step}.jsonl"))


def test_the_family_of_a_killed_driver_dies_by_itself(killed):
    assert killed[2] == []


def test_the_same_command_continues_from_the_newest_checkpoint(killed, resumed):
    run, job = resumed
    newest = killed[3]
    assert newest < TOTAL
    assert f"resumed from {run}/checkpoints/global_step_{newest} at step {newest}" in job.said()
    steps = CheckpointManager(run / "checkpoints").steps()
    assert list(steps) == list(range(1, TOTAL + 1))
    for path in steps.values():
        verify_checkpoint(path)


def test_every_step_is_recorded_once(resumed):
    records = list(jsonl.read(resumed[0] / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, TOTAL + 1))
    assert [path.name for path in resumed[0].glob("metrics*")] == ["metrics.jsonl"]


def test_steps_play_the_tasks_of_an_uninterrupted_run(main_job, resumed):
    for step in range(1, STEPS + 1):
        assert task_ids(resumed[0], step) == task_ids(main_job.run, step)


def test_no_process_of_the_second_run_is_left(resumed):
    assert resumed[1].left_over(GONE_S) == []
