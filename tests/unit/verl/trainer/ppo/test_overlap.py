"""One-step overlap: the order of stages, and the weights that generate each batch."""

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
    played_rows,
)
from verl.protocol import DataProto

PATIENCE_S = 20.0


class MeetingCollector(Collector):
    """Collector whose rollouts of step 2 and later wait until an update has begun."""

    def __init__(self, calls: list[Any], updating: threading.Event) -> None:
        super().__init__(calls)
        self.updating = updating
        self.playing = threading.Event()

    def multi_turn_loop(
        self, gen_batch: DataProto, actor_rollout_wg: Any, envs: Tasks, is_train: bool = True
    ) -> DataProto:
        step = gen_batch.meta_info["global_step"]
        self.calls.append(("play", step))
        if step > 1:
            self.playing.set()
            assert self.updating.wait(PATIENCE_S)
            self.updating.clear()
        self.calls.append(("played", step))
        version = max(0.0, step - 2.0)
        names = ("rollout/policy_version", "rollout/policy_version_min")
        return played_rows({"metrics": dict.fromkeys(names, version)})


def overlapping_run(steps: int = 3) -> tuple[Any, list[Any], Any]:
    trainer, calls, journal = make_fake_run(steps=steps, overlap="one_step")
    updating = threading.Event()
    collector = MeetingCollector(calls, updating)
    trainer.collector = collector
    update = trainer.workers.actor_group.update_actor

    def update_while_playing(data: DataProto) -> DataProto:
        if trainer.global_step < steps:
            # Neither can go on without the other: they must run at the same time.
            assert collector.playing.wait(PATIENCE_S)
            collector.playing.clear()
            updating.set()
        return update(data)

    score = trainer.score

    def score_and_note(batch: DataProto) -> DataProto:
        calls.append(("scored", trainer.global_step))
        return score(batch)

    trainer.workers.actor_group.update_actor = update_while_playing
    trainer.score = score_and_note
    return trainer, calls, journal


def test_the_next_batch_is_played_while_the_last_one_is_learned_from():
    trainer, calls, _ = overlapping_run()
    trainer.fit()
    assert [call for call in calls if call[0] == "play"] == [("play", 1), ("play", 2), ("play", 3)]
    assert "sleep" not in calls  # engines that play keep their memory


def test_weights_change_when_nothing_is_generated_and_rows_are_scored_after_it():
    trainer, calls, _ = overlapping_run()
    trainer.fit()
    at = {call: n for n, call in enumerate(calls) if isinstance(call, tuple)}
    for step in (1, 2):
        ahead = step + 1
        assert at["play", ahead] < at["played", ahead] < at["sync", step] < at["scored", ahead]


def test_staleness_counts_the_updates_in_between():
    trainer, _, journal = overlapping_run()
    trainer.fit()
    stale = [journal.metrics[step]["training/staleness"] for step in (1, 2, 3)]
    assert stale == [0.0, 1.0, 1.0]


def test_what_breaks_while_playing_ahead_ends_the_run():
    trainer, _, _ = overlapping_run()
    trainer.collector.playing.set()
    breaking: Any = trainer.collector

    def break_later(gen_batch: DataProto, *_: Any, **__: Any) -> DataProto:
        if gen_batch.meta_info["global_step"] > 1:
            raise RuntimeError("no environment is left")
        return played_rows()

    breaking.multi_turn_loop = break_later
    with pytest.raises(RuntimeError, match="no environment is left"):
        trainer.fit()
    assert trainer.global_step == 2


def test_without_overlap_nothing_is_played_ahead():
    trainer, calls, _ = make_fake_run(steps=2)
    trainer.fit()
    assert calls.index(("play", 2)) > calls.index(("sync", 1))
    assert trainer.prefetched is None


class LeavingCollector(Collector):
    """Leaves a group under way at every step."""

    def multi_turn_loop(
        self, gen_batch: DataProto, actor_rollout_wg: Any, envs: Tasks, is_train: bool = True
    ) -> DataProto:
        self.groups_under_way = [f"left by {gen_batch.meta_info['global_step']}"]
        return played_rows()


class KeepingCheckpoints(Checkpoints):
    """Keeps the state of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, dict[str, Any]] = {}

    def save(self, step: int, writer: Callable[[Path], object], state: dict[str, Any]) -> Path:
        self.states[step] = state
        return super().save(step, writer, state)


def test_a_checkpoint_names_the_groups_that_go_on():
    """Those of before the batch that is played ahead: it is played again after a resume."""
    checkpoints = KeepingCheckpoints()
    trainer, calls, _ = make_fake_run(checkpoints, steps=3, overlap="one_step")
    trainer.config.trainer.save_freq = 2
    trainer.collector = LeavingCollector(calls)
    trainer.fit()
    under_way = {
        step: state["collector"]["under_way"] for step, state in checkpoints.states.items()
    }
    assert under_way == {2: ["left by 2"], 3: ["left by 3"]}
    resumed, _, _ = make_fake_run(Checkpoints(Path("global_step_2"), checkpoints.states[2]))
    assert resumed.resume()
    assert resumed.collector.state() == {"under_way": ["left by 2"]}
