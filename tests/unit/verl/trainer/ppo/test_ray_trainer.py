"""The recipe on a scripted engine: what a step adds to the batch, what it asks of whom, and in
which order.
"""

import pytest
import torch

from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout import TrajectoryCollector
from agent_system.reward_manager import load_reward_manager
from tests.helpers.play import make_config, make_world, walk
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.algos import AdaptiveKLController, get_adv_estimator_fn, missing_inputs
from verl.protocol import DataProto, object_array
from verl.trainer.config.registered_names import COLUMNS, batch_columns
from verl.trainer.ppo import resources
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, apply_kl_penalty
from verl.utils.torch_functional import last_selected


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


class Workers:
    """Training workers that score every token the same and remember what was asked of them."""

    data_parallel_size, has_reference, critic = 1, False, None

    def __init__(self, engines) -> None:
        self.rollout_workers, self.calls = engines, []

    def compute_log_prob(self, data: DataProto) -> DataProto:
        shape = data.batch["responses"].shape
        return DataProto.from_dict(
            {"old_log_probs": torch.zeros(shape), "entropys": torch.zeros(shape)}
        )

    def engine_metrics(self) -> dict[str, float]:
        self.calls.append("metrics")
        return {}

    def sleep_engines(self) -> None:
        self.calls.append("sleep")

    def sync_weights(self, version: int) -> None:
        self.calls.append("sync")


def make_trainer(tokenizer, config, script=None) -> RayPPOTrainer:
    group, envs, _ = make_world(tokenizer, config, script)
    collector = TrajectoryCollector(config, tokenizer)
    reward_fn = load_reward_manager(config)
    workers = Workers(group.rollout_workers)
    return RayPPOTrainer(
        config, workers, collector, envs, make_envs(config)[1], reward_fn, None, None
    )


def credited(trainer: RayPPOTrainer) -> DataProto:
    """The batch of one step up to its advantages."""
    trainer.global_step += 1
    try:
        return trainer.credit(trainer.reward(trainer.evaluate(trainer.collect())))
    finally:
        trainer.collector.close()


def test_every_column_that_checks_promise_is_there_when_the_estimator_runs(tokenizer):
    config = make_config(n=2)
    config.data.train_batch_size = 2
    trainer = make_trainer(tokenizer, config)
    trainer.global_step = 1
    batch = trainer.reward(trainer.evaluate(trainer.collect()))
    trainer.collector.close()
    assert set(COLUMNS) <= set(batch.keys())
    there = {column for column, how in batch_columns(config).items() if not how}
    assert there == {"reward_baselines"}, "the others need a critic, a reference or thinking credit"


def test_an_epoch_of_training_plays_every_task_once(tokenizer):
    config = make_config(n=1)
    trainer = make_trainer(tokenizer, config)
    tasks = len(trainer.envs.tasks)
    config.data.train_batch_size = tasks // 3
    asked = []
    trainer.collector.multi_turn_loop = lambda tasks, *_, **__: (
        asked.extend(tasks.non_tensor_batch["task_id"]) or tasks
    )
    trainer.balance = lambda batch: batch
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
    config.data.train_batch_size, config.algorithm.adv_estimator = 3, "remax"
    trainer = make_trainer(tokenizer, config, script)
    batch = credited(trainer)
    assert len(batch) == 6 and batch.batch["reward_baselines"].tolist() == [1.0] * 6
    assert trainer.metrics["episode/greedy_reward"] == 1.0
    sampled = batch.batch["response_mask"].bool()
    assert (batch.batch["advantages"][sampled] == -1.0).all()
    assert missing_inputs(get_adv_estimator_fn("remax"), set(batch.keys())) == []


def test_engines_sleep_from_the_last_play_to_the_new_weights(tokenizer):
    config = make_config(n=2)
    config.data.train_batch_size = 2
    trainer = make_trainer(tokenizer, config)
    trainer.sync_weights()
    credited(trainer)
    trainer.sync_weights()
    assert trainer.workers.calls == ["sync", "metrics", "sleep", "sync"]


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

    class Actor:
        def call_refs(self, method: str) -> list[str]:
            return [f"{method} of rank 0", f"{method} of rank 1"]

    monkeypatch.setattr(resources, "gather", lambda refs, timeout_s, labels: list(refs))
    workers = resources.TrainingWorkers(Actor(), [Engine(), Engine()])
    weights = "export_weights of rank 0"
    workers.sync_weights(3)
    assert called == [("update_weights", weights, 3)] * 2
    called.clear()
    workers.sleep_engines()
    workers.sync_weights(4)
    assert called == [("sleep",)] * 2 + [("wake",)] * 2 + [("update_weights", weights, 4)] * 2
