"""Calls of the trainer to other parts, and its state between the methods that make a step."""

from typing import Any

import torch

from tests.helpers.trainer_fakes import ROWS, make_fake_run, make_trainer_rows
from verl.protocol import DataProto
from verl.trainer.ppo import ray_trainer


def rows_with_shares() -> DataProto:
    batch = make_trainer_rows()
    batch.batch["row_shares"] = torch.ones(ROWS)
    return batch


def test_new_trainer_has_nothing_in_flight():
    trainer, _, _ = make_fake_run()
    assert trainer.collector_state == {} and trainer.prefetched_batch is None
    assert trainer.has_new_weights is False and trainer.uses_overlap is False


def test_configuration_decides_overlap():
    trainer, _, _ = make_fake_run(overlap="one_step")
    assert trainer.uses_overlap is True


def test_changed_weights_are_requested_only_after_an_update():
    trainer, calls, _ = make_fake_run()
    actor: Any = trainer.workers.actor_group
    metrics = {"actor/optimizer_steps": 1.0, "actor/lr": 0.1}
    actor.update_actor = lambda _: DataProto(meta_info={"metrics": metrics})
    trainer.sync_weights()
    trainer.global_step = 1
    trainer.update_actor(make_trainer_rows())
    trainer.sync_weights()
    trainer.sync_weights()
    assert calls == [("sync", 0), ("sync", 1, "updated"), ("sync", 1)]
    assert trainer.has_new_weights is False


def test_updates_are_sharded_by_role_and_step(monkeypatch):
    sharded = []

    def shard(batch, config, role, step, ranks, forward_settings):
        sharded.append((config, role, step, ranks, forward_settings.prefix_tree))
        return batch

    monkeypatch.setattr(ray_trainer, "shard_minibatches", shard)
    trainer, _, _ = make_fake_run(with_critic=True)
    trainer.global_step = 3
    trainer.update_critic(rows_with_shares())
    trainer.update_actor(rows_with_shares())
    assert sharded == [
        (trainer.config, "critic", 3, 1, False),
        (trainer.config, "actor", 3, 1, "auto"),
    ]


def test_collect_keeps_earlier_metrics():
    trainer, _, _ = make_fake_run()
    trainer.global_step = 1
    trainer.metrics = {"val/success_rate": 0.5}
    trainer.collect()
    assert trainer.metrics["val/success_rate"] == 0.5
    assert trainer.metrics["rollout/aborted"] == 0.0


def test_greedy_baselines_are_added_for_the_same_tasks(monkeypatch):
    trainer, _, _ = make_fake_run()
    trainer.config.algorithm.adv_estimator = "remax"
    baseline_calls = []

    def compare(*arguments):
        baseline_calls.append(arguments)
        return arguments[1]

    monkeypatch.setattr(trainer, "add_baselines", compare)
    batch = trainer.generate_rows(1)
    ((tasks, rows),) = baseline_calls
    assert tasks.meta_info["tasks asked for"] == 2 and rows is batch
