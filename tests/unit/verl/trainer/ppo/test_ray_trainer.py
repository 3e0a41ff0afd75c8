"""The trainer with a scripted engine: columns added by a step, and the order of calls."""

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from agent_system.environments.manager import EnvironmentManagerBase, make_envs
from agent_system.multi_turn_rollout import TrajectoryCollector
from agent_system.reward_manager import load_reward_manager
from tests.helpers.number_line_world import make_config, make_world, walk
from tests.helpers.refusals import has_problem, list_logged, mentions
from tests.helpers.tiny_model import make_tiny_tokenizer
from tests.helpers.trainer_fakes import (
    Checkpoints,
    Collector,
    Group,
    Journal,
    Workers,
    make_fake_run,
    make_trainer_rows,
)
from verl.algos import (
    AdaptiveKLController,
    FixedKLController,
    PriceController,
    find_missing_inputs,
    get_adv_estimator_fn,
)
from verl.algos.algorithm_registry import RegisteredEstimator
from verl.config.registered_names import UNCONDITIONAL_COLUMNS, map_columns_to_overrides
from verl.config.settings import ConfigError
from verl.protocol import DataProto, object_array
from verl.records import CORRECTION_WEIGHTS, PRICE_MULTIPLIER, WeightFingerprints
from verl.single_controller.ray import RayClassWithInitArgs
from verl.trainer.ppo import credit, ray_trainer, resources
from verl.trainer.ppo.interfaces import RolloutWorkerHandles
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, apply_kl_penalty, compute_advantage
from verl.trainer.ppo.resources import WeightSyncError
from verl.utils import seqlen_balancing
from verl.utils.checkpoint import choose_checkpoint
from verl.utils.torch_functional import find_last_nonzero
from verl.workers import weight_transfer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


class Run(NamedTuple):
    """A trainer with a scripted engine, its workers and its collector."""

    trainer: RayPPOTrainer[EnvironmentManagerBase]
    workers: Workers
    collector: TrajectoryCollector

    def batch_with_rewards(self) -> DataProto:
        """Return the batch of one step with rewards."""
        trainer = self.trainer
        trainer.global_step += 1
        try:
            batch = trainer.score(trainer.collect())
            return trainer.compute_rewards(trainer.compute_log_probs_and_values(batch))
        finally:
            self.collector.close()

    def batch_with_advantages(self) -> DataProto:
        """Return the batch of one step with advantages."""
        return self.trainer.compute_advantages(self.batch_with_rewards())


def make_run(tokenizer, config, script=None) -> Run:
    group, envs, _ = make_world(tokenizer, config, script)
    workers: Any = Workers(group.rollout_workers)
    journal: Any = Journal(workers.calls)
    checkpoints: Any = Checkpoints()
    collector = TrajectoryCollector(config, tokenizer)
    trainer = RayPPOTrainer(
        config=config,
        workers=workers,
        collector=collector,
        envs=envs,
        val_envs=make_envs(config)[1],
        reward_fn=load_reward_manager(config),
        journal=journal,
        checkpoints=checkpoints,
    )
    return Run(trainer, workers, collector)


def test_promised_columns_exist_before_the_estimator_runs(tokenizer):
    config = make_config(n=2)
    config.data.train_batch_size = 2
    batch = make_run(tokenizer, config).batch_with_rewards()
    assert set(UNCONDITIONAL_COLUMNS) <= set(batch.keys())
    absent = {column for column, how in map_columns_to_overrides(config).items() if not how}
    assert absent == {"entropys", "reward_baselines"}, (
        "the others need a critic, a reference or the thinking advantage"
    )


@pytest.mark.parametrize("history", ["append", "window"])
def test_estimators_get_their_columns_and_settings(tokenizer, history, tmp_path):
    """Run every estimator of several rewards or graphs on the rewards of one step."""
    (tmp_path / "parts.py").write_text(
        "def two(data_source, steps, extra_info):\n"
        "    return {'score': extra_info['episode_reward'], 'steps': -float(len(steps))}\n"
    )
    config = make_config(n=2, history=history)
    config.data.train_batch_size = 2
    config.custom_reward_function.path = str(tmp_path / "parts.py")
    config.custom_reward_function.name = "two"
    config.algorithm.gdpo_reward_keys = ["score", "steps"]
    batch = make_run(tokenizer, config).batch_with_rewards()
    for name in ("grpo_passk", "gdpo", "graphgpo", "hgpo"):
        config.algorithm.adv_estimator = name
        advantages = compute_advantage(batch, config).batch["advantages"]
        assert advantages.isfinite().all()
        assert not advantages[batch.batch["response_mask"] == 0].any()


def test_trainer_module_exports_names_of_job_code():
    names = {"RayPPOTrainer", "ResourcePoolManager", "Role", "apply_kl_penalty"}
    assert set(ray_trainer.__all__) == names | {"compute_advantage"}
    assert all(hasattr(ray_trainer, name) for name in names)


def test_epoch_of_training_uses_every_task_once(tokenizer, monkeypatch):
    config = make_config(n=1)
    trainer, _, collector = make_run(tokenizer, config)
    tasks = len(trainer.envs.task_list)
    config.data.train_batch_size = tasks // 3
    task_ids = []

    def record_tasks(batch: DataProto, *_: object, **__: object) -> DataProto:
        task_ids.extend(batch.non_tensor_batch["task_id"])
        return batch

    monkeypatch.setattr(collector, "multi_turn_loop", record_tasks)
    for _ in range(3):
        trainer.global_step += 1
        trainer.collect()
    assert len(set(task_ids)) == len(task_ids) == 3 * (tasks // 3)


def kl_rows(split: bool) -> DataProto:
    """Return an episode of four sampled tokens as one row, or as two rows of two."""
    mask = (
        torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]) if split else torch.ones(1, 4, dtype=torch.long)
    )
    divergence = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).expand(len(mask), 4)
    scores = torch.zeros(mask.shape).index_put(
        (torch.arange(len(mask)), find_last_nonzero(mask)[1]), torch.tensor(1.0)
    )
    tensors = {"response_mask": mask, "token_level_scores": scores}
    tensors |= {"old_log_probs": divergence * mask, "ref_log_prob": torch.zeros(mask.shape)}
    return DataProto.from_dict(tensors, {"traj_uid": object_array(["a"] * len(mask))})


def test_kl_in_reward_does_not_depend_on_the_rows_of_an_episode():
    rewards = {}
    for split in (False, True):
        controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=10)
        data, _ = apply_kl_penalty(kl_rows(split), controller)
        rewards[split] = data.batch["token_level_rewards"]
        assert controller.value == pytest.approx(0.1 * (1 + 0.2 / 10))  # one episode
    assert rewards[False].sum(-1).tolist() == pytest.approx([0.9])
    assert rewards[True].sum(-1).tolist() == pytest.approx([0.9, 0.9])
    assert rewards[False][0].tolist() == pytest.approx([-0.01, -0.02, -0.03, 0.96])
    assert rewards[True][0].tolist() == pytest.approx([-0.01, 1 - 0.02 - 0.07, 0, 0])


def test_kl_is_reported_per_token_with_the_coefficient_in_use():
    """Rows of one, two and no sampled tokens. The reference differs by 0.2, and by 0.1 twice."""
    mask = torch.tensor([[1, 0], [1, 1], [0, 0]])
    old = torch.tensor([[0.2, 9.0], [0.1, 0.1], [9.0, 9.0]])
    tensors = {"response_mask": mask, "token_level_scores": torch.zeros(3, 2)}
    tensors |= {"old_log_probs": old, "ref_log_prob": torch.zeros(3, 2)}
    data = DataProto.from_dict(tensors, {"traj_uid": object_array(["a", "b", "c"])})
    controller = AdaptiveKLController(0.5, target_kl=0.01, horizon=10)
    _, metrics = apply_kl_penalty(data, controller)
    assert metrics == {
        "actor/reward_kl_penalty": pytest.approx((0.2 + 0.1 + 0.0) / 3),
        "actor/reward_kl_penalty_coeff": 0.5,
    }
    # The change is limited to 0.2 times the samples over the horizon: three episodes of ten.
    assert controller.value == pytest.approx(0.5 * (1 + 0.2 * 3 / 10))
    apply_kl_penalty(data, FixedKLController(0.5), "mse")
    rewards = data.batch["token_level_rewards"].tolist()
    assert rewards[0] == pytest.approx([-0.5 * 0.2**2 / 2, 0])
    assert rewards[1] == pytest.approx([-0.5 * 0.1**2 / 2] * 2)
    assert rewards[2] == [0, 0]


def replace_estimators(monkeypatch, **inputs: str) -> list[dict[str, object]]:
    """Replace every estimator by one that reads ``inputs``. Return the arguments of its two
    functions."""
    received: list[dict[str, object]] = []

    def estimate(**arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        received.append(arguments)
        return torch.ones(4, 3), torch.full((4, 3), 2.0)

    def measure(
        advantages: torch.Tensor, returns: torch.Tensor, **arguments: object
    ) -> dict[str, float]:
        received.append(arguments)
        return {"advantage": advantages.mean().item(), "return": returns.mean().item()}

    params = {"discount": "algorithm.gamma"}
    estimator = RegisteredEstimator(estimate, inputs, params, measure, compares_group=False)
    monkeypatch.setattr(credit, "get_adv_estimator_fn", lambda _: estimator)
    return received


def test_estimator_receives_what_it_declares(monkeypatch):
    config = make_config()
    config.algorithm.gamma = 0.75
    received = replace_estimators(
        monkeypatch, mask="response_mask?", group="uid", other="values?", index="traj_uid"
    )
    data = compute_advantage(make_trainer_rows({"metrics": {"before": 1.0}}), config)
    assert [sorted(arguments) for arguments in received] == [
        ["discount", "group", "index", "mask"],
        ["group", "index", "mask"],
    ]
    assert received[0]["discount"] == 0.75
    assert received[0]["group"] is data.non_tensor_batch["uid"]
    assert received[0]["mask"] is data.batch["response_mask"]
    assert data.batch["advantages"].sum() == 12 and data.batch["returns"].sum() == 24
    assert data.meta_info["metrics"] == {"before": 1.0, "advantage": 1.0, "return": 2.0}
    fresh = compute_advantage(make_trainer_rows(), config)
    assert fresh.meta_info["metrics"] == {"advantage": 1.0, "return": 2.0}


def test_estimator_metrics_are_added_to_the_step(monkeypatch):
    trainer, *_ = make_fake_run()
    replace_estimators(monkeypatch, mask="response_mask")
    batch = trainer.compute_advantages(trainer.compute_rewards(trainer.score(make_trainer_rows())))
    assert trainer.metrics["advantage"] == 1.0 and trainer.metrics["return"] == 2.0
    assert "metrics" not in batch.meta_info


def test_estimator_without_its_columns_is_refused(monkeypatch):
    config = make_config()
    received = replace_estimators(monkeypatch, mask="response_mask", value="values")
    with pytest.raises(KeyError, check=mentions("'gigpo'", "['values']")):
        config.algorithm.adv_estimator = "gigpo"
        compute_advantage(make_trainer_rows(), config)
    assert received == []


def test_remax_compares_with_a_greedy_trajectory_of_the_task(tokenizer):
    """Sampled trajectories have no success; greedy ones reach the target."""

    def script(request, prompt: str) -> str:
        return f"<action>{walk(prompt) if request.temperature == 0 else 'stay'}</action>"

    config = make_config(n=2)
    config.data.train_batch_size = 3
    config.algorithm.adv_estimator = "remax"
    run = make_run(tokenizer, config, script)
    batch = run.batch_with_advantages()
    assert len(batch) == 6 and batch.batch["reward_baselines"].tolist() == [1.0] * 6
    assert run.trainer.metrics["episode/greedy_reward"] == 1.0
    sampled = batch.batch["response_mask"].bool()
    assert (batch.batch["advantages"][sampled] == -1.0).all()
    assert find_missing_inputs(get_adv_estimator_fn("remax"), set(batch.keys())) == []


def test_engines_sleep_between_rollout_and_weight_sync():
    trainer, calls, _ = make_fake_run(steps=1)
    trainer.fit()
    engine_events = [
        call for call in calls if call in ("sleep", "wake") or call[0] in ("play", "sync")
    ]
    assert engine_events == ["wake", ("sync", 0), ("play", 1), "sleep", "wake", ("sync", 1)]


def test_engines_are_woken_before_weights_are_sent(monkeypatch):
    engine_calls_made = []

    class Method:
        def __init__(self, name: str) -> None:
            self.name = name

        def remote(self, *args) -> str:
            engine_calls_made.append((self.name, *args))
            return self.name

    class Engine:
        def __getattr__(self, name: str) -> Method:
            return Method(name)

    class Actor(Group):
        def call_for_refs(self, method: str, /, *_: object) -> list[str]:
            return [f"{method} of rank 0", f"{method} of rank 1"]

    fingerprints = WeightFingerprints({"w": 2}, {"w": 1})
    answers = {"update_weights": {"w": 1}, "get_sent_fingerprints of rank 0": fingerprints}
    for module in (resources, weight_transfer):
        monkeypatch.setattr(
            module, "gather_results", lambda refs, *_: [answers.get(r, r) for r in refs]
        )
    workers = resources.TrainingWorkers(Actor([], "actor"), [Engine(), Engine()])
    weights = "export_weights of rank 0"
    workers.sync_weights(3)
    assert engine_calls_made == [("update_weights", weights, 3)] * 2
    engine_calls_made.clear()
    workers.sleep_engines()
    workers.sleep_engines()  # no effect: they sleep already
    workers.wake_engines()
    workers.sync_weights(4)
    assert engine_calls_made == [
        *[("sleep", 2)] * 2,
        *[("wake", "weights")] * 2,
        *[("update_weights", weights, 4)] * 2,
        *[("wake", "kv_cache")] * 2,
    ]
    engine_calls_made.clear()
    workers.sync_weights(5)
    assert engine_calls_made == [("update_weights", weights, 5)] * 2, "no second wake call"


def test_base_weights_of_adapters_are_sent_once_and_kept_while_engines_sleep(monkeypatch):
    calls = []
    adapter, checksums = {"a": 1.0}, {"w": 1}

    class Engine:
        def __getattr__(self, name: str) -> Any:
            remote = lambda *args: calls.append((name, *args)) or checksums  # noqa: E731
            return SimpleNamespace(remote=remote)

    class Actor(Group):
        def call_for_refs(self, method: str, /, *args: object) -> list[Any]:
            answers = {
                "send_weights": [[checksums]],
                "export_adapter": [adapter],
                "get_sent_fingerprints": [WeightFingerprints(checksums, checksums, num_bytes=5)],
            }
            calls.append((method, *args))
            return answers[method]

    for module in (resources, weight_transfer):
        monkeypatch.setattr(module, "gather_results", lambda refs, *_: list(refs))
    engine = Engine()
    workers = resources.TrainingWorkers(
        Actor([], "actor"), [engine], weight_transfer="nccl", sends_adapter=True
    )
    sent = []
    for version in (0, 1):
        workers.sleep_engines()
        workers.wake_engines()
        sent.append(workers.sync_weights(version)["perf/weight_sync_bytes"])
    wake, sleep = ("wake", "weights"), ("sleep", 1)
    check, caches = ("get_sent_fingerprints",), ("wake", "kv_cache")
    loads = [[("export_adapter",), ("load_adapter", adapter, v), check, caches] for v in (0, 1)]
    first = [sleep, wake, ("send_weights", [engine], 0), check, *loads[0]]
    assert calls == [*first, sleep, wake, *loads[1]]
    assert sent == [10.0, 5.0]


def test_device_weights_are_sent_after_weight_memory_before_caches(monkeypatch):
    calls = []

    class Engine:
        def __getattr__(self, name: str) -> Any:
            remote = lambda *args: calls.append((name, *args))  # noqa: E731
            return SimpleNamespace(remote=remote)

    class Actor(Group):
        def call_for_refs(self, method: str, /, *args: object) -> list[Any]:
            calls.append((method, *args))
            answers = {
                "send_weights": [[{"w": 1}], []],
                "get_sent_fingerprints": [fingerprints, None],
            }
            return answers[method]

    fingerprints = WeightFingerprints({"w": 2}, {"w": 1})
    for module in (resources, weight_transfer):
        monkeypatch.setattr(module, "gather_results", lambda refs, *_: list(refs))
    engine = Engine()
    workers = resources.TrainingWorkers(Actor([], "actor"), [engine], weight_transfer="ipc")
    workers.sleep_engines()
    workers.wake_engines()
    workers.sync_weights(4)
    assert calls == [
        ("sleep", 2),
        ("wake", "weights"),
        ("send_weights", [engine], 4),
        ("get_sent_fingerprints",),
        ("wake", "kv_cache"),
    ]
    fingerprints = WeightFingerprints({"w": 2}, {"w": 7})
    with pytest.raises(WeightSyncError, check=mentions("worker 0", "version 5")):
        workers.sync_weights(5)
    calls.clear()
    fingerprints = WeightFingerprints({"w": 2}, {"w": 1})
    separate = resources.TrainingWorkers(
        Actor([], "actor"), [engine], weight_transfer="nccl", engines_sleep=False
    )
    separate.sleep_engines()
    separate.wake_engines()
    separate.sync_weights(6)
    assert calls == [("send_weights", [engine], 6), ("get_sent_fingerprints",)], (
        "engines with separate GPUs stay awake"
    )


def test_groups_load_one_after_another(monkeypatch):
    """Rank 0 of each group holds a whole model while it loads."""
    calls: list[tuple[str, str]] = []

    class Loading(Group):
        def submit(self, method: str, *_, **__) -> "Loading":
            calls.append((method, self.name))
            return self

        def get(self) -> None:
            calls.append(("loaded", self.name))

    monkeypatch.setattr(
        resources, "RayWorkerGroup", lambda pool, spec, name_prefix: Loading([], name_prefix)
    )
    pool = resources.ResourcePoolManager({"all": [2]}, dict.fromkeys(resources.Role, "all"))
    pool.create_resource_pool()
    spec = RayClassWithInitArgs(object)
    workers = resources.TrainingWorkers.start(
        {resources.Role.Actor: spec, resources.Role.Critic: spec}, pool, []
    )
    assert calls == [
        ("init_model", "actor"),
        ("loaded", "actor"),
        ("init_model", "critic"),
        ("loaded", "critic"),
    ]
    assert workers.critic_group is not None and not workers.has_reference
    settings = (workers.actor_forward.prefix_tree, workers.critic_forward.prefix_tree)
    assert settings == ("auto", True), "each group reports those of its model"


# ---------------------------------------------------------------- the loop of a run


def test_one_step_makes_all_calls_in_order():
    trainer, calls, journal = make_fake_run(steps=1, with_critic=True)
    trainer.fit()
    assert calls == [
        ("open", None, 1),
        "wake",
        ("sync", 0),
        ("play", 1),
        "metrics",
        "sleep",
        "values",
        ("rollouts", 1),
        "update_critic",
        "update_actor",
        "wake",
        ("sync", 1),
        ("log", 1),
        "finish",
    ]
    metrics = journal.metrics[1]
    assert metrics["training/global_step"] == 1.0 and metrics["training/epoch"] == 0.0
    assert metrics["actor/loss"] == metrics["critic/loss"] == 1.5 and metrics["lr"] == 0.5
    assert metrics["timing_s/env"] == 1.0 and metrics["rollout/aborted"] == 0.0
    stages = {"step", "gen", "sleep", "values", "reward", "adv", "update_critic", "update_actor"}
    assert {f"timing_s/{name}" for name in stages} <= set(metrics)


@pytest.mark.parametrize(("warmup", "updated_at"), [(0, [1, 2, 3]), (1, [2, 3]), (2, [3]), (3, [])])
def test_actor_is_updated_after_the_critic_warmup(warmup, updated_at):
    trainer, calls, _ = make_fake_run(steps=3, with_critic=True)
    trainer.config.trainer.critic_warmup = warmup
    trainer.fit()
    updates = [call for call in calls if call in ("update_critic", "update_actor")]
    expected = []
    for step in (1, 2, 3):
        expected += ["update_critic"] + ["update_actor"] * (step in updated_at)
    assert updates == expected


@pytest.mark.parametrize(
    ("row_weight", "shares"),
    [("row", [1, 1, 1, 1]), ("trajectory", [3 / 4, 1 / 4, 2 / 5, 3 / 5])],
)
def test_both_updates_receive_the_share_of_each_row(row_weight, shares):
    """Rows of 3 and 1, and of 2 and 3 sampled tokens, form two trajectories."""
    trainer, *_ = make_fake_run(with_critic=True)
    trainer.config.algorithm.row_weight = row_weight
    trainer.global_step = 1
    batch = make_trainer_rows()
    trainer.add_row_shares(batch)
    trainer.update_critic(batch)
    trainer.update_actor(batch)
    actor = trainer.workers.actor_group
    critic = trainer.workers.critic_group
    assert isinstance(actor, Group) and isinstance(critic, Group)
    assert critic.shares == actor.shares == pytest.approx(shares)


def test_without_a_critic_none_of_its_stages_run():
    trainer, calls, journal = make_fake_run(steps=1)
    trainer.fit()
    assert "update_critic" not in calls and "values" not in calls
    assert not [name for name in journal.metrics[1] if name.startswith("critic/loss")]


def test_val_before_train_validates_before_the_first_step():
    trainer, calls, journal = make_fake_run(steps=1)
    trainer.config.trainer.val_before_train = True
    trainer.prepare_and_validate()
    assert calls == [
        ("open", None, 1),
        "wake",
        ("sync", 0),
        ("panel", 0),
        ("panel rollouts", 0),
        ("log", 0),
    ]
    assert journal.metrics[0]["val/success_rate"] == 0.5 and journal.metrics[0]["val/tasks"] == 2


def test_val_only_trains_nothing():
    trainer, calls, _ = make_fake_run(steps=3)
    trainer.config.trainer.val_only = True
    trainer.fit()
    assert [call for call in calls if call == "update_actor" or call[0] == "play"] == []
    assert calls[-2:] == [("log", 0), "finish"]


def resumable_checkpoints(**state) -> Checkpoints:
    saved = {"global_step": 2, "kl_coef": 0.7, "panel": "panel of today"}
    return Checkpoints(Path("global_step_2"), saved | state)


def test_run_continues_from_its_newest_checkpoint():
    trainer, calls, journal = make_fake_run(resumable_checkpoints(), steps=3)
    trainer.config.trainer.val_before_train = True
    trainer.fit()
    assert calls[:4] == [("load", Path("global_step_2")), ("open", 2, 3), "wake", ("sync", 2)]
    assert calls[4] == ("play", 3), "the continued run has validated the policy"
    assert list(journal.metrics) == [3] and not journal.keeps_later_steps


def test_checkpoints_are_set_aside_before_the_first_validation(monkeypatch):
    """A run that dies in this validation must not leave checkpoints without their records."""
    checkpoints = resumable_checkpoints()
    trainer, calls, _ = make_fake_run(checkpoints, steps=3)
    trainer.config.trainer.resume_mode = "disable"
    trainer.config.trainer.val_before_train = True
    monkeypatch.setattr(trainer, "validate", raise_engine_died)
    with pytest.raises(RuntimeError):
        trainer.fit()
    assert calls[0] == ("open", None, 3) and checkpoints.begun_at == 0


def raise_engine_died():
    raise RuntimeError("the engine has died")


def test_measuring_a_checkpoint_removes_no_records():
    checkpoints = resumable_checkpoints()
    trainer, calls, journal = make_fake_run(checkpoints, steps=3)
    trainer.config.trainer.val_only = True
    trainer.fit()
    assert ("open", 2, 3) in calls and journal.keeps_later_steps
    assert checkpoints.begun_at is None


def test_kl_coefficient_is_controlled_as_configured(tokenizer):
    config = make_config()
    config.algorithm.kl_ctrl.type = "adaptive"
    config.algorithm.kl_ctrl.kl_coef = 0.25
    config.algorithm.kl_ctrl.horizon = 50
    config.algorithm.kl_ctrl.target_kl = 2.0
    controller = make_run(tokenizer, config).trainer.kl_ctrl
    assert controller.value == 0.25
    # 10% over the target, for 10 of 50 steps.
    controller.update(current_kl=2.2, n_steps=10)
    assert controller.value == pytest.approx(0.25 * (1 + 0.1 * 10 / 50))


@pytest.mark.parametrize(("kind", "value"), [("adaptive", 0.7), ("fixed", 0.001)])
def test_only_an_adaptive_kl_coefficient_is_restored(kind, value):
    trainer, *_ = make_fake_run(resumable_checkpoints())
    trainer.config.algorithm.kl_ctrl.type = kind
    trainer.kl_ctrl.value = 0.001
    assert trainer.resume() is True
    assert trainer.kl_ctrl.value == value and trainer.global_step == 2


@pytest.mark.parametrize(
    ("state", "warned"), [({}, False), ({"panel": "another"}, True), ({"panel": None}, True)]
)
def test_other_validation_set_than_the_checkpoint_s_is_warned_of(state, warned, caplog):
    trainer, *_ = make_fake_run(resumable_checkpoints(**state))
    with caplog.at_level(logging.WARNING):
        trainer.resume()
    assert ("global_step_2" in caplog.text) is warned


@pytest.mark.parametrize(
    ("state", "key"),
    [
        *(({"global_step": value}, "global_step") for value in (None, "2", 2.0, -1, True, [2])),
        *(({"kl_coef": value}, "kl_coef") for value in (None, "0.7", -0.1, np.nan, np.inf, {})),
        *(({"price": value}, "price") for value in (None, [], 3)),
        *(({"price": {key: "high"}}, key) for key in ("multiplier", "average", "best")),
        *(({"collector": value}, "collector") for value in (None, ["under_way"], "x")),
    ],
)
def test_invalid_value_of_a_checkpoint_is_refused_before_its_weights_are_read(state, key):
    trainer, calls, _ = make_fake_run(resumable_checkpoints(**state))
    trainer.config.algorithm.kl_ctrl.type = "adaptive"
    expected = mentions("global_step_2/state.json: ", key, "; allowed: ", "; fix: ")
    with pytest.raises(ConfigError, check=expected):
        trainer.resume()
    assert calls == []


def test_invalid_engine_state_is_refused_before_the_workers_read_it(tmp_path):
    checkpoints = resumable_checkpoints()
    checkpoints.newest = tmp_path / "global_step_2"
    (checkpoints.newest / "actor").mkdir(parents=True)
    (checkpoints.newest / "actor" / "engine.json").write_text('{"format": 9}')
    trainer, calls, _ = make_fake_run(checkpoints)
    with pytest.raises(
        ConfigError, check=has_problem("altered_file", "", "global_step_2/actor", 9)
    ):
        trainer.resume()
    assert calls == []


@pytest.mark.parametrize("key", ["global_step", "kl_coef"])
def test_missing_value_of_a_checkpoint_is_refused(key):
    checkpoints = resumable_checkpoints()
    del checkpoints.state[key]
    trainer, *_ = make_fake_run(checkpoints)
    trainer.config.algorithm.kl_ctrl.type = "adaptive"
    with pytest.raises(ConfigError, check=has_problem("altered_file", "", "state.json", key)):
        trainer.resume()


@pytest.mark.parametrize(("steps", "is_complete"), [(1, True), (2, True), (3, False)])
def test_command_of_a_complete_run_says_that_nothing_is_left(steps, is_complete, caplog):
    trainer, *_ = make_fake_run(resumable_checkpoints(), steps=steps)
    trainer.fit()
    warnings = list_logged(caplog, RayPPOTrainer.__module__, "trainer.total_training_steps", 2)
    assert bool(warnings) is is_complete


def test_resume_mode_decides_the_checkpoint(tmp_path):
    trainer, *_ = make_fake_run(resumable_checkpoints())
    path = tmp_path / "global_step_9"
    choose = partial(choose_checkpoint, trainer.checkpoints, resume_from_path=str(path))
    assert choose("auto") == Path("global_step_2")
    assert choose("disable") is None
    assert choose("resume_path") == path
    trainer.config.trainer.resume_mode = "disable"
    assert trainer.resume() is False


def test_validation_and_saving_follow_their_frequencies():
    trainer, calls, journal = make_fake_run(steps=5)
    trainer.config.trainer.test_freq = 2
    trainer.config.trainer.save_freq = 3
    trainer.fit()
    assert [call[1] for call in calls if call[0] == "panel"] == [2, 4, 5]
    saved = [call[1] for call in calls if call[0] == "save"]
    assert saved == [Path("global_step_3"), Path("global_step_5")]
    assert [step for step, metrics in journal.metrics.items() if "val/tasks" in metrics] == [
        2,
        4,
        5,
    ]
    # ten tasks, two per step
    epochs = [metrics["training/epoch"] for metrics in journal.metrics.values()]
    assert epochs == pytest.approx([0, 0.2, 0.4, 0.6, 0.8])


def test_step_is_recorded_before_its_checkpoint():
    checkpoints = Checkpoints()
    trainer, calls, _ = make_fake_run(checkpoints, steps=1)
    trainer.config.trainer.test_freq = 1
    trainer.config.trainer.save_freq = 1
    trainer.fit()
    tail = calls[calls.index(("rollouts", 1)) :]
    assert tail == [
        ("rollouts", 1),
        "update_actor",
        "wake",
        ("sync", 1),
        ("panel", 1),
        ("panel rollouts", 1),
        ("log", 1),
        ("save", Path("global_step_1")),
        "finish",
    ]
    assert checkpoints.waited, "a run ends when its last checkpoint is written"
    kl_coef = trainer.kl_ctrl.value
    assert checkpoints.state == {
        "global_step": 1,
        "kl_coef": kl_coef,
        "price": {"multiplier": 1.0, "average": None, "best": 0.0},
        "panel": "panel of today",
        "collector": {"under_way": []},
    }


def test_rows_are_ordered_to_balance_tokens_over_ranks():
    """Rows of 5, 5, 3 and 4 tokens: 8 for one of two ranks, 9 for the other."""
    trainer, *_ = make_fake_run()
    workers: Any = trainer.workers
    lengths = [5, 5, 3, 4]

    def row_lengths() -> list[int]:
        batch = trainer.score(make_trainer_rows()[np.array([0, 3, 1, 2])])
        return batch.batch["attention_mask"].sum(-1).tolist()

    for ranks, balance in ((1, True), (2, False), (5, True)):
        workers.data_parallel_size = ranks
        trainer.config.trainer.balance_batch = balance
        assert row_lengths() == lengths
    workers.data_parallel_size = 2
    ordered = row_lengths()
    assert sorted([sum(ordered[:2]), sum(ordered[2:])]) == [8, 9]
    # As many ranks as rows: one row each.
    workers.data_parallel_size = 4
    ordered = row_lengths()
    assert sorted(ordered) == sorted(lengths) and ordered != lengths


@pytest.mark.parametrize(("ranks", "equal"), [(2, True), (3, False)])
def test_ranks_get_equal_row_counts_if_possible(monkeypatch, ranks, equal):
    partition_calls = []

    def partition(
        lengths: list[int], k_partitions: int, equal_size: bool = False
    ) -> list[list[int]]:
        partition_calls.append((lengths, k_partitions, equal_size))
        return [[2, 1], [3, 0]]

    monkeypatch.setattr(seqlen_balancing, "get_seqlen_balanced_partitions", partition)
    trainer, *_ = make_fake_run()
    workers: Any = trainer.workers
    workers.data_parallel_size = ranks
    trainer.config.trainer.balance_batch = True
    batch = trainer.score(make_trainer_rows())
    assert partition_calls == [([5, 3, 4, 5], ranks, equal)]
    assert batch.batch["attention_mask"].sum(-1).tolist() == [4, 3, 5, 5]


def group_tasks() -> dict[str, list]:
    """Return two groups of two, as in ``make_trainer_rows``."""
    uids = list(make_trainer_rows().non_tensor_batch["uid"])
    return {"member": [0, 1, 0, 1], "task": ["a", "b", "c", "d"], "uid": uids}


def test_baseline_is_the_greedy_return_of_the_first_group_member(monkeypatch):
    trainer, *_ = make_fake_run()
    tasks = DataProto.from_dict({}, group_tasks())
    received = []

    def generate(first: DataProto, *others: object) -> DataProto:
        received.append((first.non_tensor_batch["task"].tolist(), others))
        return make_trainer_rows()[np.array([0, 2])]

    monkeypatch.setattr(trainer.collector, "greedy_loop", generate)
    batch = make_trainer_rows()
    batch = trainer.add_baselines(tasks, batch)
    assert received == [(["a", "c"], (trainer.engines, trainer.envs))]
    assert batch.batch["reward_baselines"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert batch.meta_info["metrics"] == {
        "episode/greedy_reward": 0.5,
        "rollout/left_out_without_greedy": 0.0,
    }


def test_greedy_trajectories_have_the_token_prices_of_the_batch(monkeypatch):
    trainer, *_ = make_fake_run()
    greedy = make_trainer_rows()[np.array([0, 2])]
    monkeypatch.setattr(trainer.collector, "greedy_loop", lambda *_: greedy)
    batch = make_trainer_rows()
    batch.meta_info["price_multiplier"] = 0.25
    trainer.add_baselines(DataProto.from_dict({}, group_tasks()), batch)
    assert greedy.meta_info["price_multiplier"] == 0.25


@pytest.mark.parametrize("failures", [1, 2])
def test_failed_greedy_trajectory_is_no_baseline(monkeypatch, failures):
    """It is generated a second time. If that fails too, its group is dropped."""
    trainer, *_ = make_fake_run()
    requested_tasks = []

    def generate(tasks: DataProto, *_: object) -> DataProto:
        requested_tasks.append(tasks.non_tensor_batch["task"].tolist())
        greedy = make_trainer_rows()[np.array([0, 2])]
        if len(requested_tasks) > 1:
            greedy = greedy[np.array([1])]
        greedy.non_tensor_batch["aborted"][-1] = len(requested_tasks) <= failures
        return greedy

    monkeypatch.setattr(trainer.collector, "greedy_loop", generate)
    tasks = DataProto.from_dict({}, group_tasks())
    batch = trainer.add_baselines(tasks, make_trainer_rows())
    assert requested_tasks == [["a", "c"], ["c"]]
    assert (
        batch.batch["reward_baselines"].tolist() == [1.0, 1.0, 0.0, 0.0][: 4 if failures < 2 else 2]
    )
    assert batch.meta_info["metrics"]["rollout/left_out_without_greedy"] == failures - 1


def test_without_any_greedy_trajectory_an_error_is_raised(monkeypatch):
    trainer, *_ = make_fake_run()
    failed = make_trainer_rows()[np.array([0, 2])]
    failed.non_tensor_batch["aborted"][:] = True
    monkeypatch.setattr(trainer.collector, "greedy_loop", lambda *_: failed)
    with pytest.raises(RuntimeError):
        tasks = DataProto.from_dict({}, group_tasks())
        trainer.add_baselines(tasks, make_trainer_rows())


@pytest.mark.parametrize("replaced", [False, True])
def test_collect_removes_metrics_timing_and_tasks_from_the_batch(monkeypatch, replaced):
    """If all tasks failed, other tasks replaced them, and baselines are for those."""
    trainer, *_ = make_fake_run()
    trainer.global_step = 3
    others = DataProto(meta_info={"others": True})
    requests = []

    def generate(tasks: DataProto, *args: object, is_train: bool) -> DataProto:
        requests.append(tasks)
        assert is_train and args == (
            RolloutWorkerHandles(trainer.workers.rollout_workers),
            trainer.envs,
        )
        extra: dict[str, Any] = {"tasks": others} if replaced else {}
        return make_trainer_rows(
            {"timing": {"env": 2.0}, "metrics": {"rollout/aborted": 0.0}} | extra
        )

    compared = []

    def compare(tasks: DataProto, batch: DataProto) -> DataProto:
        compared.append(tasks)
        return batch

    monkeypatch.setattr(trainer.collector, "multi_turn_loop", generate)
    monkeypatch.setattr(ray_trainer, "uses_greedy_baseline", lambda _: True)
    monkeypatch.setattr(trainer, "add_baselines", compare)
    batch = trainer.collect()
    assert requests[0].meta_info == {"global_step": 3, "tasks asked for": 2}
    assert compared[0] is (others if replaced else requests[0])
    assert batch.meta_info == {"global_step": 3}
    assert trainer.metrics == {"rollout/aborted": 0.0}
    assert trainer.clock.seconds["env"] == 2.0


def test_validation_set_is_generated_with_validation_settings(monkeypatch):
    trainer, *_ = make_fake_run()
    received = []

    def generate(*args: object, is_train: bool) -> DataProto:
        received.append((args[1:], is_train))
        return make_trainer_rows()

    monkeypatch.setattr(trainer.collector, "multi_turn_loop", generate)
    trainer.validate()
    assert received == [((trainer.engines, trainer.val_envs), False)]


class ScoringWorkers(Workers):
    """Workers with a reference. Entropies count the columns from 1."""

    has_reference = True

    def compute_log_prob(self, data: DataProto) -> DataProto:
        self.calls.append(("log_prob", data.meta_info["temperature"]))
        shape = data.batch["responses"].shape
        entropies = torch.arange(1.0, 4.0).expand(shape).clone()
        old = torch.full(shape, -0.5)
        return DataProto.from_dict({"old_log_probs": old, "entropys": entropies})

    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        self.calls.append(("ref", data.meta_info["temperature"]))
        return DataProto.from_dict({"ref_log_prob": torch.full((len(data), 3), -1.0)})

    def pop_engine_metrics(self) -> dict[str, float]:
        return {"engine/requests": 4.0}


@pytest.mark.parametrize("allows_retokenized", [False, True])
def test_rows_without_rollout_log_probs_are_not_compared(allows_retokenized):
    """Tokens that were encoded from text have no rollout log-prob; 0 would be read as one."""
    trainer, *_ = make_fake_run()
    workers: Any = ScoringWorkers()
    trainer.workers = workers
    trainer.config.env.allow_retokenized = allows_retokenized
    rows = trainer.score(make_trainer_rows())
    assert (rows.batch["old_log_probs"] == -0.5).all()
    compared = {name for name in trainer.metrics if name.startswith(("training/", "rollout_corr/"))}
    assert bool(compared) != allows_retokenized


def test_step_with_a_reference_subtracts_the_kl_from_rewards():
    trainer, _, journal = make_fake_run(steps=1)
    workers: Any = ScoringWorkers()
    trainer.workers = workers
    trainer.collector = Collector(workers.calls)
    trainer.config.actor_rollout_ref.rollout.temperature = 0.75
    trainer.config.algorithm.use_kl_in_reward = True
    trainer.config.algorithm.kl_penalty = "mse"
    trainer.kl_ctrl = FixedKLController(2.0)
    batches = []
    advantages = trainer.compute_advantages
    trainer.compute_advantages = lambda batch: batches.append(batch) or advantages(batch)
    trainer.config.trainer.test_freq = 1
    trainer.config.trainer.save_freq = 1
    trainer.fit()
    assert ("log_prob", 0.75) in workers.calls and ("ref", 0.75) in workers.calls
    (batch,) = batches
    assert batch.meta_info["global_step"] == 1
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [1, 1, 0, 0]
    # Trajectories of 4 and 5 tokens. Each token costs 2 * 0.5**2 / 2.
    penalty = batch.batch["token_level_scores"] - batch.batch["token_level_rewards"]
    assert penalty.sum(-1).tolist() == pytest.approx([1.0, 1.0, 1.25, 1.25])
    assert batch.non_tensor_batch["step_rewards"].tolist() == [[1.0], [1.0], [0.0], [0.0]]
    metrics = journal.metrics[1]
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.125)
    # Entropies of the sampled columns: 1 2 3, 1, 1 2, 1 2 3.
    assert metrics["actor/entropy"] == pytest.approx(16 / 9)
    drift = 1 - np.exp(-0.5)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(drift)
    assert metrics["engine/requests"] == 4.0 and metrics["critic/score/mean"] == 0.5
    assert metrics["perf/total_num_tokens"] == 17.0
    assert metrics["perf/time_per_step"] == metrics["timing_s/step"]
    stages = {name.removeprefix("timing_s/") for name in metrics if name.startswith("timing_s/")}
    assert stages == {
        "adv",
        "env",
        "gen",
        "old_log_prob",
        "ref",
        "reward",
        "sleep",
        "step",
        "testing",
        "update_actor",
        "update_weights",
    }
    assert set(trainer.drain_metrics()) == {"timing_s/save_checkpoint", "training/global_step"}


class AnsweringCollector(Collector):
    """Collector that converts the number of answers to a column and a metric."""

    def convert_scores_to_estimator_inputs(self, data: DataProto) -> DataProto:
        names = ("branches", "spans", "branch_scores", "span_scores")
        _, _, branches, spans = map(data.non_tensor_batch.pop, names)
        answers = [len(branch) + len(span) for branch, span in zip(branches, spans, strict=True)]
        data.batch["answers"] = torch.tensor(answers)
        data.meta_info["metrics"] = {"method/answers": float(sum(answers))}
        return data


class AnsweringWorkers(ScoringWorkers):
    """Workers that return the requests as answers."""

    def compute_log_prob(self, data: DataProto) -> DataProto:
        answer = super().compute_log_prob(data)
        for name in ("branch", "span"):
            requests = {"branch": "branches", "span": "spans"}[name]
            answer.non_tensor_batch[f"{name}_scores"] = data.non_tensor_batch[requests]
        return answer


@pytest.mark.parametrize("bypass", [False, True])
def test_score_answers_the_requests_of_the_rows(bypass):
    trainer, calls, _ = make_fake_run()
    trainer.collector = AnsweringCollector(calls)
    workers: Any = AnsweringWorkers()
    trainer.workers = workers
    trainer.config.algorithm.rollout_correction.bypass_mode = bypass
    batch = make_trainer_rows()
    batch.non_tensor_batch["branches"] = object_array([[1], [2, 3], [], []])
    batch.non_tensor_batch["spans"] = object_array([[1], [], [], [2]])
    batch = trainer.score(batch)
    assert batch.batch["answers"].tolist() == [2, 2, 0, 1]
    assert "branches" not in batch.non_tensor_batch
    assert trainer.metrics["method/answers"] == 5.0 and trainer.metrics["actor/entropy"] > 0
    # With bypass_mode the engine's log-probs are the old ones. Requests are answered in both cases.
    assert batch.batch["old_log_probs"][0, 0] == (0.0 if bypass else -0.5)
    assert set(trainer.clock.seconds) == {"scoring"}


def test_bypass_mode_uses_the_engine_log_probs_as_old_ones():
    trainer, calls, _ = make_fake_run()
    trainer.config.algorithm.rollout_correction.bypass_mode = True
    workers: Any = ScoringWorkers()
    trainer.workers = workers
    batch = make_trainer_rows()
    batch.batch["rollout_log_probs"] -= 0.75
    batch = trainer.score(batch)
    assert (batch.batch["old_log_probs"] == -0.75).all()
    assert ("log_prob", 1.0) not in calls and "old_log_prob" not in trainer.clock.seconds
    assert not [key for key in trainer.metrics if key.startswith(("rollout_corr", "actor/entropy"))]
    assert CORRECTION_WEIGHTS not in batch.tensor_keys()


def test_rows_are_weighted_by_trainer_over_engine_probability():
    trainer, *_ = make_fake_run()
    workers: Any = ScoringWorkers()
    trainer.workers = workers
    batch = trainer.score(make_trainer_rows())
    mask = batch.batch["response_mask"]
    assert torch.allclose(batch.batch[CORRECTION_WEIGHTS], np.exp(-0.5) * mask.float())
    assert trainer.metrics["rollout_corr/kl"] == pytest.approx(0.5)
    trainer.config.algorithm.rollout_correction.rollout_is = None
    assert CORRECTION_WEIGHTS not in trainer.score(make_trainer_rows()).tensor_keys()


def test_run_without_a_step_limit_counts_epochs():
    trainer, *_ = make_fake_run()
    trainer.config.trainer.total_training_steps = None
    trainer.config.trainer.total_epochs = 3
    assert trainer.total_steps == 15, "ten tasks, two per step"


def test_checkpoint_without_a_validation_set_is_not_compared(caplog):
    saved = {"global_step": 2, "kl_coef": 0.7}
    trainer, *_ = make_fake_run(Checkpoints(Path("global_step_2"), saved))
    assert trainer.resume()
    assert [line for line in caplog.records if line.levelname != "INFO"] == []


def test_frequency_of_zero_means_never():
    trainer, calls, _ = make_fake_run(steps=2)
    trainer.config.trainer.test_freq = 0
    trainer.config.trainer.save_freq = 0
    trainer.fit()
    assert [call for call in calls if call[0] in ("panel", "save")] == []


def test_only_numbers_are_metrics():
    trainer, *_ = make_fake_run()
    metrics: Any = {"float": 0.5, "bool": True, "numpy": np.float32(1.5), "flag": np.bool_(False)}
    others: Any = {"text": "a", "list": [1.0]}
    trainer.metrics = metrics | others
    drained = trainer.drain_metrics()
    expected = {"float": 0.5, "bool": 1.0, "numpy": 1.5, "flag": 0.0, "training/global_step": 0.0}
    assert drained == expected and {type(value) for value in drained.values()} == {float}


def test_metrics_are_drained_once():
    trainer, *_ = make_fake_run()
    trainer.global_step = 7
    trainer.metrics = {"a": 1.0}
    with trainer.clock.measure_part("step"):
        pass
    drained = trainer.drain_metrics()
    assert set(drained) == {"a", "timing_s/step", "training/global_step"} and drained["a"] == 1.0
    assert trainer.drain_metrics() == {"training/global_step": 7.0}


def test_price_multiplier_of_a_batch_follows_earlier_batches(monkeypatch):
    """Success stays at 0.5, so the multiplier grows by 0.1 per batch, from 0."""
    trainer, *_ = make_fake_run()
    trainer.price_controller = PriceController(tolerance=2.0)
    multipliers = []

    def generate(tasks: DataProto, *args: object, is_train: bool) -> DataProto:
        multipliers.append(tasks.meta_info[PRICE_MULTIPLIER])
        rows = make_trainer_rows({"metrics": {"episode/success_rate": 0.5}})
        rows.meta_info[PRICE_MULTIPLIER] = tasks.meta_info[PRICE_MULTIPLIER]
        return rows

    monkeypatch.setattr(trainer.collector, "multi_turn_loop", generate)
    logged = []
    for _ in range(3):
        trainer.collect()
        logged.append(trainer.metrics["actor/price_multiplier"])
    assert multipliers == logged == pytest.approx([0.0, 0.1, 0.2])
