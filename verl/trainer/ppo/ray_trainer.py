"""RayPPOTrainer: the training loop as a recipe of verbs.

   tasks ──collect──▶ rows ──evaluate──▶ log-probs, values ──reward──▶ scores ──credit──▶ advantages
     ▲                                                                                        │
     └── players ◀──sync── weights ◀──update actor── weights ◀──update critic── values ◀──────┘

Collecting waits for the rollout engines and environments; everything after it waits for the
training workers. The trainer knows neither agents nor methods: it is handed a collector, and it
finds its estimator in a registry.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from verl.algos import get_kl_controller, row_shares
from verl.config.derive import iterations
from verl.config.schema import PPOConfig
from verl.protocol import DataProto
from verl.records import WrittenFiles
from verl.trainer.ppo import metrics as M
from verl.trainer.ppo.correction import correct_rollout
from verl.trainer.ppo.credit import (
    apply_kl_penalty,
    compares_with_greedy_play,
    compute_advantage,
    earned_by,
    with_baselines,
)
from verl.trainer.ppo.dealing import deal_update, put_in_order
from verl.trainer.ppo.interfaces import (
    Checkpoints,
    Collector,
    RewardFunction,
    RolloutGroup,
    StepJournal,
    TaskSource,
    Workers,
)
from verl.trainer.ppo.overlap import Lookahead
from verl.trainer.ppo.players import players
from verl.trainer.ppo.resources import ResourcePoolManager, Role
from verl.trainer.ppo.step_warnings import StepWarnings, signal_metrics
from verl.trainer.ppo.weight_sync import has_moved
from verl.utils.timing import Stopwatch
from verl.utils.torch_functional import masked_mean

__all__ = ["RayPPOTrainer", "ResourcePoolManager", "Role", "apply_kl_penalty", "compute_advantage"]
logger = logging.getLogger(__name__)
TasksT = TypeVar("TasksT", bound=TaskSource)


class RayPPOTrainer(Generic[TasksT]):
    """Trains a policy with PPO and its family on worker groups that run on Ray.

    Args:
        config: the typed configuration (``verl.config``).
        workers: the worker groups and rollout engines, already placed.
        collector: plays tasks and returns rows.
        envs, val_envs: the tasks that are trained on and the panel that is measured.
        reward_fn: rows -> ``token_level_scores`` [B, R].
        journal: writes metrics, rollouts, the console and the report.
        checkpoints: atomic checkpoint directories of this run.
    """

    def __init__(
        self,
        config: PPOConfig,
        workers: Workers,
        collector: Collector[TasksT],
        envs: TasksT,
        val_envs: TasksT,
        reward_fn: RewardFunction,
        journal: StepJournal,
        checkpoints: Checkpoints,
    ) -> None:
        self.config = config
        self.workers = workers
        self.collector = collector
        self.envs = envs
        self.val_envs = val_envs
        self.reward_fn = reward_fn
        self.journal = journal
        self.checkpoints = checkpoints
        self.global_step = 0
        self.overlaps = config.trainer.rollout_overlap == "one_step"
        self.ahead = Lookahead()
        self.collected: dict[str, Any] = {}  # what the collector keeps over steps
        self.moved = False  # whether the weights are others than those the engines have
        self.clock = Stopwatch()
        self.metrics: dict[str, float] = {}
        self.step_warnings = StepWarnings(config)
        control = config.algorithm.kl_ctrl
        self.kl_ctrl = get_kl_controller(
            control.type, control.kl_coef, control.horizon, control.target_kl
        )

    def fit(self) -> None:
        """Train until ``total_steps``; one turn of the loop is one batch of tasks and one version
        of the weights.
        """
        self.begin()
        while self.global_step < self.total_steps:
            self.global_step += 1
            with self.clock.measure("step"):
                batch = self.collect()
                self.look_ahead()
                batch = self.evaluate(batch)
                batch = self.reward(batch)
                batch = self.credit(batch)
                self.update_critic(batch)
                self.update_actor(batch)
                self.sync_weights()
            self.conclude(batch)
        with self.clock.measure("save_checkpoint"):
            self.checkpoints.wait()
        self.step_warnings.close()
        self.journal.finish()

    # ------------------------------------------------------------------ before the first step

    @property
    def total_steps(self) -> int:
        """Training steps of the whole run: ``trainer.total_training_steps``, else epochs times
        batches per epoch.
        """
        return iterations(self.config, len(self.envs.tasks))

    def prepare(self) -> None:
        """Resume where a checkpoint says and hand the weights to the players."""
        resumed = self.resume()
        self.journal.open(self.global_step if resumed else None, self.total_steps)
        self.sync_weights()

    def begin(self) -> None:
        """Prepare, and measure the policy as it starts."""
        self.prepare()
        trainer = self.config.trainer
        if trainer.val_only or (trainer.val_before_train and self.global_step == 0):
            self.validate()
            self.journal.log_step(self.global_step, self.drain_metrics())
        if trainer.val_only:
            self.global_step = self.total_steps
        else:
            self.checkpoints.put_aside_after(self.global_step)

    def resume(self) -> bool:
        """Load the newest checkpoint that verifies (``auto``) or the named one (``resume_path``),
        if there is one.
        """
        found = self.find_checkpoint()
        if found is None:
            return False
        state = self.checkpoints.load_state(found)
        self.workers.load_checkpoint(found)
        self.global_step = state["global_step"]
        # Older checkpoints have what it kept among their own.
        self.collector.resume(state.get("collector", state))
        if self.config.algorithm.kl_ctrl.type == "adaptive":
            self.kl_ctrl.value = state["kl_coef"]
        # The state of runs before the panel was noted has no hash to compare with.
        if state.get("panel", self.val_envs.panel_hash) != self.val_envs.panel_hash:
            logger.warning(
                "the validation panel is not the one of %s: success rates before and after differ",
                found,
            )
        logger.info("resumed from %s at step %d", found, self.global_step)
        return True

    def find_checkpoint(self) -> Path | None:
        """Where to continue from, or None for a fresh start."""
        trainer = self.config.trainer
        if trainer.resume_mode == "disable":
            return None
        if trainer.resume_mode == "resume_path":
            if trainer.resume_from_path is None:
                raise ValueError("trainer.resume_mode=resume_path needs trainer.resume_from_path")
            return Path(trainer.resume_from_path)
        return self.checkpoints.latest_valid()

    # ------------------------------------------------------------------ the verbs of a step

    def collect(self) -> DataProto:
        """The rows of ``train_batch_size`` groups, played now or while the last batch was learned
        from; unless plays overlap, engines sleep from the last play until they get new weights.
        """
        with self.clock.measure("gen"):
            ahead = self.ahead.take()
            workers = players(self.workers, self.config)
            batch = self.play(self.global_step, workers) if ahead is None else ahead
        self.clock.add(batch.meta_info.pop("timing", {}))
        self.metrics |= batch.meta_info.pop("metrics", {}) | self.workers.engine_metrics()
        self.metrics |= M.staleness(self.metrics, self.global_step)
        if self.overlaps:
            return self.balance(batch)
        with self.clock.measure("sleep"):
            self.workers.sleep_engines()
        return self.balance(batch)

    def play(self, step: int, workers: RolloutGroup) -> DataProto:
        """Play the tasks of ``step`` and return their rows."""
        tasks = self.envs.gen_batch(step, self.config.data.train_batch_size)
        batch = self.collector.multi_turn_loop(tasks, workers, self.envs, is_train=True)
        batch.meta_info["global_step"] = step
        # Other tasks than those asked for, where all of these broke.
        tasks = batch.meta_info.pop("tasks", tasks)
        if compares_with_greedy_play(self.config):
            batch = self.add_baselines(tasks, batch, workers)
        return batch

    def look_ahead(self) -> None:
        """Where plays overlap, begin to play the next batch, with the weights as they are."""
        # From here on plays are lost with the run: it resumes from how the collector stands now.
        self.collected = self.collector.state()
        if self.overlaps and self.global_step < self.total_steps:
            self.ahead.start(partial(self.play, self.global_step + 1), self.workers)

    def add_baselines(self, tasks: DataProto, batch: DataProto, workers: RolloutGroup) -> DataProto:
        """``batch`` with what greedy plays earn; groups whose one breaks twice are left out."""
        left = tasks[tasks.non_tensor_batch["member"] == 0]
        earned: dict[str, float] = {}
        for _ in range(2):
            greedy = self.collector.greedy_loop(left, workers, self.envs)
            earned |= earned_by(greedy, self.reward_fn(greedy))
            missing = np.array([uid not in earned for uid in left.non_tensor_batch["uid"]])
            if not missing.any():
                break
            left = left[missing]
        return with_baselines(batch, earned)

    def balance(self, batch: DataProto) -> DataProto:
        """Reorder rows so that every training rank gets about as many tokens."""
        if self.config.trainer.balance_batch:
            put_in_order(batch, self.workers.data_parallel_size)
        return batch

    def evaluate(self, batch: DataProto) -> DataProto:
        """Add old log-probs (where the collector has not), reference log-probs and values."""
        batch.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        batch = self.add_old_log_probs(batch)
        if self.workers.has_reference:
            with self.clock.measure("ref"):
                batch = batch.union(self.workers.compute_ref_log_prob(batch))
        if self.workers.critic is not None:
            with self.clock.measure("values"):
                batch = batch.union(self.workers.compute_values(batch))
        return batch

    def add_old_log_probs(self, batch: DataProto) -> DataProto:
        """Add what the update compares new log-probs with, and weigh the engine's mismatch."""
        bypass = self.config.algorithm.rollout_correction.bypass_mode
        if bypass:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"].clone()
        elif "old_log_probs" not in batch.tensor_keys():
            with self.clock.measure("old_log_prob"):
                batch = batch.union(self.workers.compute_log_prob(batch))
        if "entropys" in batch.tensor_keys():
            entropy = masked_mean(batch.batch["entropys"], batch.batch["response_mask"])
            self.metrics["actor/entropy"] = entropy.item()
        if not bypass:
            self.metrics |= M.probability_drift(batch) | correct_rollout(batch, self.config)
        return batch

    def reward(self, batch: DataProto) -> DataProto:
        """Add ``token_level_scores`` and, less a KL penalty where configured,
        ``token_level_rewards``; rewards of single steps lose what the scores lost.
        """
        with self.clock.measure("reward"):
            batch.batch["token_level_scores"] = self.reward_fn(batch)
            batch.non_tensor_batch["step_rewards"] = self.reward_fn.step_rewards(batch)
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            if self.config.algorithm.use_kl_in_reward:
                batch, measured = apply_kl_penalty(
                    batch, self.kl_ctrl, self.config.algorithm.kl_penalty
                )
                self.metrics |= measured
        return batch

    def credit(self, batch: DataProto) -> DataProto:
        """Add advantages and returns."""
        with self.clock.measure("adv"):
            batch = compute_advantage(batch, self.config)
            self.metrics |= batch.meta_info.pop("metrics", {})
            self.weigh(batch)
        self.metrics |= M.data_metrics(batch) | signal_metrics(batch)
        return batch

    def update_critic(self, batch: DataProto) -> None:
        """Fit the value function, where the estimator has one."""
        if self.workers.critic is None:
            return
        with self.clock.measure("update_critic"):
            answer = self.workers.critic.update_critic(self.dealt(batch, "critic"))
        self.metrics |= M.reduce_metrics(answer.meta_info["metrics"])

    def update_actor(self, batch: DataProto) -> None:
        """Move the policy, once the critic has had ``critic_warmup`` steps."""
        if self.global_step <= self.config.trainer.critic_warmup:
            return
        with self.clock.measure("update_actor"):
            answer = self.workers.actor.update_actor(self.dealt(batch, "actor"))
        measured = M.reduce_metrics(answer.meta_info["metrics"])
        self.moved = has_moved(measured)
        self.metrics |= measured

    def dealt(self, batch: DataProto, role: str) -> DataProto:
        """What the update of ``role`` reads, dealt so that no rank waits for another."""
        return deal_update(
            batch, self.config, role, self.global_step, self.workers.data_parallel_size
        )

    def weigh(self, batch: DataProto) -> None:
        """Say what part of a sequence every row is, for losses that are means over sequences."""
        batch.batch["row_shares"] = row_shares(
            batch.non_tensor_batch["traj_uid"],
            self.config.algorithm.row_weight,
            batch.batch["response_mask"].sum(-1),
        )

    def sync_weights(self) -> None:
        """Hand the policy's weights to every rollout engine, once nothing is played with the old
        ones, and make sure that they got there.
        """
        if self.overlaps:
            with self.clock.measure("wait_for_plays"):
                self.ahead.wait_for_plays()
        with self.clock.measure("update_weights"):
            self.workers.sync_weights(version=self.global_step, moved=self.moved)
        self.moved = False

    # ------------------------------------------------------------------ after a step

    def conclude(self, batch: DataProto) -> None:
        """Validate, save and write down what happened."""
        trainer = self.config.trainer
        last = self.global_step >= self.total_steps
        self.metrics |= M.throughput_metrics(
            batch, self.clock.seconds["step"], self.workers.data_parallel_size
        )
        self.step_warnings.check(self.global_step, self.metrics)
        self.journal.log_rollouts(self.global_step, batch)
        if trainer.test_freq > 0 and (last or self.global_step % trainer.test_freq == 0):
            self.validate()
        played = (self.global_step - 1) * self.config.data.train_batch_size
        self.metrics["training/epoch"] = played / len(self.envs.tasks)
        # Before the checkpoint: what a resumed run starts from is on record, what it repeats is
        # removed.
        self.journal.log_step(self.global_step, self.drain_metrics())
        # Minus one: the last one alone.
        due = trainer.save_freq > 0 and self.global_step % trainer.save_freq == 0
        if due or (last and trainer.save_freq != 0):
            self.save()

    def validate(self) -> DataProto:
        """Play the frozen panel once and record its success rate with a bootstrap interval; returns
        what was played.
        """
        with self.clock.measure("testing"):
            panel = self.val_envs.panel_batch()
            panel.meta_info["global_step"] = self.global_step
            batch = self.collector.multi_turn_loop(
                panel, self.workers, self.val_envs, is_train=False
            )
        self.metrics |= M.validation_metrics(batch)
        self.journal.log_rollouts(self.global_step, batch, validation=True)
        return batch

    def save(self) -> None:
        """Begin an atomic checkpoint: weights, optimizer, schedule, counters. With
        ``trainer.async_save`` it is written beside the next iterations.
        """
        with self.clock.measure("save_checkpoint"):
            state = {
                "global_step": self.global_step,
                "kl_coef": self.kl_ctrl.value,
                "panel": self.val_envs.panel_hash,
                "collector": self.collected,
            }
            self.checkpoints.save(self.global_step, self.write_state, state)

    def write_state(self, directory: Path) -> Callable[[], list[WrittenFiles]]:
        """Begin to write the state of the workers below ``directory``; the function returned waits
        for its end, and for the journal: what a checkpoint claims is on record.
        """
        written_files = self.workers.save_checkpoint(directory)

        def finish() -> list[WrittenFiles]:
            self.journal.flush()
            return written_files()

        return finish

    def drain_metrics(self) -> dict[str, float]:
        """All metrics since the last call, timings included."""
        drained = self.metrics | self.clock.metrics()
        drained["training/global_step"] = float(self.global_step)
        self.metrics = {}
        numbers = (int, float, np.number, np.bool_)
        return {key: float(value) for key, value in drained.items() if isinstance(value, numbers)}
