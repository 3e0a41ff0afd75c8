"""What the trainer hands to others and keeps for itself, between the verbs of a step."""

from typing import Any

import torch

from tests.helpers.trainer_fakes import ROWS, make_fake_run, played_rows
from verl.protocol import DataProto
from verl.trainer.ppo import ray_trainer


def weighed_rows() -> DataProto:
    batch = played_rows()
    batch.batch["row_shares"] = torch.ones(ROWS)
    return batch


def test_a_trainer_starts_with_nothing_under_way():
    trainer, _, _ = make_fake_run()
    assert trainer.collector_state == {} and trainer.prefetched is None
    assert trainer.has_new_weights is False and trainer.uses_overlap is False


def test_the_configuration_says_whether_plays_overlap():
    trainer, _, _ = make_fake_run(overlap="one_step")
    assert trainer.uses_overlap is True


def test_the_trainer_asks_for_changed_weights_after_an_update_and_only_then():
    trainer, calls, _ = make_fake_run()
    actor: Any = trainer.workers.actor_group
    metrics = {"actor/optimizer_steps": 1.0, "actor/lr": 0.1}
    actor.update_actor = lambda _: DataProto(meta_info={"metrics": metrics})
    trainer.sync_weights()
    trainer.global_step = 1
    trainer.update_actor(played_rows())
    trainer.sync_weights()
    trainer.sync_weights()
    assert calls == [("sync", 0), ("sync", 1, "updated"), ("sync", 1)]
    assert trainer.has_new_weights is False


def test_updates_are_sharded_by_role_and_step(monkeypatch):
    sharded = []

    def shard(batch, config, role, step, ranks):
        sharded.append((config, role, step, ranks))
        return batch

    monkeypatch.setattr(ray_trainer, "shard_minibatches", shard)
    trainer, _, _ = make_fake_run(with_critic=True)
    trainer.global_step = 3
    trainer.update_critic(weighed_rows())
    trainer.update_actor(weighed_rows())
    assert sharded == [(trainer.config, "critic", 3, 1), (trainer.config, "actor", 3, 1)]


def test_playing_keeps_what_was_measured_before():
    trainer, _, _ = make_fake_run()
    trainer.global_step = 1
    trainer.metrics = {"val/success_rate": 0.5}
    trainer.collect()
    assert trainer.metrics["val/success_rate"] == 0.5
    assert trainer.metrics["rollout/aborted"] == 0.0


def test_greedy_trajectories_are_added_to_the_rows_of_the_same_tasks(monkeypatch):
    trainer, _, _ = make_fake_run()
    trainer.config.algorithm.adv_estimator = "remax"
    asked = []

    def compare(*arguments):
        asked.append(arguments)
        return arguments[1]

    monkeypatch.setattr(trainer, "add_baselines", compare)
    batch = trainer.generate_rows(1)
    ((tasks, rows),) = asked
    assert tasks.meta_info["tasks asked for"] == 2 and rows is batch
