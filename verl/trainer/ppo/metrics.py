"""Metrics of one training step or validation, and warnings about steps with little signal."""

import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

import numpy as np
import torch

from verl.config.schema import PPOConfig
from verl.protocol import DataProto
from verl.records import ANSWER, INFO_NUMBERS, REWARD_PARTS
from verl.report_sections import compute_contributed_metrics
from verl.utils.statistics import (
    best_at_k,
    list_k_values,
    maj_at_k,
    make_interval_metrics,
    pass_at_k,
    rate_interval,
)
from verl.utils.torch_functional import select_where

logger = logging.getLogger(__name__)
WARNING_SHARE = 0.95  # share of truncated trajectories from which a step causes a warning
TRUNCATED_TURNS_METRIC = "rollout/truncated_length"
FULL_ROWS_METRIC = "rollout/truncated_budget"
WITHOUT_ADVANTAGE_METRIC = "critic/rows_without_advantage"
EQUAL_GROUPS_METRIC = "critic/groups_of_equal_returns"


def summarize_values(name: str, values: torch.Tensor) -> dict[str, float]:
    """Return ``name/{mean,max,min}`` of ``values`` [N]; {} if there are no values."""
    if values.numel() == 0:
        return {}
    values = values.float()
    value_by_statistic = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{statistic}": value.item() for statistic, value in value_by_statistic.items()}


def compute_data_metrics(batch: DataProto) -> dict[str, float]:
    """Return statistics of scores, rewards, advantages, returns, values and lengths of ``batch``.

    Scores and rewards are sums per row [B]. Advantages, returns and values are taken over sampled
    tokens only.
    """
    mask = batch.batch["response_mask"].bool()
    prompt_width = batch.batch["prompts"].shape[1]
    attention_mask = batch.batch["attention_mask"]
    data_metrics = {
        **summarize_values("critic/score", batch.batch["token_level_scores"].sum(-1)),
        **summarize_values("critic/rewards", batch.batch["token_level_rewards"].sum(-1)),
        **summarize_values("critic/advantages", select_where(batch.batch["advantages"], mask)),
        **summarize_values("critic/returns", select_where(batch.batch["returns"], mask)),
        **summarize_values("response_length", attention_mask[:, prompt_width:].sum(-1)),
        **summarize_values("prompt_length", attention_mask[:, :prompt_width].sum(-1)),
    }
    if "values" in batch.tensor_keys():
        data_metrics |= summarize_values("critic/values", select_where(batch.batch["values"], mask))
    return data_metrics | compute_reward_part_metrics(batch) | compute_env_info_metrics(batch)


def compute_reward_part_metrics(batch: DataProto) -> dict[str, float]:
    """Return ``reward/<name>/{mean,max,min,graded}`` of the named parts of rewards.

    A reward is a sum of parts such as ``accuracy`` and ``format``. Each trajectory counts once.
    ``graded`` is the number of trajectories that have the part ``name``; the others are ignored.
    """
    part_metrics: dict[str, float] = {}
    for name, values in _collect_values_by_name(batch, REWARD_PARTS).items():
        part_metrics |= summarize_values(f"reward/{name}", torch.tensor(values))
        part_metrics[f"reward/{name}/graded"] = float(len(values))
    return part_metrics


def compute_env_info_metrics(batch: DataProto) -> dict[str, float]:
    """Return ``env/<name>/mean`` of the numbers in the ``info`` of graded trajectories."""
    values_by_name = _collect_values_by_name(batch, INFO_NUMBERS)
    return {
        f"env/{name}/mean": sum(values) / len(values) for name, values in values_by_name.items()
    }


def _collect_values_by_name(batch: DataProto, column_name: str) -> dict[str, list[float]]:
    """Return all values by key, from the dictionaries of graded trajectories in the column."""
    values_by_key: dict[str, list[float]] = defaultdict(list)
    if column_name in batch.non_tensor_batch:
        for value_by_key in batch.non_tensor_batch[column_name][list_graded_first_rows(batch)]:
            for key, value in value_by_key.items():
                values_by_key[key].append(value)
    return values_by_key


def compute_train_inference_mismatch(batch: DataProto) -> dict[str, float]:
    """Return the train-inference mismatch of the sampled tokens.

    ``rollout_probs_diff`` is ``|exp(rollout_log_probs) - exp(old_log_probs)|``.
    ``rollout_log_probs_diff_max`` is the largest difference of the log-probs, in nats.
    """
    mask = batch.batch["response_mask"].bool()
    rollout_log_probs = select_where(batch.batch["rollout_log_probs"], mask).float()
    trainer_log_probs = select_where(batch.batch["old_log_probs"], mask).float()
    if rollout_log_probs.numel() == 0:
        return {}
    probability_difference = (rollout_log_probs.exp() - trainer_log_probs.exp()).abs()
    log_prob_difference = (rollout_log_probs - trainer_log_probs).abs()
    return {
        "training/rollout_probs_diff_mean": probability_difference.mean().item(),
        "training/rollout_probs_diff_max": probability_difference.max().item(),
        # The unbiased std would be NaN for a single token.
        "training/rollout_probs_diff_std": probability_difference.std(unbiased=False).item(),
        "training/rollout_log_probs_diff_max": log_prob_difference.max().item(),
    }


def compute_staleness(metrics: Mapping[str, float], step: int) -> dict[str, float]:
    """Return ``training/staleness`` and ``staleness_max``; {} if policy versions are unknown.

    Staleness is the number of updates between the policy that sampled a token and the policy before
    the update of ``step``. At step 5 a token of version 3 has staleness 1.
    """
    if "rollout/policy_version" not in metrics:
        return {}
    return {
        "training/staleness": step - 1 - metrics["rollout/policy_version"],
        "training/staleness_max": step - 1 - metrics["rollout/policy_version_min"],
    }


def compute_throughput_metrics(batch: DataProto, seconds: float, devices: int) -> dict[str, float]:
    """Return ``perf/*``: tokens of the batch without padding, per second and device."""
    num_tokens = int(batch.batch["attention_mask"].sum())
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / max(seconds, 1e-9) / max(devices, 1),
    }


def compute_no_advantage_metrics(batch: DataProto) -> dict[str, float]:
    """Return the share of rows without advantage, and the share of groups with equal returns.

    A row has no advantage if its advantages [R] are 0 on all sampled tokens. Groups with one
    trajectory do not count. If all groups have one trajectory, the second metric is omitted.
    """
    sampled_mask = batch.batch["response_mask"].bool()
    has_advantage = ((batch.batch["advantages"] != 0) & sampled_mask).any(-1).float()
    metrics = {WITHOUT_ADVANTAGE_METRIC: 1.0 - has_advantage.mean().item()}
    group_ids = batch.non_tensor_batch["uid"]
    row_returns = batch.batch["token_level_rewards"].sum(-1).tolist()
    returns_by_group: dict[str, list[float]] = defaultdict(list)
    # Each row has the return of its whole trajectory.
    for row in list_trajectory_first_rows(batch):
        returns_by_group[str(group_ids[row])].append(row_returns[row])
    return_ranges = [np.ptp(returns) for returns in returns_by_group.values() if len(returns) > 1]
    if return_ranges:
        metrics[EQUAL_GROUPS_METRIC] = return_ranges.count(0) / len(return_ranges)
    return metrics


def list_trajectory_first_rows(batch: DataProto) -> np.ndarray:
    """Return the index of the first row of every trajectory, in order of appearance."""
    _, first_rows = np.unique(batch.non_tensor_batch["traj_uid"].astype(str), return_index=True)
    # np.unique sorts by traj_uid. Sort the indices to restore the order of the rows.
    return np.sort(first_rows)


def list_graded_first_rows(batch: DataProto) -> np.ndarray:
    """Return the index of the first row of every trajectory that did not fail (``aborted``)."""
    first_rows = list_trajectory_first_rows(batch)
    aborted_flags = batch.non_tensor_batch.get("aborted")
    return (
        first_rows if aborted_flags is None else first_rows[~aborted_flags[first_rows].astype(bool)]
    )


def compute_validation_metrics(batch: DataProto) -> dict[str, float]:
    """Return success, return, length and tokens on the validation set, with a bootstrap interval.

    Each trajectory counts once. Rates and means are over graded trajectories (those that did not
    fail), and are omitted if there are none.
    """
    columns = batch.non_tensor_batch
    all_first_rows = list_trajectory_first_rows(batch)
    graded_rows = list_graded_first_rows(batch)
    metrics = {
        "val/tasks": float(len(set(columns["uid"][all_first_rows].tolist()))),
        "val/trajectories": float(len(all_first_rows)),
        "val/graded": float(len(graded_rows)),
        "val/aborted": float(len(all_first_rows) - len(graded_rows)),
    }
    if not len(graded_rows):
        return metrics | compute_contributed_metrics(batch, "val")
    is_success = columns["won"][graded_rows].astype(float)
    # Resample tasks, because trajectories of one task are not independent of each other.
    success_bounds = rate_interval(average_per_task(is_success, columns["uid"][graded_rows]))
    tokens_by_trajectory: Counter[str] = Counter()
    row_tokens = batch.batch["response_mask"].sum(-1).tolist()
    for trajectory, tokens in zip(columns["traj_uid"], row_tokens, strict=True):
        tokens_by_trajectory[trajectory] += tokens
    tokens_per_episode = [
        tokens_by_trajectory[uid] for uid in columns["traj_uid"][graded_rows].tolist()
    ]
    metrics |= {
        **make_interval_metrics("val/success_rate", is_success.mean(), *success_bounds),
        "val/episode_reward": float(columns["episode_rewards"][graded_rows].astype(float).mean()),
        "val/episode_length": float(columns["episode_lengths"][graded_rows].astype(float).mean()),
        "val/tokens_per_episode": float(np.mean(tokens_per_episode)),
    }
    trajectory_sources = columns["data_source"][graded_rows].astype(str)
    for source in np.unique(trajectory_sources):
        is_from_source = trajectory_sources == source
        source_rows = graded_rows[is_from_source]
        returns = columns["episode_rewards"][source_rows].astype(float)
        metrics[f"val/{source}/success_rate"] = float(is_success[is_from_source].mean())
        metrics[f"val/{source}/episode_reward"] = float(returns.mean())
        metrics[f"val/{source}/graded"] = float(len(source_rows))
        for name, value in compute_at_k_metrics(batch, source_rows).items():
            metrics[name.replace("val/", f"val/{source}/", 1)] = value
    extra_metrics = compute_reward_part_metrics(batch) | compute_env_info_metrics(batch)
    metrics |= {f"val/{name}": value for name, value in extra_metrics.items()}
    metrics |= compute_at_k_metrics(batch, graded_rows)
    return metrics | compute_contributed_metrics(batch, "val")


def compute_at_k_metrics(batch: DataProto, rows: np.ndarray) -> dict[str, float]:
    """Return ``val/{pass,best,maj}@k`` of tasks with several trajectories; {} if there are none.

    ``pass@k`` is success of the best of k trajectories, ``best@k`` their best return, ``maj@k``
    success of the majority answer. ``rows`` are the first rows of the graded trajectories. k is
    1, 2, 4, ... and the number of trajectories. A trajectory without an answer agrees with no other
    trajectory. Each metric is a mean over the tasks with at least k trajectories. ``val/tasks@k``
    is the number of these tasks. It is omitted if all tasks have k trajectories.
    """
    columns = batch.non_tensor_batch
    rows_by_task: dict[str, list[int]] = defaultdict(list)
    for row in rows.tolist():
        rows_by_task[str(columns["uid"][row])].append(row)
    max_trajectories = max(map(len, rows_by_task.values()), default=0)
    if max_trajectories < 2:
        return {}
    answer_by_trajectory = collect_answers(batch)
    task_values_by_metric: dict[str, list[float]] = defaultdict(list)
    for member_rows in rows_by_task.values():
        success_flags = [float(columns["won"][row]) for row in member_rows]
        num_successes = int(sum(success_flags))
        returns = [float(columns["episode_rewards"][row]) for row in member_rows]
        trajectories = [str(columns["traj_uid"][row]) for row in member_rows]
        answers = [
            answer_by_trajectory.get(uid, row)
            for uid, row in zip(trajectories, member_rows, strict=True)
        ]
        for k in list_k_values(max_trajectories):
            if k > len(member_rows):
                continue
            task_values_by_metric[f"val/pass@{k}"].append(
                pass_at_k(len(member_rows), num_successes, k)
            )
            task_values_by_metric[f"val/best@{k}"].append(best_at_k(returns, k))
            task_values_by_metric[f"val/maj@{k}"].append(maj_at_k(answers, success_flags, k))
    task_count_metrics = {
        f"val/tasks@{name.partition('@')[2]}": float(len(values))
        for name, values in task_values_by_metric.items()
        if len(values) < len(rows_by_task)
    }
    mean_metrics = {name: float(np.mean(values)) for name, values in task_values_by_metric.items()}
    return mean_metrics | task_count_metrics


def collect_answers(batch: DataProto) -> dict[str, str]:
    """Return the answer of each trajectory by ``traj_uid``, for the majority vote of ``maj@k``.

    It is the value in the column ``answer``, else the last action. Trajectories with neither are
    omitted.
    """
    answers = collect_last_actions(batch)
    columns = batch.non_tensor_batch
    if ANSWER in columns:
        for trajectory, answer in zip(columns["traj_uid"], columns[ANSWER], strict=True):
            if answer is not None:
                answers[str(trajectory)] = answer
    return {trajectory: answer for trajectory, answer in answers.items() if answer}


def collect_last_actions(batch: DataProto) -> dict[str, str]:
    """Return the action in the last turn of each trajectory that has turns, by ``traj_uid``."""
    last_action_by_trajectory: dict[str, tuple[int, str]] = {}
    columns = batch.non_tensor_batch
    for trajectory, turns in zip(columns["traj_uid"], columns["steps"], strict=True):
        for turn in turns:
            # The turns of a trajectory may be in several rows, in any order.
            if turn.step >= last_action_by_trajectory.get(str(trajectory), (-1, ""))[0]:
                last_action_by_trajectory[str(trajectory)] = (turn.step, turn.action)
    return {trajectory: action for trajectory, (_, action) in last_action_by_trajectory.items()}


def average_per_task(values: np.ndarray, uids: np.ndarray) -> np.ndarray:
    """Return the mean of ``values`` [N] of each task [T], in order of uid."""
    _, task_indices = np.unique(uids.astype(str), return_inverse=True)
    return np.bincount(task_indices, weights=values) / np.bincount(task_indices)


def reduce_metrics(metrics: Mapping[str, float | list[float]]) -> dict[str, float]:
    """Return ``metrics`` with each list (values of micro-batches or ranks) reduced to one number.

    If the name contains the word ``max``, ``min`` or ``sum``, this function is applied, as for
    ``perf/max_memory_gb`` and ``loss_sum``. Other lists are averaged. Numbers are unchanged.
    """
    reduced_metrics = {}
    for key, value in metrics.items():
        name_words = re.split(r"[/_]", key)
        reductions = [REDUCTIONS[name] for name in REDUCTIONS if name in name_words]
        reduction = reductions[0] if reductions else _average_values
        reduced_metrics[key] = float(reduction(value) if isinstance(value, list) else value)
    return reduced_metrics


def _average_values(values: list[float]) -> float:
    # Ranks often return equal numbers. Return such a number exactly, without rounding errors.
    return values[0] if len(set(values)) == 1 else float(np.mean(values))


REDUCTIONS: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min, "sum": math.fsum}


class StepWarnings:
    """Counter of steps with many truncated turns, many full rows, or no advantage in any row."""

    def __init__(self, config: PPOConfig) -> None:
        self.config = config
        self.num_steps = 0
        self.steps_by_warning: Counter[str] = Counter()

    def log_new_warnings(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count the kinds of warnings that the metrics of ``step`` cause; log each new kind."""
        self.num_steps += 1
        for warning_kind, message in self._find_messages(metrics).items():
            self.steps_by_warning[warning_kind] += 1
            if self.steps_by_warning[warning_kind] == 1:
                logger.warning("step %d: %s", step, message)

    def close(self) -> None:
        """Log the number of steps with each kind of warning that occurred more than once."""
        for warning_kind, num_warned_steps in self.steps_by_warning.items():
            if num_warned_steps > 1:
                logger.warning(
                    "%s in %d of %d steps", warning_kind, num_warned_steps, self.num_steps
                )

    def _find_messages(self, metrics: Mapping[str, float]) -> dict[str, str]:
        message_by_kind = {}
        truncated_turns_share = metrics.get(TRUNCATED_TURNS_METRIC, 0.0)
        if truncated_turns_share >= WARNING_SHARE:
            why = f"{truncated_turns_share:.0%} of the trajectories ended with a truncated turn"
            message_by_kind["turns were truncated"] = f"{why}: raise {self._format_turn_limit()}"
        full_rows_share = metrics.get(FULL_ROWS_METRIC, 0.0)
        if full_rows_share >= WARNING_SHARE:
            why = f"{full_rows_share:.0%} of the trajectories ended because their row was full"
            message_by_kind["rows were full"] = f"{why}: raise {self._format_row_limit()}"
        if metrics.get(WITHOUT_ADVANTAGE_METRIC) == 1.0:
            message_by_kind["no row had an advantage"] = self._explain_no_advantage(metrics)
        return message_by_kind

    def _format_turn_limit(self) -> str:
        turn_limit = self.config.env.max_turn_tokens
        response_limit = self.config.data.max_response_length
        response_setting = f"data.max_response_length={response_limit}"
        if turn_limit == response_limit:
            return f"{response_setting}, which is the upper limit of env.max_turn_tokens"
        return f"env.max_turn_tokens={turn_limit}"

    def _format_row_limit(self) -> str:
        data = self.config.data
        if self.config.env.history == "append" and not self.config.env.compact.enable:
            return f"data.max_response_length={data.max_response_length}"
        # In all other cases a prompt that does not fit into its row begins a new row. Then an
        # episode ends for lack of space only if one prompt exceeds max_prompt_length.
        return f"data.max_prompt_length={data.max_prompt_length}"

    def _explain_no_advantage(self, metrics: Mapping[str, float]) -> str:
        why = "no row had an advantage"
        if metrics.get(EQUAL_GROUPS_METRIC) == 1.0:
            why = "all returns of each group were equal"
        group_size = self.config.env.rollout.n
        batch_size = self.config.data.train_batch_size
        return (
            f"{why}, so rewards gave no gradient: raise env.rollout.n={group_size} or "
            f"data.train_batch_size={batch_size}, use tasks that the policy solves sometimes, or "
            "start from a policy that solves these sometimes"
        )
