"""RayPPOTrainer: the training loop, which does not depend on environments or methods.

Its collector packs rows, which may contain score requests: texts whose log-probs a method needs in
addition to those of the sampled tokens. It converts the scores into columns.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from verl.algos import PriceController, compute_row_shares, get_kl_controller
from verl.config.derive import count_training_steps
from verl.config.schema import PPOConfig
from verl.protocol import DataProto
from verl.record.journal import Journal
from verl.records import BRANCHES, NUM_RANKS, PRICE_MULTIPLIER, WrittenFiles
from verl.trainer.ppo import metrics as M
from verl.trainer.ppo.credit import (
    add_reward_baselines,
    apply_kl_penalty,
    apply_rollout_correction,
    collect_greedy_returns,
    compute_advantage,
    uses_greedy_baseline,
)
from verl.trainer.ppo.interfaces import Collector, RewardFunction, RolloutWorkerHandles, TaskSource
from verl.trainer.ppo.minibatch_sharding import balance_rows, shard_minibatches
from verl.trainer.ppo.resources import (
    ResourcePoolManager,
    Role,
    TrainingWorkers,
    has_updated_weights,
)
from verl.utils.checkpoint import CheckpointManager, choose_checkpoint, convert_state_errors
from verl.utils.saved_state import is_count, is_json_object, is_not_negative, read_state_value
from verl.utils.torch_functional import masked_mean
from verl.utils.waits import BackgroundCall, Stopwatch
from verl.workers.engine_state import check_engine_records

__all__ = ["RayPPOTrainer", "ResourcePoolManager", "Role", "apply_kl_penalty", "compute_advantage"]
logger = logging.getLogger(__name__)
TasksT = TypeVar("TasksT", bound=TaskSource)


class RayPPOTrainer(Generic[TasksT]):
    """Trainer of a policy with PPO and related algorithms, on Ray worker groups.

        tasks ──collect──▶ rows, score requests ──score──▶ old log-probs, columns of the method
              ──compute_log_probs_and_values──▶ reference log-probs, values
              ──compute_rewards──▶ rewards ──compute_advantages──▶ advantages
              ──update_critic, update_actor──▶ weights ──sync_weights──▶ rollout engines

        stage              consumes                waits for
        collect            tasks, weights k-1      engines and environments
        sleep_engines      -                       engines
        score ... update   rows k                  training workers
        (journal)          rows k                  collectors, concurrent with the update
        wake_engines       -                       engines
        sync_weights       weights k               engines
        log_validate_save  metrics k               engines (validation); the last checkpoint write

    With ``trainer.rollout_overlap=one_step`` engines never sleep. In step k ``prefetch_next_batch``
    starts the thread that generates the rows of step k+1:

        collect            rows k of the thread    the thread of k
        (thread of k+1)    tasks, weights k-1      engines and environments; starts when rows k
                                                   are there
        score ... update   rows k                  training workers; concurrent with the thread
        sync_weights       weights k               the thread of k+1: engines change weights
                                                   while they generate nothing

    Partial rollouts (``env.rollout.carry_over``) stay in flight over several steps. The weights
    then change within a trajectory.
    """

    def __init__(
        self,
        config: PPOConfig,
        workers: TrainingWorkers,
        collector: Collector[TasksT],
        envs: TasksT,
        val_envs: TasksT,
        reward_fn: RewardFunction,
        journal: Journal,
        checkpoints: CheckpointManager,
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
        self.uses_overlap = config.trainer.rollout_overlap == "one_step"
        self.engines = RolloutWorkerHandles(workers.rollout_workers)
        self.prefetched_batch: BackgroundCall[DataProto] | None = None
        self.collector_state: dict[str, Any] = {}  # collector's state before the prefetched batch
        self.has_new_weights = False  # the weights changed since the last sync
        self.clock = Stopwatch()
        self.metrics: dict[str, float] = {}
        self.step_warnings = M.StepWarnings(config)
        self.price_controller = PriceController(config.algorithm.success_tolerance)
        kl_config = config.algorithm.kl_ctrl
        self.kl_ctrl = get_kl_controller(
            kl_config.type, kl_config.kl_coef, kl_config.horizon, kl_config.target_kl
        )

    def fit(self) -> None:
        """Train until ``total_steps``; each step trains on one batch of tasks."""
        self.prepare_and_validate()
        while self.global_step < self.total_steps:
            self.global_step += 1
            with self.clock.measure_part("step"):
                batch = self.collect()
                self.prefetch_next_batch()
                self.sleep_engines()
                batch = self.score(batch)
                batch = self.compute_log_probs_and_values(batch)
                batch = self.compute_rewards(batch)
                batch = self.compute_advantages(batch)
                # Log now: collectors encode the log, and they are idle during the update.
                self.journal.log_rollouts(self.global_step, batch)
                self.update_critic(batch)
                self.update_actor(batch)
                self.wake_engines()
                self.sync_weights()
            self.log_validate_save(batch)
        with self.clock.measure_part("save_checkpoint"):
            self.checkpoints.wait()
        self.step_warnings.close()
        self.journal.finish_run()

    # ------------------------------------------------------------------ before the first step

    @property
    def total_steps(self) -> int:
        """Training steps of the run; by default epochs times batches per epoch."""
        return count_training_steps(self.config, len(self.envs.task_list))

    def prepare(self, will_train: bool) -> None:
        """Resume from a checkpoint if there is one. Then send the weights to the engines.

        With ``will_train`` the records of later steps are removed and their checkpoints are set
        aside, because training repeats them.
        """
        is_resumed = self.resume()
        resume_step = self.global_step if is_resumed else None
        self.journal.open(resume_step, self.total_steps, keeps_later_steps=not will_train)
        if will_train:
            self.checkpoints.set_aside_later_checkpoints(self.global_step)
        self.wake_engines()
        self.sync_weights()

    def prepare_and_validate(self) -> None:
        """Prepare the run, validate the initial policy if configured, and log its metrics."""
        trainer = self.config.trainer
        self.prepare(will_train=not trainer.val_only)
        if trainer.val_only or (trainer.val_before_train and self.global_step == 0):
            self.validate()
            self.journal.log_step(self.global_step, self.drain_metrics())
        if trainer.val_only:
            self.global_step = self.total_steps
        elif self.global_step >= self.total_steps:
            logger.warning(
                "step %d of the checkpoint is the last step (trainer.total_training_steps=%d): "
                "nothing is left to train; fix: increase trainer.total_training_steps",
                self.global_step,
                self.total_steps,
            )

    def resume(self) -> bool:
        """Load the checkpoint that ``resume_mode`` chooses. Return False if there is none."""
        trainer = self.config.trainer
        checkpoint = choose_checkpoint(
            self.checkpoints, trainer.resume_mode, trainer.resume_from_path
        )
        if checkpoint is None:
            return False
        with convert_state_errors(checkpoint):
            state = self.checkpoints.load_state(checkpoint)
            self._restore_state(state)
        check_engine_records(checkpoint)
        self.workers.load_checkpoint(checkpoint)
        # Older checkpoints store no hash of the validation set.
        if state.get("panel", self.val_envs.panel_hash) != self.val_envs.panel_hash:
            logger.warning(
                "the validation set differs from that of checkpoint %s: success rates before and "
                "after resuming are not comparable",
                checkpoint,
            )
        logger.info("resumed from %s at step %d", checkpoint, self.global_step)
        return True

    def _restore_state(self, state: Mapping[str, Any]) -> None:
        """Restore counters and controllers; raise ``InvalidStateError`` for invalid values."""
        allowed = "an integer of at least 0"
        self.global_step = read_state_value(state, "global_step", is_count, allowed)
        # Older checkpoints store the collector's keys at the top level.
        self.collector.resume(
            read_state_value(state, "collector", is_json_object, "an object", state)
        )
        self.price_controller.resume(
            read_state_value(state, "price", is_json_object, "an object", {})
        )
        if self.config.algorithm.kl_ctrl.type == "adaptive":
            allowed = "a number of at least 0"
            self.kl_ctrl.value = read_state_value(state, "kl_coef", is_not_negative, allowed)

    # ------------------------------------------------------------------ stages of a step

    def collect(self) -> DataProto:
        """Return the rows of ``train_batch_size`` groups: the prefetched rows, or new rows."""
        with self.clock.measure_part("gen"):
            prefetched_batch, self.prefetched_batch = self.prefetched_batch, None
            if prefetched_batch:
                batch = prefetched_batch.get_result()
            else:
                batch = self.generate_rows(self.global_step)
        self.clock.add_seconds(batch.meta_info.pop("timing", {}))
        self.metrics |= batch.meta_info.pop("metrics", {}) | self.workers.pop_engine_metrics()
        self.metrics |= M.compute_staleness(self.metrics, self.global_step)
        if self.price_controller.tolerance is not None:
            self.metrics["actor/price_multiplier"] = batch.meta_info[PRICE_MULTIPLIER]
            # This batch already contains its token prices: the new factor is for the next batch.
            self.price_controller.update(self.metrics["episode/success_rate"])
        return batch

    def generate_rows(self, step: int) -> DataProto:
        """Generate the rows of the tasks of ``step``."""
        tasks = self.envs.gen_batch(step, self.config.data.train_batch_size)
        if self.price_controller.tolerance is not None:
            tasks.meta_info[PRICE_MULTIPLIER] = self.price_controller.multiplier
        # With NUM_RANKS the collector balances the rows over the ranks. With ReMax rows are
        # balanced later, because ``add_baselines`` drops some.
        if self.config.trainer.balance_batch and not uses_greedy_baseline(self.config):
            tasks.meta_info[NUM_RANKS] = self.workers.data_parallel_size
        batch = self.collector.multi_turn_loop(tasks, self.engines, self.envs, is_train=True)
        batch.meta_info["global_step"] = step
        # With filter_groups, or if all tasks of the step failed, the collector returns the tasks
        # that it used.
        tasks = batch.meta_info.pop("tasks", tasks)
        return self.add_baselines(tasks, batch) if uses_greedy_baseline(self.config) else batch

    def add_baselines(self, tasks: DataProto, batch: DataProto) -> DataProto:
        """Add the return of one greedy trajectory per group, the baseline of ReMax.

        Drop a group if its greedy trajectory fails twice.
        """
        tasks_without_return = tasks[tasks.non_tensor_batch["member"] == 0]
        returns: dict[str, float] = {}
        for _ in range(2):
            greedy_batch = self.collector.greedy_loop(tasks_without_return, self.engines, self.envs)
            # Use the token prices of ``batch``: these returns are its baseline.
            greedy_batch.meta_info[PRICE_MULTIPLIER] = batch.meta_info.get(PRICE_MULTIPLIER, 1.0)
            returns |= collect_greedy_returns(greedy_batch, self.reward_fn(greedy_batch))
            uids = tasks_without_return.non_tensor_batch["uid"]
            lacks_return = np.array([uid not in returns for uid in uids])
            if not lacks_return.any():
                break
            tasks_without_return = tasks_without_return[lacks_return]
        return add_reward_baselines(batch, returns)

    def prefetch_next_batch(self) -> None:
        """Start to generate the next batch with the current weights (one-step overlap only)."""
        # A resumed run generates the prefetched batch again, so store the state before that batch.
        self.collector_state = self.collector.state()
        if self.uses_overlap and self.global_step < self.total_steps:
            generate_next_rows = partial(self.generate_rows, self.global_step + 1)
            self.prefetched_batch = BackgroundCall(generate_next_rows, "prefetch")

    def sleep_engines(self) -> None:
        """Free the memory of the engines for training, unless one-step overlap needs them."""
        if not self.uses_overlap:
            with self.clock.measure_part("sleep"):
                self.workers.sleep_engines()

    def score(self, batch: DataProto) -> DataProto:
        """Add old log-probs, columns of the training method and rollout correction weights.

        One forward pass computes the log-probs of the sampled tokens and of the score requests. The
        collector converts the results of the requests into columns.
        """
        batch.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        has_score_requests = BRANCHES in batch.non_tensor_batch
        uses_rollout_log_probs = self.config.algorithm.rollout_correction.bypass_mode
        # With score requests, reorder the rows only after the forward pass. The pass balances the
        # ranks itself, and another order of the rows would change the rounding of log-probs.
        if not has_score_requests:
            self._balance_batch(batch)
        if has_score_requests or not uses_rollout_log_probs:
            with self.clock.measure_part("scoring" if has_score_requests else "old_log_prob"):
                batch = batch.union(self.workers.compute_log_prob(batch))
                if has_score_requests:
                    batch = self.collector.convert_scores_to_estimator_inputs(batch)
            self.metrics |= batch.meta_info.pop("metrics", {})
        if has_score_requests:
            self._balance_batch(batch)
        if "entropys" in batch.tensor_keys():
            entropy = masked_mean(batch.batch["entropys"], batch.batch["response_mask"])
            self.metrics["actor/entropy"] = entropy.item()
        if uses_rollout_log_probs:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"].clone()
        elif not self.config.env.allow_retokenized:  # then some tokens have no rollout log-probs
            self.metrics |= M.compute_train_inference_mismatch(batch) | apply_rollout_correction(
                batch, self.config
            )
        return batch

    def _balance_batch(self, batch: DataProto) -> None:
        """Reorder rows for equal numbers of tokens per rank (``trainer.balance_batch``)."""
        if self.config.trainer.balance_batch:
            balance_rows(batch, self.workers.data_parallel_size)

    def compute_log_probs_and_values(self, batch: DataProto) -> DataProto:
        """Add reference log-probs and values, if the run has a reference or a critic."""
        if self.workers.has_reference:
            with self.clock.measure_part("ref"):
                batch = batch.union(self.workers.compute_ref_log_prob(batch))
        if self.workers.critic_group is not None:
            with self.clock.measure_part("values"):
                batch = batch.union(self.workers.compute_values(batch))
        return batch

    def compute_rewards(self, batch: DataProto) -> DataProto:
        """Add the rewards per token and per turn to ``batch``.

        ``token_level_scores`` and ``step_rewards`` (per turn) come from the reward function.
        ``token_level_rewards`` are the scores, minus the KL penalty if it is enabled.
        """
        with self.clock.measure_part("reward"):
            batch.batch["token_level_scores"] = self.reward_fn(batch)
            batch.non_tensor_batch["step_rewards"] = self.reward_fn.step_rewards(batch)
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            if self.config.algorithm.use_kl_in_reward:
                kl_penalty = self.config.algorithm.kl_penalty
                batch, kl_metrics = apply_kl_penalty(batch, self.kl_ctrl, kl_penalty)
                self.metrics |= kl_metrics
        return batch

    def compute_advantages(self, batch: DataProto) -> DataProto:
        """Add advantages, returns and ``row_shares``, the weights of rows for the loss."""
        with self.clock.measure_part("adv"):
            batch = compute_advantage(batch, self.config)
            self.metrics |= batch.meta_info.pop("metrics", {})
            self.add_row_shares(batch)
        self.metrics |= M.compute_data_metrics(batch) | M.compute_no_advantage_metrics(batch)
        return batch

    def add_row_shares(self, batch: DataProto) -> None:
        """Add ``row_shares`` [B]: the weight of each row, for loss means over sequences.

        A sequence is a row, or all rows of a trajectory (``algorithm.row_weight``).
        """
        batch.batch["row_shares"] = compute_row_shares(
            batch.non_tensor_batch["traj_uid"],
            self.config.algorithm.row_weight,
            batch.batch["response_mask"].sum(-1),
        )

    def update_critic(self, batch: DataProto) -> None:
        """Update the value function, if the run has a critic."""
        if self.workers.critic_group is None:
            return
        with self.clock.measure_part("update_critic"):
            update_results = self.workers.critic_group.update_critic(
                self.shard_rows(batch, "critic")
            )
        self.metrics |= M.reduce_metrics(update_results.meta_info["metrics"])

    def update_actor(self, batch: DataProto) -> None:
        """Update the policy. Skip the first ``trainer.critic_warmup`` steps."""
        if self.global_step <= self.config.trainer.critic_warmup:
            return
        with self.clock.measure_part("update_actor"):
            update_results = self.workers.actor_group.update_actor(self.shard_rows(batch, "actor"))
        update_metrics = M.reduce_metrics(update_results.meta_info["metrics"])
        self.has_new_weights = has_updated_weights(update_metrics)
        self.metrics |= update_metrics

    def shard_rows(self, batch: DataProto, role: str) -> DataProto:
        """Return the columns that the update of ``role`` reads, with rows assigned to ranks."""
        workers = self.workers
        forward_settings = workers.critic_forward if role == "critic" else workers.actor_forward
        return shard_minibatches(
            batch,
            self.config,
            role,
            self.global_step,
            workers.data_parallel_size,
            forward_settings,
        )

    def wake_engines(self) -> None:
        """Allocate memory for the weights of sleeping engines."""
        with self.clock.measure_part("update_weights"):
            self.workers.wake_engines()

    def sync_weights(self) -> None:
        """Wait for the prefetched rollout, send the weights to every engine and verify them."""
        if self.prefetched_batch is not None:
            with self.clock.measure_part("wait_for_plays"):
                self.prefetched_batch.wait()
        with self.clock.measure_part("update_weights"):
            version = self.global_step
            self.metrics |= self.workers.sync_weights(version, is_updated=self.has_new_weights)
        self.has_new_weights = False

    # ------------------------------------------------------------------ after a step

    def log_validate_save(self, batch: DataProto) -> None:
        """Log the step. Validate and save a checkpoint if due at this step."""
        trainer = self.config.trainer
        is_last_step = self.global_step >= self.total_steps
        self.metrics |= M.compute_throughput_metrics(
            batch, self.clock.seconds["step"], self.workers.data_parallel_size
        )
        self.step_warnings.log_new_warnings(self.global_step, self.metrics)
        if trainer.test_freq > 0 and (is_last_step or self.global_step % trainer.test_freq == 0):
            self.validate()
        num_used_tasks = (self.global_step - 1) * self.config.data.train_batch_size
        self.metrics["training/epoch"] = num_used_tasks / len(self.envs.task_list)
        # Log before the checkpoint: a resumed run deletes logged steps after its checkpoint.
        self.journal.log_step(self.global_step, self.drain_metrics())
        # save_freq=-1 saves after the last step only.
        is_save_due = trainer.save_freq > 0 and self.global_step % trainer.save_freq == 0
        if is_save_due or (is_last_step and trainer.save_freq != 0):
            self.save()

    def validate(self) -> DataProto:
        """Generate the rows of the validation set, log them and add their metrics."""
        with self.clock.measure_part("testing"):
            tasks = self.val_envs.panel_batch()
            tasks.meta_info["global_step"] = self.global_step
            batch = self.collector.multi_turn_loop(
                tasks, self.engines, self.val_envs, is_train=False
            )
        self.metrics |= M.compute_validation_metrics(batch)
        self.journal.log_rollouts(self.global_step, batch, validation=True)
        return batch

    def save(self) -> None:
        """Start to write an atomic checkpoint: weights, optimizer, schedule, counters."""
        with self.clock.measure_part("save_checkpoint"):
            state = {
                "global_step": self.global_step,
                "kl_coef": self.kl_ctrl.value,
                "price": self.price_controller.state(),
                "panel": self.val_envs.panel_hash,
                "collector": self.collector_state,
            }
            self.checkpoints.save(self.global_step, self.write_state, state)

    def write_state(self, directory: Path) -> Callable[[], list[WrittenFiles]]:
        """Start to write the state of the workers below ``directory``.

        The returned function flushes the journal (metrics and trajectories) and then waits until
        the state is written. So the journal contains every step that a checkpoint contains.
        """
        wait_for_workers = self.workers.save_checkpoint(directory)

        def wait_for_files() -> list[WrittenFiles]:
            self.journal.flush()
            return wait_for_workers()

        return wait_for_files

    def drain_metrics(self) -> dict[str, float]:
        """Return the numeric metrics and timings since the last call, and reset them."""
        all_metrics = self.metrics | self.clock.pop_metrics()
        all_metrics["training/global_step"] = float(self.global_step)
        self.metrics = {}
        numeric_types = (int, float, np.number, np.bool_)
        return {
            key: float(value)
            for key, value in all_metrics.items()
            if isinstance(value, numeric_types)
        }
