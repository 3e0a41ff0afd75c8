"""The recipe on a scripted engine: what a step adds to the batch, what it asks of whom, and in
which order.
"""

import logging
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from agent_system.environments.manager import EnvironmentManagerBase, make_envs
from agent_system.multi_turn_rollout import TrajectoryCollector
from agent_system.reward_manager import load_reward_manager
from tests.helpers.play import make_config, make_world, walk
from tests.helpers.tiny_model import make_tiny_tokenizer
from tests.helpers.trainer_fakes import (
    Checkpoints,
    Group,
    Journal,
    Workers,
    make_fake_run,
    played_rows,
)
from verl.algos import AdaptiveKLController, get_adv_estimator_fn, missing_inputs
from verl.protocol import DataProto, object_array
from verl.trainer.config.registered_names import COLUMNS, batch_columns
from verl.trainer.ppo import resources
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, apply_kl_penalty
from verl.utils.torch_functional import last_selected


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


class Run(NamedTuple):
    """A trainer on a scripted engine, and two of those it was handed."""

    trainer: RayPPOTrainer[EnvironmentManagerBase]
    workers: Workers
    collector: TrajectoryCollector

    def scored(self) -> DataProto:
        """The batch of one step up to its rewards."""
        trainer = self.trainer
        trainer.global_step += 1
        try:
            return trainer.reward(trainer.evaluate(trainer.collect()))
        finally:
            self.collector.close()

    def credited(self) -> DataProto:
        """The batch of one step up to its advantages."""
        return self.trainer.credit(self.scored())


def make_run(tokenizer, config, script=None) -> Run:
    group, envs, _ = make_world(tokenizer, config, script)
    workers = Workers(group.rollout_workers)
    collector = TrajectoryCollector(config, tokenizer)
    trainer = RayPPOTrainer(
        config=config,
        workers=workers,
        collector=collector,
        envs=envs,
        val_envs=make_envs(config)[1],
        reward_fn=load_reward_manager(config),
        journal=Journal(workers.calls),
        checkpoints=Checkpoints(),
    )
    return Run(trainer, workers, collector)


def test_every_column_that_checks_promise_is_there_when_the_estimator_runs(tokenizer):
    config = make_config(n=2)
    config.data.train_batch_size = 2
    batch = make_run(tokenizer, config).scored()
    assert set(COLUMNS) <= set(batch.keys())
    there = {column for column, how in batch_columns(config).items() if not how}
    assert there == {"reward_baselines"}, "the others need a critic, a reference or thinking credit"


def test_an_epoch_of_training_plays_every_task_once(tokenizer, monkeypatch):
    config = make_config(n=1)
    trainer, _, collector = make_run(tokenizer, config)
    tasks = len(trainer.envs.tasks)
    config.data.train_batch_size = tasks // 3
    asked = []

    def write_down(batch: DataProto, *_: object, **__: object) -> DataProto:
        asked.extend(batch.non_tensor_batch["task_id"])
        return batch

    monkeypatch.setattr(collector, "multi_turn_loop", write_down)
    monkeypatch.setattr(trainer, "balance", lambda batch: batch)
    for _ in range(3):
        trainer.global_step += 1
        trainer.collect()
    assert len(set(asked)) == len(asked) == 3 * (tasks // 3)


def kl_rows(cut: bool) -> DataProto:
    """An episode of four sampled tokens as one row, or as two rows of two."""
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]) if cut else torch.ones(1, 4, dtype=torch.long)
    divergence = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).expand(len(mask), 4)
    scores = torch.zeros(mask.shape).index_put(
        (torch.arange(len(mask)), last_selected(mask)[1]), torch.tensor(1.0)
    )
    tensors = {"response_mask": mask, "token_level_scores": scores}
    tensors |= {"old_log_probs": divergence * mask, "ref_log_prob": torch.zeros(mask.shape)}
    return DataProto.from_dict(tensors, {"traj_uid": object_array(["a"] * len(mask))})


def test_the_kl_in_the_reward_does_not_depend_on_how_an_episode_is_cut():
    rewards = {}
    for cut in (False, True):
        controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=10)
        data, _ = apply_kl_penalty(kl_rows(cut), controller)
        rewards[cut] = data.batch["token_level_rewards"]
        assert controller.value == pytest.approx(0.1 * (1 + 0.2 / 10))  # one episode
    assert rewards[False].sum(-1).tolist() == pytest.approx([0.9])
    assert rewards[True].sum(-1).tolist() == pytest.approx([0.9, 0.9])
    assert rewards[False][0].tolist() == pytest.approx([-0.01, -0.02, -0.03, 0.96])
    assert rewards[True][0].tolist() == pytest.approx([-0.01, 1 - 0.02 - 0.07, 0, 0])


def test_remax_compares_with_a_greedy_play_of_the_same_task(tokenizer):
    """Sampled plays of the policy walk off and lose; greedy ones reach the target."""

    def script(request, prompt: str) -> str:
        return f"<action>{walk(prompt) if request.temperature == 0 else 'stay'}</action>"

    config = make_config(n=2)
    config.data.train_batch_size = 3
    config.algorithm.adv_estimator = "remax"
    run = make_run(tokenizer, config, script)
    batch = run.credited()
    assert len(batch) == 6 and batch.batch["reward_baselines"].tolist() == [1.0] * 6
    assert run.trainer.metrics["episode/greedy_reward"] == 1.0
    sampled = batch.batch["response_mask"].bool()
    assert (batch.batch["advantages"][sampled] == -1.0).all()
    assert missing_inputs(get_adv_estimator_fn("remax"), set(batch.keys())) == []


def test_engines_sleep_from_the_last_play_to_the_new_weights(tokenizer):
    config = make_config(n=2)
    config.data.train_batch_size = 2
    run = make_run(tokenizer, config)
    run.trainer.sync_weights()
    run.credited()
    run.trainer.sync_weights()
    assert run.workers.calls == [("sync", 0), "metrics", "sleep", ("sync", 1)]


def test_engines_are_woken_before_they_get_weights(monkeypatch):
    called = []

    class Method:
        def __init__(self, name: str) -> None:
            self.name = name

        def remote(self, *args) -> str:
            called.append((self.name, *args))
            return self.name

    class Engine:
        def __getattr__(self, name: str) -> Method:
            return Method(name)

    class Actor(Group):
        def call_refs(self, method: str, /) -> list[str]:
            return [f"{method} of rank 0", f"{method} of rank 1"]

    monkeypatch.setattr(resources, "gather", lambda refs, *_: list(refs))
    workers = resources.TrainingWorkers(Actor([], "actor"), [Engine(), Engine()])
    weights = "export_weights of rank 0"
    workers.sync_weights(3)
    assert called == [("update_weights", weights, 3)] * 2
    called.clear()
    workers.sleep_engines()
    workers.sync_weights(4)
    assert called == [("sleep",)] * 2 + [("wake",)] * 2 + [("update_weights", weights, 4)] * 2


# ---------------------------------------------------------------- the run around the steps


def test_one_step_asks_for_everything_in_this_order():
    trainer, calls, journal = make_fake_run(steps=1, with_critic=True)
    trainer.fit()
    assert calls == [
        ("open", None, 1),
        ("sync", 0),
        ("play", 1),
        "metrics",
        "sleep",
        "values",
        "update_critic",
        "update_actor",
        ("sync", 1),
        ("rollouts", 1),
        ("log", 1),
        "finish",
    ]
    metrics = journal.metrics[1]
    assert metrics["training/global_step"] == 1.0 and metrics["training/epoch"] == 0.0
    assert metrics["actor/loss"] == metrics["critic/loss"] == 1.5 and metrics["lr"] == 0.5
    assert metrics["timing_s/env"] == 1.0 and metrics["rollout/aborted"] == 0.0
    timed = {"step", "gen", "sleep", "values", "reward", "adv", "update_critic", "update_actor"}
    assert {f"timing_s/{name}" for name in timed} <= set(metrics)


@pytest.mark.parametrize(("warmup", "moved_at"), [(0, [1, 2, 3]), (1, [2, 3]), (2, [3]), (3, [])])
def test_the_actor_moves_once_the_critic_has_had_its_warmup(warmup, moved_at):
    trainer, calls, _ = make_fake_run(steps=3, with_critic=True)
    trainer.config.trainer.critic_warmup = warmup
    trainer.fit()
    updates = [call for call in calls if call in ("update_critic", "update_actor")]
    expected = []
    for step in (1, 2, 3):
        expected += ["update_critic"] + ["update_actor"] * (step in moved_at)
    assert updates == expected


@pytest.mark.parametrize(
    ("row_weight", "shares"),
    [("row", [1, 1, 1, 1]), ("trajectory", [3 / 4, 1 / 4, 2 / 5, 3 / 5])],
)
def test_both_updates_know_what_part_of_a_sequence_a_row_is(row_weight, shares):
    """Rows of 3 and 1, and of 2 and 3 sampled tokens make up two trajectories."""
    trainer, *_ = make_fake_run(with_critic=True)
    trainer.config.algorithm.row_weight = row_weight
    trainer.global_step = 1
    batch = played_rows()
    trainer.weigh(batch)
    trainer.update_critic(batch)
    trainer.update_actor(batch)
    actor = trainer.workers.actor
    critic = trainer.workers.critic
    assert isinstance(actor, Group) and isinstance(critic, Group)
    assert critic.shares == actor.shares == pytest.approx(shares)


def test_without_a_critic_nothing_of_it_is_done():
    trainer, calls, journal = make_fake_run(steps=1)
    trainer.fit()
    assert "update_critic" not in calls and "values" not in calls
    assert not [name for name in journal.metrics[1] if name.startswith("critic/loss")]


def test_a_policy_is_measured_before_its_first_step_only_where_asked():
    trainer, calls, journal = make_fake_run(steps=1)
    trainer.config.trainer.val_before_train = True
    trainer.begin()
    assert calls == [
        ("open", None, 1),
        ("sync", 0),
        ("panel", 0),
        ("panel rollouts", 0),
        ("log", 0),
    ]
    assert journal.metrics[0]["val/success_rate"] == 0.5 and journal.metrics[0]["val/tasks"] == 2


def test_a_measurement_alone_trains_nothing():
    trainer, calls, _ = make_fake_run(steps=3)
    trainer.config.trainer.val_only = True
    trainer.fit()
    assert [call for call in calls if call == "update_actor" or call[0] == "play"] == []
    assert calls[-2:] == [("log", 0), "finish"]


def resumable(**state) -> Checkpoints:
    known = {"global_step": 2, "kl_coef": 0.7, "panel": "panel of today"}
    return Checkpoints(Path("global_step_2"), known | state)


def test_a_run_continues_where_its_newest_checkpoint_was_written():
    trainer, calls, journal = make_fake_run(resumable(), steps=3)
    trainer.config.trainer.val_before_train = True
    trainer.fit()
    assert calls[:3] == [("load", Path("global_step_2")), ("open", 2, 3), ("sync", 2)]
    assert calls[3] == ("play", 3), "the policy has been measured by the run that is continued"
    assert list(journal.metrics) == [3]


@pytest.mark.parametrize(("kind", "value"), [("adaptive", 0.7), ("fixed", 0.001)])
def test_only_a_coefficient_that_adapts_is_restored(kind, value):
    trainer, *_ = make_fake_run(resumable())
    trainer.config.algorithm.kl_ctrl.type = kind
    trainer.kl_ctrl.value = 0.001
    assert trainer.resume() is True
    assert trainer.kl_ctrl.value == value and trainer.global_step == 2


@pytest.mark.parametrize(
    ("state", "warned"), [({}, False), ({"panel": "another"}, True), ({"panel": None}, True)]
)
def test_another_panel_than_the_checkpoints_is_named(state, warned, caplog):
    trainer, *_ = make_fake_run(resumable(**state))
    with caplog.at_level(logging.WARNING):
        trainer.resume()
    assert ("the validation panel is not the one of global_step_2" in caplog.text) is warned


def test_where_a_run_continues_from(tmp_path):
    trainer, *_ = make_fake_run(resumable())
    settings = trainer.config.trainer
    assert trainer.find_checkpoint() == Path("global_step_2")
    settings.resume_mode = "disable"
    assert trainer.find_checkpoint() is None and trainer.resume() is False
    settings.resume_mode = "resume_path"
    settings.resume_from_path = str(tmp_path / "global_step_9")
    assert trainer.find_checkpoint() == tmp_path / "global_step_9"
    settings.resume_from_path = None
    with pytest.raises(ValueError, match="resume_from_path"):
        trainer.find_checkpoint()


def test_validating_and_saving_keep_their_rhythm_and_end_with_the_run():
    trainer, calls, journal = make_fake_run(steps=5)
    trainer.config.trainer.test_freq = 2
    trainer.config.trainer.save_freq = 3
    trainer.fit()
    assert [call[1] for call in calls if call[0] == "panel"] == [2, 4, 5]
    saved = [call[1] for call in calls if call[0] == "save"]
    assert saved == [Path("global_step_3"), Path("global_step_5")]
    assert [step for step, found in journal.metrics.items() if "val/tasks" in found] == [2, 4, 5]
    # ten tasks, two a step
    epochs = [found["training/epoch"] for found in journal.metrics.values()]
    assert epochs == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])


def test_a_step_is_on_record_before_its_checkpoint():
    checkpoints = Checkpoints()
    trainer, calls, _ = make_fake_run(checkpoints, steps=1)
    trainer.config.trainer.test_freq = 1
    trainer.config.trainer.save_freq = 1
    trainer.fit()
    after = calls[calls.index(("rollouts", 1)) :]
    assert after == [
        ("rollouts", 1),
        ("panel", 1),
        ("panel rollouts", 1),
        ("log", 1),
        ("save", Path("global_step_1")),
        "finish",
    ]
    kl_coef = trainer.kl_ctrl.value
    assert checkpoints.state == {"global_step": 1, "kl_coef": kl_coef, "panel": "panel of today"}


def test_metrics_are_handed_over_once():
    trainer, *_ = make_fake_run()
    trainer.global_step = 7
    trainer.metrics = {"a": 1.0}
    with trainer.clock.measure("step"):
        pass
    drained = trainer.drain_metrics()
    assert set(drained) == {"a", "timing_s/step", "training/global_step"} and drained["a"] == 1.0
    assert trainer.drain_metrics() == {"training/global_step": 7.0}
