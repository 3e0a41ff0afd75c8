"""TrajectoryCollector: generates the trajectories of a batch of tasks and packs them into rows.

    vanilla   generate ──▶ drop failed trajectories ──▶ pack   (other tasks if nothing is left)
    rlvcr     the same with alternative thoughts (at other levels) and score requests in the rows
    dynamic   generate for new tasks until enough groups have returns that differ, then pack
    greedy    one trajectory per task at temperature 0: baseline returns, never trained on

A score request asks for the log-probs or entropies of an action after a thought. Training workers
answer the requests when the trainer calls ``score``.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from agent_system.environments.env_registry import get_package
from agent_system.environments.manager import EnvironmentManagerBase
from agent_system.multi_turn_rollout.audit_rollouts import (
    AuditRollouts,
    RecordedTrajectory,
    build_recorded_specs,
    check_replays,
    measure_option_returns,
    sample_alternative_actions,
    select_decision_points,
)
from agent_system.multi_turn_rollout.collector_group import CollectorGroup
from agent_system.multi_turn_rollout.collector_worker import CollectedTrajectories, PolicyTokenizer
from agent_system.multi_turn_rollout.engine_client import RolloutWorkerHandle
from agent_system.multi_turn_rollout.metrics import (
    compute_episode_metrics,
    compute_rollout_metrics,
    compute_summary_metrics,
    split_rollout_time,
)
from agent_system.multi_turn_rollout.packing import (
    TrajectoryRow,
    build_row_turns,
    build_rows,
    collate_rows,
    list_trajectories,
    rebuild_last_conversations,
    select_groups_with_differing_returns,
    select_usable_trajectories,
)
from agent_system.multi_turn_rollout.partial_rollouts import PartialRollouts, select_groups
from agent_system.multi_turn_rollout.rollout_settings import (
    RolloutSettings,
    check_compaction,
    check_level_prompts,
    refuse_images,
    should_request_levels,
)
from agent_system.multi_turn_rollout.stored_trajectories import load_trajectories
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory, make_rollout_specs
from agent_system.tokens.bridge import ChatBridge, find_padding_token_id
from agent_system.tokens.template_support import check_template_support
from rlvcr.level_metrics import LevelCollapseDetector
from rlvcr.levels import LevelCodec
from rlvcr.research.level_rules import FREE_RULE, LevelRule
from rlvcr.scoring import (
    add_group_price_credit,
    add_level_entropy_bonus,
    add_score_requests,
    add_thinking_advantages,
)
from rlvcr.settings import get_rlvcr_settings
from verl.config.schema import PPOConfig
from verl.protocol import DataProto, object_array
from verl.records import BRANCHES, MESSAGES, NUM_RANKS, PRICE_MULTIPLIER, SPANS
from verl.utils.jsonl import RowEncoder
from verl.utils.seqlen_balancing import order_rows_for_ranks

logger = logging.getLogger(__name__)
# Number of batches of other tasks after a batch in which every trajectory failed.
MAX_REPLACEMENT_BATCHES = 3


class RolloutEngines(Protocol):
    """Object with the rollout workers (inference engines)."""

    @property
    def rollout_workers(self) -> Sequence[RolloutWorkerHandle]: ...


@runtime_checkable
class ScoringWorkers(RolloutEngines, Protocol):
    """Rollout engines together with training workers that compute log-probs."""

    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Return old log-probs of rows, and scores (log-probs and entropies) of requested actions.

        The column ``spans`` requests scores of actions in the row, ``branches`` scores of the same
        actions after alternative thoughts (at other thinking levels).
        """
        ...


class TrajectoryCollector:
    """Collector that generates trajectories with the policy and returns them as rows.

    ``processor`` is for policies that see images; a caller with one must provide workers that read
    ``multi_modal_data``.

    Raises:
        UnsupportedTemplateError: The tokenizer's chat template does not support ``env.history``.
        ValueError: Thinking levels cannot be read with this tokenizer, or the environment shows
            images and there is no processor.
    """

    def __init__(
        self, config: PPOConfig, tokenizer: PolicyTokenizer, processor: object = None
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.processor = processor
        self.package = get_package(config.env.env_name)
        if processor is None:
            refuse_images(config)
        check_compaction(config, self.package)
        template_support = check_template_support(tokenizer, config.data.apply_chat_template_kwargs)
        template_support.check_history_support(config.env.history)
        if not template_support.renders_system_message:
            logger.warning(
                "the chat template has no system message; its text is put before the first user "
                "message"
            )
        self.codec = LevelCodec(tokenizer) if should_request_levels(config) else None
        rlvcr = get_rlvcr_settings(config.algorithm)
        self.collapse_detector = LevelCollapseDetector(rlvcr.collapse_patience)
        self.partial_rollouts = PartialRollouts(config.env.rollout.carry_over)
        self._collector_group: CollectorGroup | None = None

    def multi_turn_loop(
        self,
        gen_batch: DataProto,
        actor_rollout_wg: RolloutEngines,
        envs: EnvironmentManagerBase,
        is_train: bool = True,
    ) -> DataProto:
        """Generate trajectories for a batch of tasks, and return their rows.

        ``gen_batch`` is ``envs.gen_batch`` or ``envs.panel_batch``. ``actor_rollout_wg`` has
        ``rollout_workers``. If it also has ``compute_log_prob``, the credit of RLVCR is computed
        here. The result's ``meta_info`` contains ``metrics``, ``timing`` (seconds) and ``tasks``.
        These are the tasks of the returned rows: if all tasks of ``gen_batch`` failed, other tasks
        were used. Validation samples no alternative thoughts. It keeps failed trajectories, but
        rates such as the success rate do not count them.

        Raises:
            RuntimeError: No trajectory can be trained on, also after trying other tasks.
            GroupMismatch: Members of a group did not start from the same state.
            RolloutWorkerFailed, WorkerStartError: A rollout worker failed, or no environment can be
                started.
        """
        if not is_train:
            return self.vanilla_multi_turn_loop(gen_batch, actor_rollout_wg, envs, is_train=False)
        if self.config.algorithm.filter_groups.enable:
            return self.dynamic_multi_turn_loop(gen_batch, actor_rollout_wg, envs)
        if get_rlvcr_settings(self.config.algorithm).enable:
            return self.rlvcr_multi_turn_loop(gen_batch, actor_rollout_wg, envs)
        return self.vanilla_multi_turn_loop(gen_batch, actor_rollout_wg, envs)

    def vanilla_multi_turn_loop(
        self,
        gen_batch: DataProto,
        actor_rollout_wg: RolloutEngines,
        envs: EnvironmentManagerBase,
        is_train: bool = True,
    ) -> DataProto:
        """Generate trajectories without alternative thoughts, and return their rows."""
        if not is_train:
            return self.panel_loop(gen_batch, actor_rollout_wg)
        data, _ = self._generate_training_rows(
            gen_batch, actor_rollout_wg, envs, samples_alternatives=False
        )
        return data

    def panel_loop(
        self,
        validation_batch: DataProto,
        actor_rollout_wg: RolloutEngines,
        level_rule: LevelRule = FREE_RULE,
    ) -> DataProto:
        """Generate one trajectory per task of a validation batch, failed ones included.

        ``level_rule`` can force the thinking level of a turn; by default the policy chooses it.
        """
        return self._generate_untrained_rows(
            validation_batch, actor_rollout_wg, level_rule=level_rule
        )

    def greedy_loop(
        self,
        gen_batch: DataProto,
        actor_rollout_wg: RolloutEngines,
        envs: EnvironmentManagerBase,  # noqa: ARG002  the loops are called alike
    ) -> DataProto:
        """Generate one trajectory per row at temperature 0, failed ones included."""
        return self._generate_untrained_rows(
            gen_batch, actor_rollout_wg, temperature=0.0, trajectories_per_row=1
        )

    def _generate_untrained_rows(
        self, tasks: DataProto, actor_rollout_wg: RolloutEngines, **changed_settings: Any
    ) -> DataProto:
        settings = self._build_settings(is_train=False, samples_alternatives=False)
        settings = replace(settings, **changed_settings)
        collected = self._generate_batch(tasks, actor_rollout_wg, settings)
        return self.pack_collected_trajectories(collected, is_train=False)[0]

    def rlvcr_multi_turn_loop(
        self, gen_batch: DataProto, actor_rollout_wg: RolloutEngines, envs: EnvironmentManagerBase
    ) -> DataProto:
        """Generate trajectories and alternative thoughts (at other levels), and return the rows.

        Rows contain score requests for the log-prob and entropy of an action after each thought. If
        ``actor_rollout_wg`` has ``compute_log_prob``, the rows get old log-probs and thinking
        advantages here. Otherwise the trainer's ``score`` computes them.
        """
        data, _ = self._generate_training_rows(
            gen_batch, actor_rollout_wg, envs, samples_alternatives=True
        )
        return self._try_add_thinking_advantages(data, actor_rollout_wg)

    def audit_loop(
        self,
        gen_batch: DataProto,
        actor_rollout_wg: ScoringWorkers,
        envs: EnvironmentManagerBase,
        recorded: Sequence[RecordedTrajectory] = (),
    ) -> AuditRollouts:
        """Generate trajectories for a credit audit, and measure effects of options on the return.

        The options of a turn are the four thinking levels, or ``audit_actions`` actions. At
        ``audit_points`` turns each option is executed ``audit_plays`` times. The rows also get the
        log-probs from which the audited rules compute credit. ``recorded`` trajectories are
        replayed instead of generating new ones.
        """
        rlvcr = get_rlvcr_settings(self.config.algorithm)
        has_levels = self.codec is not None
        if recorded:
            data, rows = self._replay_recorded(recorded, actor_rollout_wg, gen_batch.meta_info)
        else:
            data, rows = self._generate_training_rows(
                gen_batch, actor_rollout_wg, envs, samples_alternatives=has_levels
            )
        if self.codec is not None:
            # Replace the score requests: with credit=posterior the log-probs of the four level
            # digits are needed too.
            add_score_requests(data, build_row_turns(rows), self.codec.digit_ids)
        data.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        scored_data = data.union(actor_rollout_wg.compute_log_prob(data))
        data = (
            self.convert_scores_to_estimator_inputs(scored_data.select())
            if has_levels
            else scored_data
        )
        settings = self._build_settings(is_train=True, samples_alternatives=False)
        trajectories = load_trajectories(list_trajectories(rows))
        decision_points = select_decision_points(
            trajectories, data, rlvcr.audit_points, settings.seed, has_levels
        )

        def generate(specs: Sequence[RolloutSpec]) -> list[Trajectory]:
            collected = self._generate_specs(specs, actor_rollout_wg, settings)
            return load_trajectories(collected.trajectories)

        points_with_options = decision_points
        if not has_levels:
            points_with_options = sample_alternative_actions(
                decision_points, generate, rlvcr.audit_actions
            )
        audited_turns = measure_option_returns(points_with_options, generate, rlvcr.audit_plays)
        data.meta_info["metrics"]["audit/points_failed"] = float(
            len(decision_points) - len(audited_turns)
        )
        return AuditRollouts(data, scored_data, audited_turns)

    def dynamic_multi_turn_loop(
        self, gen_batch: DataProto, actor_rollout_wg: RolloutEngines, envs: EnvironmentManagerBase
    ) -> DataProto:
        """Generate batches until as many groups as in ``gen_batch`` have returns that differ.

        After ``max_num_gen_batches`` batches the groups found so far are used. If there are none,
        the last batch with usable trajectories is used.
        """
        samples_alternatives = bool(get_rlvcr_settings(self.config.algorithm).enable)
        settings = self._build_settings(is_train=True, samples_alternatives=samples_alternatives)
        step = gen_batch.meta_info["global_step"]
        num_groups_wanted = len(set(gen_batch.non_tensor_batch["uid"]))
        max_batches = self.config.algorithm.filter_groups.max_num_gen_batches
        all_collected = CollectedTrajectories([], 0.0, 0.0)
        kept_groups: list[list[Trajectory]] = []
        last_usable_trajectories: list[Trajectory] = []
        batches: list[DataProto] = []
        while len(batches) < max_batches and len(kept_groups) < num_groups_wanted:
            # The first batch is ``gen_batch``. Later batches have other tasks.
            batches.append(
                envs.gen_batch(step, num_groups_wanted, len(batches)) if batches else gen_batch
            )
            collected = self._generate_batch(batches[-1], actor_rollout_wg, settings)
            all_collected.add(collected)
            usable_trajectories = select_usable_trajectories(
                collected.trajectories, self.config.env.on_abort
            )[0]
            kept_groups += select_groups_with_differing_returns(
                usable_trajectories, num_groups_wanted - len(kept_groups)
            )
            # If the returns of every group of all attempts are equal, train on the latest usable
            # trajectories, because a step without rows would end the run.
            last_usable_trajectories = usable_trajectories or last_usable_trajectories
        num_kept_groups = len(kept_groups)
        if num_kept_groups < num_groups_wanted:
            warning_format = "%d batches gave %d of %d groups with returns that differ"
            logger.warning(warning_format, max_batches, num_kept_groups, num_groups_wanted)
        trained_trajectories = [trajectory for group in kept_groups for trajectory in group]
        data, rows = self.pack_collected_trajectories(
            all_collected,
            packed_trajectories=trained_trajectories or last_usable_trajectories,
            task_meta_info=gen_batch.meta_info,
        )
        trained_uids = set(data.non_tensor_batch["uid"])
        data.meta_info["tasks"] = select_groups(DataProto.concat(batches), trained_uids)
        data.meta_info["metrics"]["rollout/gen_batches"] = float(len(batches))
        data.meta_info["metrics"]["rollout/groups_with_spread"] = float(num_kept_groups)
        self._add_level_columns(data, rows, samples_alternatives)
        if samples_alternatives:
            return self._try_add_thinking_advantages(data, actor_rollout_wg)
        return data

    def convert_scores_to_estimator_inputs(self, data: DataProto) -> DataProto:
        """Replace scores in ``data`` by thinking advantages: the credit for the chosen levels.

        The columns ``branch_scores`` and ``span_scores`` and their requests are removed.
        """
        return add_thinking_advantages(data, self.config)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        It has the groups in flight, and the steps since each thinking level was last sampled.
        """
        return {
            "under_way": self.partial_rollouts.group_names(),
            "levels_unseen": self.collapse_detector.state(),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state`` of a checkpoint. Unfinished groups are generated again."""
        self.partial_rollouts.resume(state.get("under_way", []))
        self.collapse_detector.resume(state.get("levels_unseen", []))

    def start_collectors(self, rollout_workers: Sequence[RolloutWorkerHandle]) -> CollectorGroup:
        """Return the collector workers for ``rollout_workers``, started at the first call."""
        if self._collector_group is None:
            self._collector_group = CollectorGroup(
                self.config.env,
                self.tokenizer,
                rollout_workers,
                external_lib=self.config.actor_rollout_ref.model.external_lib,
                template_kwargs=self.config.data.apply_chat_template_kwargs,
            )
        return self._collector_group

    def encode_rows(self, data: DataProto, encode: RowEncoder) -> Iterable[memoryview]:
        """Return a JSON line for each row of ``data``, encoded by the collectors if they run."""
        if self._collector_group is None:
            return encode(data, self.tokenizer)
        return self._collector_group.encode_rows(data, encode)

    def close(self) -> None:
        """Stop the collector workers and their environments."""
        collector_group, self._collector_group = self._collector_group, None
        if collector_group is not None:
            collector_group.close()

    # ---- generation ----

    def _build_settings(self, is_train: bool, samples_alternatives: bool) -> RolloutSettings:
        check_level_prompts(self.config, self.package)
        return RolloutSettings.from_config(
            self.config, self.package, is_train, samples_alternatives
        )

    def _generate_batch(
        self, gen_batch: DataProto, actor_rollout_wg: RolloutEngines, settings: RolloutSettings
    ) -> CollectedTrajectories:
        specs = make_rollout_specs(gen_batch, settings.trajectories_per_row)
        return self._generate_specs(specs, actor_rollout_wg, settings)

    def _generate_specs(
        self,
        specs: Sequence[RolloutSpec],
        actor_rollout_wg: RolloutEngines,
        settings: RolloutSettings,
    ) -> CollectedTrajectories:
        return self.start_collectors(actor_rollout_wg.rollout_workers).collect(specs, settings)

    def _generate_groups(
        self,
        gen_batch: DataProto,
        actor_rollout_wg: RolloutEngines,
        envs: EnvironmentManagerBase,
        settings: RolloutSettings,
    ) -> CollectedTrajectories:
        """Generate as many groups as ``gen_batch`` has.

        With ``env.rollout.carry_over`` these are the first groups that finish. They may have been
        started in earlier calls.
        """
        if not self.partial_rollouts.num_groups:
            return self._generate_batch(gen_batch, actor_rollout_wg, settings)
        full_batch = self.partial_rollouts.add_groups(gen_batch, envs)
        specs = make_rollout_specs(full_batch, settings.trajectories_per_row)
        collectors = self.start_collectors(actor_rollout_wg.rollout_workers)
        collected = collectors.collect_finished_groups(
            specs, settings, max_unfinished_groups=self.partial_rollouts.num_groups
        )
        self.partial_rollouts.remove_returned(collected.trajectories)
        return collected

    def _replay_recorded(
        self,
        recorded: Sequence[RecordedTrajectory],
        engines: RolloutEngines,
        task_meta_info: Mapping[str, Any],
    ) -> tuple[DataProto, list[TrajectoryRow]]:
        """Replay the ``recorded`` trajectories of a file and pack them into rows."""
        samples_alternatives = self.codec is not None
        encode = ChatBridge(self.tokenizer, self.config.data.apply_chat_template_kwargs).encode_text
        specs = build_recorded_specs(recorded, self.package, encode)
        settings = self._build_settings(is_train=True, samples_alternatives=samples_alternatives)
        collected = self._generate_specs(specs, engines, settings)
        check_replays(recorded, collected.trajectories)
        data, rows = self.pack_collected_trajectories(collected, task_meta_info=task_meta_info)
        self._add_level_columns(data, rows, samples_alternatives)
        return data, rows

    # ---- rows ----

    def _generate_training_rows(
        self,
        gen_batch: DataProto,
        actor_rollout_wg: RolloutEngines,
        envs: EnvironmentManagerBase,
        samples_alternatives: bool,
    ) -> tuple[DataProto, list[TrajectoryRow]]:
        """Generate trajectories and return their rows. If all of them failed, use other tasks."""
        settings = self._build_settings(is_train=True, samples_alternatives=samples_alternatives)
        task_meta_info = gen_batch.meta_info
        all_collected = self._generate_groups(gen_batch, actor_rollout_wg, envs, settings)
        for batch_in_step in range(1, MAX_REPLACEMENT_BATCHES + 1):
            usable_trajectories, dropped_counts = select_usable_trajectories(
                all_collected.trajectories, self.config.env.on_abort
            )
            # Other tasks help after failures, but not if every first prompt is too long.
            if usable_trajectories or not dropped_counts["rollout/left_out_aborted"]:
                break
            logger.warning(
                "no trajectory of this batch can be trained on: generating other tasks (%d of %d)",
                batch_in_step,
                MAX_REPLACEMENT_BATCHES,
            )
            num_groups = len(set(gen_batch.non_tensor_batch["uid"]))
            # Replace ``gen_batch``, so that the result contains the tasks that were generated last.
            gen_batch = envs.gen_batch(
                gen_batch.meta_info["global_step"], num_groups, batch_in_step
            )
            all_collected.add(self._generate_batch(gen_batch, actor_rollout_wg, settings))
        data, rows = self.pack_collected_trajectories(all_collected, task_meta_info=task_meta_info)
        data.meta_info["tasks"] = gen_batch
        self._add_level_columns(data, rows, samples_alternatives)
        return data, rows

    def pack_collected_trajectories(
        self,
        collected: CollectedTrajectories,
        is_train: bool = True,
        packed_trajectories: Sequence[Trajectory] | None = None,
        task_meta_info: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[DataProto, list[TrajectoryRow]]:
        """Pack ``packed_trajectories`` into rows of a batch; default: all that can be trained on.

        Metrics are computed from all ``collected`` trajectories. ``task_meta_info`` is
        ``meta_info`` of the trainer's tasks: the factor of token prices, and the number of ranks.
        Rows are ordered for these ranks, except with thinking levels or a reward model.
        """
        start_s = time.perf_counter()
        usable_trajectories = collected.trajectories
        dropped_counts: dict[str, float] = {}
        if is_train:
            usable_trajectories, dropped_counts = select_usable_trajectories(
                collected.trajectories, self.config.env.on_abort
            )
        if packed_trajectories is None:
            packed_trajectories = usable_trajectories
        if not packed_trajectories:
            raise RuntimeError(f"no trajectory can be trained on; dropped: {dropped_counts}")
        rows = build_rows(packed_trajectories)
        num_ranks = 1
        if self.codec is None and not self.config.reward_model.enable:
            num_ranks = task_meta_info.get(NUM_RANKS, 1)
            # Order the rows before they are padded: later all columns would have to be copied.
            row_lengths = [row.response_end for row in rows]
            rows = [rows[index] for index in order_rows_for_ranks(row_lengths, num_ranks)]
        # Validation rows are measured and never trained on.
        allows_retokenized = self.config.env.allow_retokenized or not is_train
        data = collate_rows(
            rows, find_padding_token_id(self.tokenizer), allow_retokenized=allows_retokenized
        )
        data.meta_info[NUM_RANKS] = num_ranks
        data.meta_info[PRICE_MULTIPLIER] = task_meta_info.get(PRICE_MULTIPLIER, 1.0)
        if self.config.reward_model.enable and is_train:
            loaded_rows = build_rows(load_trajectories(packed_trajectories))
            data.non_tensor_batch[MESSAGES] = object_array(rebuild_last_conversations(loaded_rows))
        data.meta_info["metrics"] = {
            **compute_rollout_metrics(collected.trajectories, collected.rollout_s),
            **compute_episode_metrics(collected.trajectories),
            **dropped_counts,
            "rollout/env_restarts": float(collected.env_restarts),
            "rollout/collectors_lost": float(collected.lost_collectors),
        }
        if self.config.env.compact.enable:
            data.meta_info["metrics"] |= compute_summary_metrics(collected.trajectories)
        if is_train and self.codec is not None:
            unseen_levels = self.collapse_detector.update(
                [turn.chosen_level for row in rows for turn in row.turns]
            )
            data.meta_info["metrics"]["rlvcr/levels_unseen"] = float(len(unseen_levels))
        data.meta_info["timing"] = {
            **split_rollout_time(collected.trajectories, collected.rollout_s, collected.thoughts_s),
            "pack": time.perf_counter() - start_s,
        }
        return data, rows

    def _add_level_columns(
        self, data: DataProto, rows: Sequence[TrajectoryRow], samples_alternatives: bool
    ) -> None:
        """Add columns of the level entropy bonus, score requests and credit for token prices."""
        if self.codec is None:
            return
        rlvcr = get_rlvcr_settings(self.config.algorithm)
        row_turns = build_row_turns(rows)
        if samples_alternatives or rlvcr.thinking_diversity_w:
            add_level_entropy_bonus(data, row_turns, rlvcr, self.codec)
        if samples_alternatives:
            digit_ids = self.codec.digit_ids if rlvcr.credit == "posterior" else ()
            add_score_requests(data, row_turns, digit_ids)
        elif self.config.algorithm.adv_estimator == "level_groups":
            add_group_price_credit(data, row_turns, rlvcr)

    def _try_add_thinking_advantages(self, data: DataProto, workers: RolloutEngines) -> DataProto:
        """Add thinking advantages if ``workers`` compute log-probs; else the trainer adds them."""
        if not isinstance(workers, ScoringWorkers):
            return data
        start_s = time.perf_counter()
        score_requests = data.select(None, [BRANCHES, SPANS], [])
        score_requests.meta_info["temperature"] = self.config.actor_rollout_ref.rollout.temperature
        data = self.convert_scores_to_estimator_inputs(
            data.union(workers.compute_log_prob(score_requests))
        )
        data.meta_info["timing"]["scoring"] = time.perf_counter() - start_s
        return data
