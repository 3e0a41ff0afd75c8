"""One-step overlap: order of stages, and the weights that generate each batch."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.trainer_fakes import (
    Checkpoints,
    Collector,
    Tasks,
    make_fake_run,
    make_trainer_rows,
)
from verl.protocol import DataProto

DEADLINE_S = 20.0


class MeetingCollector(Collector):
    """Collector whose rollouts of step 2 and later wait until an update has begun."""

    def __init__(self, calls: list[Any], updating: threading.Event) -> None:
        super().__init__(calls)
        self.updating = updating
        self.generating = threading.Event()

    def multi_turn_loop(
        self, gen_batch: DataProto, actor_rollout_wg: Any, envs: Tasks, is_train: bool = True
    ) -> DataProto:
        step = gen_batch.meta_info["global_step"]
        self.calls.append(("play", step))
        if step > 1:
            self.generating.set()
            assert self.updating.wait(DEADLINE_S)
            self.updating.clear()
        self.calls.append(("generated", step))
        version = max(0.0, step - 2.0)
        names = ("rollout/policy_version", "rollout/policy_version_min")
        return make_trainer_rows({"metrics": dict.fromkeys(names, version)})


def overlapping_run(steps: int = 3) -> tuple[Any, list[Any], Any]:
    trainer, calls, journal = make_fake_run(steps=steps, overlap="one_step")
    updating = threading.Event()
    collector = MeetingCollector(calls, updating)
    trainer.collector = collector
    update = trainer.workers.actor_group.update_actor

    def update_while_generating(data: DataProto) -> DataProto:
        if trainer.global_step < steps:
            # The rollout and the update wait for each other, so the test passes only if they
            # overlap.
            assert collector.generating.wait(DEADLINE_S)
            collector.generating.clear()
            updating.set()
        return update(data)

    score = trainer.score

    def score_and_record(batch: DataProto) -> DataProto:
        calls.append(("scored", trainer.global_step))
        return score(batch)

    trainer.workers.actor_group.update_actor = update_while_generating
    trainer.score = score_and_record
    return trainer, calls, journal


def test_next_batch_is_generated_during_the_update():
    trainer, calls, _ = overlapping_run()
    trainer.fit()
    assert [call for call in calls if call[0] == "play"] == [("play", 1), ("play", 2), ("play", 3)]
    assert "sleep" not in calls  # engines that generate keep their memory


def test_weights_change_after_the_rollout_and_before_scoring():
    trainer, calls, _ = overlapping_run()
    trainer.fit()
    position = {call: n for n, call in enumerate(calls) if isinstance(call, tuple)}
    for step in (1, 2):
        next_step = step + 1
        assert (
            position["play", next_step]
            < position["generated", next_step]
            < position["sync", step]
            < position["scored", next_step]
        )


def test_staleness_counts_the_updates_since_the_weights():
    trainer, _, journal = overlapping_run()
    trainer.fit()
    stale = [journal.metrics[step]["training/staleness"] for step in (1, 2, 3)]
    assert stale == [0.0, 1.0, 1.0]


def test_error_in_a_prefetched_rollout_ends_the_run():
    trainer, _, _ = overlapping_run()
    trainer.collector.generating.set()
    collector: Any = trainer.collector

    def fail_later(gen_batch: DataProto, *_: Any, **__: Any) -> DataProto:
        if gen_batch.meta_info["global_step"] > 1:
            raise RuntimeError("no environment is left")
        return make_trainer_rows()

    collector.multi_turn_loop = fail_later
    with pytest.raises(RuntimeError, match="no environment is left"):
        trainer.fit()
    assert trainer.global_step == 2


def test_without_overlap_no_batch_is_prefetched():
    trainer, calls, _ = make_fake_run(steps=2)
    trainer.fit()
    assert calls.index(("play", 2)) > calls.index(("sync", 1))
    assert trainer.prefetched_batch is None


class LeavingCollector(Collector):
    """Leaves a group in flight at every step."""

    def multi_turn_loop(
        self, gen_batch: DataProto, actor_rollout_wg: Any, envs: Tasks, is_train: bool = True
    ) -> DataProto:
        self.groups_under_way = [f"left by {gen_batch.meta_info['global_step']}"]
        return make_trainer_rows()


class RecordingCheckpoints(Checkpoints):
    """Records the state of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, dict[str, Any]] = {}

    def save(self, step: int, writer: Callable[[Path], object], state: dict[str, Any]) -> Path:
        self.states[step] = state
        return super().save(step, writer, state)


def test_checkpoint_names_the_groups_in_flight():
    """These are the groups before the prefetched batch, which is generated again after a resume."""
    checkpoints = RecordingCheckpoints()
    trainer, calls, _ = make_fake_run(checkpoints, steps=3, overlap="one_step")
    trainer.config.trainer.save_freq = 2
    trainer.collector = LeavingCollector(calls)
    trainer.fit()
    in_flight = {
        step: state["collector"]["under_way"] for step, state in checkpoints.states.items()
    }
    assert in_flight == {2: ["left by 2"], 3: ["left by 3"]}
    resumed, _, _ = make_fake_run(Checkpoints(Path("global_step_2"), checkpoints.states[2]))
    assert resumed.resume()
    assert resumed.collector.state() == {"under_way": ["left by 2"]}
