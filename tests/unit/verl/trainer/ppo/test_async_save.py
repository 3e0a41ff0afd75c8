"""A checkpoint contains the state of all trained groups and is complete when every rank has
written."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.refusals import mentions
from tests.helpers.trainer_fakes import Group
from verl.records import WrittenFiles
from verl.trainer.ppo import resources
from verl.trainer.ppo.resources import TrainingWorkers
from verl.utils.checkpoint import CheckpointError


class WritingGroup(Group):
    """Two ranks. The second finishes one poll later than the first."""

    def __init__(self, calls: list[Any], name: str) -> None:
        super().__init__(calls, name)
        self.polls = 0
        self.polls_needed = 2

    def save_checkpoint(self, directory: str, /) -> None:
        self.calls.append((self.name, directory))

    def written_files(self) -> list[WrittenFiles | None]:
        self.polls += 1
        written = [WrittenFiles(f"{self.name} rank {rank}", {}) for rank in (0, 1)]
        return [written[0], written[1] if self.polls >= self.polls_needed else None]


@pytest.fixture
def groups(monkeypatch):
    monkeypatch.setattr(resources, "POLL_INTERVAL_S", 0.0)
    calls: list[Any] = []
    return WritingGroup(calls, "actor"), WritingGroup(calls, "critic")


def test_checkpoint_waits_for_every_rank_of_every_group(groups):
    actor, critic = groups
    critic.polls_needed = 3
    workers = TrainingWorkers(actor, [], critic_group=critic)
    written_files = workers.save_checkpoint(Path("partial"))
    assert actor.calls == [("actor", "partial/actor"), ("critic", "partial/critic")]
    assert actor.polls == critic.polls == 0, "no poll before the result is needed"
    written = [part.writer for part in written_files()]
    assert written == ["actor rank 0", "actor rank 1", "critic rank 0", "critic rank 1"]
    assert critic.polls == 3


def test_rank_that_never_finishes_raises_a_timeout(groups, monkeypatch):
    monkeypatch.setattr(resources, "WRITE_TIMEOUT_S", -1.0)
    workers = TrainingWorkers(groups[0], [])
    with pytest.raises(TimeoutError, check=mentions("1 of 2", "actor rank 0")):
        workers.save_checkpoint(Path("partial"))()


def test_error_of_a_rank_is_raised(groups, monkeypatch):
    actor = groups[0]

    def fail() -> list[WrittenFiles | None]:
        raise CheckpointError("rank 1: disk full")

    monkeypatch.setattr(actor, "written_files", fail)
    with pytest.raises(CheckpointError, check=mentions("rank 1: disk full")):
        TrainingWorkers(actor, []).save_checkpoint(Path("partial"))()
