"""What one training step looked like, as numbers: pure functions from a batch to metrics."""

import math
import re
from collections.abc import Callable, Mapping

import numpy as np
import torch

from verl.protocol import DataProto
from verl.records import ANSWER, INFO_NUMBERS, REWARD_PARTS
from verl.report_sections import batch_metrics
from verl.utils.repeats import best_at_k, maj_at_k, pass_at_k, powers_up_to
from verl.utils.statistics import rate_interval


def summary(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean, maximum and minimum of ``values`` [N] under ``name/``; nothing where there are none."""
    if values.numel() == 0:
        return {}
    values = values.float()
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def data_metrics(batch: DataProto) -> dict[str, float]:
    """Scores, rewards, advantages, returns, values and lengths of one batch of rows.

    Sums over tokens are per row [B]; advantages, returns and values are over sampled tokens only.
    """
    mask = batch.batch["response_mask"].bool()
    prompt_width = batch.batch["prompts"].shape[1]
    attention = batch.batch["attention_mask"]
    result = {
        **summary("critic/score", batch.batch["token_level_scores"].sum(-1)),
        **summary("critic/rewards", batch.batch["token_level_rewards"].sum(-1)),
        **summary("critic/advantages", batch.batch["advantages"][mask]),
        **summary("critic/returns", batch.batch["returns"][mask]),
        **summary("response_length", attention[:, prompt_width:].sum(-1)),
        **summary("prompt_length", attention[:, :prompt_width].sum(-1)),
    }
    if "values" in batch.tensor_keys():
        result |= summary("critic/values", batch.batch["values"][mask])
    return result | named_rewards(batch) | info_metrics(batch)


def named_rewards(batch: DataProto) -> dict[str, float]:
    """``reward/<name>/mean, max, min`` of the rewards that were given by name, each trajectory
    counted once; those that lack one are not counted in it.
    """
    result: dict[str, float] = {}
    for name, values in _values_by_name(batch, REWARD_PARTS).items():
        result |= summary(f"reward/{name}", torch.tensor(values))
        result[f"reward/{name}/graded"] = float(len(values))
    return result


def info_metrics(batch: DataProto) -> dict[str, float]:
    """``env/<name>/mean`` of the numbers in the environment's ``info``: the last value of each
    graded trajectory that has one.
    """
    found = _values_by_name(batch, INFO_NUMBERS)
    return {f"env/{name}/mean": sum(values) / len(values) for name, values in found.items()}


def _values_by_name(batch: DataProto, name: str) -> dict[str, list[float]]:
    """The dictionaries in column ``name`` of graded trajectories, as values by their keys."""
    column = batch.non_tensor_batch.get(name)
    found: dict[str, list[float]] = {}
    for parts in [] if column is None else column[graded_rows(batch)]:
        for key, value in parts.items():
            found.setdefault(key, []).append(value)
    return found


def probability_drift(batch: DataProto) -> dict[str, float]:
    """How far the engine's probabilities are from the trainer's on the tokens that were sampled.

    ``rollout_probs_diff`` is ``|exp(rollout_log_probs) - exp(old_log_probs)|`` over sampled tokens;
    ``rollout_log_probs_diff_max`` is the largest difference of the log-probabilities themselves, in
    nats.
    """
    mask = batch.batch["response_mask"].bool()
    rollout = batch.batch["rollout_log_probs"][mask].float()
    trainer = batch.batch["old_log_probs"][mask].float()
    if rollout.numel() == 0:
        return {}
    diff = (rollout.exp() - trainer.exp()).abs()
    return {
        "training/rollout_probs_diff_mean": diff.mean().item(),
        "training/rollout_probs_diff_max": diff.max().item(),
        # Not the unbiased one, which is NaN for a single token.
        "training/rollout_probs_diff_std": diff.std(unbiased=False).item(),
        "training/rollout_log_probs_diff_max": (rollout - trainer).abs().max().item(),
    }


def staleness(metrics: Mapping[str, float], step: int) -> dict[str, float]:
    """``training/staleness*``: updates that the policy had behind it at ``step`` and that which
    sampled had not, mean over sampled tokens and largest; nothing where versions are not known.
    """
    if "rollout/policy_version" not in metrics:
        return {}
    return {
        "training/staleness": step - 1 - metrics["rollout/policy_version"],
        "training/staleness_max": step - 1 - metrics["rollout/policy_version_min"],
    }


def throughput_metrics(batch: DataProto, seconds: float, devices: int) -> dict[str, float]:
    """``perf/*``: real (unpadded) tokens of the batch per second and device."""
    tokens = int(batch.batch["attention_mask"].sum())
    return {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/throughput": tokens / max(seconds, 1e-9) / max(devices, 1),
    }


def first_rows(batch: DataProto) -> np.ndarray:
    """Index of the first row of every trajectory, in order of appearance."""
    _, index = np.unique(batch.non_tensor_batch["traj_uid"].astype(str), return_index=True)
    # unique orders by name; in the order of rows, trajectories stay as they were played.
    return np.sort(index)


def graded_rows(batch: DataProto) -> np.ndarray:
    """Index of the first row of every trajectory that has a grade: a failed one (column
    ``aborted``) is neither a success nor none.
    """
    rows = first_rows(batch)
    failed = batch.non_tensor_batch.get("aborted")
    return rows if failed is None else rows[~failed[rows].astype(bool)]


def validation_metrics(batch: DataProto) -> dict[str, float]:
    """Success, return, length and tokens on the panel, each trajectory counted once, with a
    bootstrap interval, and what methods have registered in ``verl.report_sections``.

    Rates and means are over the ``val/graded`` trajectories that did not fail; without any there
    are none. ``val/aborted`` of ``val/trajectories`` failed.
    """
    fields = batch.non_tensor_batch
    every = first_rows(batch)
    rows = graded_rows(batch)
    result = {
        "val/tasks": float(len(set(fields["uid"][every].tolist()))),
        "val/trajectories": float(len(every)),
        "val/graded": float(len(rows)),
        "val/aborted": float(len(every) - len(rows)),
    }
    if not len(rows):
        return result | batch_metrics(batch, "val")
    won = fields["won"][rows].astype(float)
    # Resampled by task: plays of the same task are not independent of each other.
    low, high = rate_interval(mean_per_task(won, fields["uid"][rows]))
    sampled = tokens_per_trajectory(batch)
    result |= {
        "val/success_rate": float(won.mean()),
        "val/success_rate_low": low,
        "val/success_rate_high": high,
        "val/episode_reward": float(fields["episode_rewards"][rows].astype(float).mean()),
        "val/episode_length": float(fields["episode_lengths"][rows].astype(float).mean()),
        "val/tokens_per_episode": float(
            np.mean([sampled[uid] for uid in fields["traj_uid"][rows].tolist()])
        ),
    }
    sources = fields["data_source"][rows].astype(str)
    for source in np.unique(sources):
        of_source = sources == source
        own = rows[of_source]
        returns = fields["episode_rewards"][own].astype(float)
        result[f"val/{source}/success_rate"] = float(won[of_source].mean())
        result[f"val/{source}/episode_reward"] = float(returns.mean())
        result[f"val/{source}/graded"] = float(len(own))
        repeated = repeated_plays(batch, own)
        result |= {name.replace("val/", f"val/{source}/", 1): repeated[name] for name in repeated}
    named = named_rewards(batch) | info_metrics(batch)
    named = {f"val/{name}": value for name, value in named.items()}
    return result | named | repeated_plays(batch, rows) | batch_metrics(batch, "val")


def repeated_plays(batch: DataProto, rows: np.ndarray) -> dict[str, float]:
    """``val/pass@k`` (won), ``val/best@k`` (return) and ``val/maj@k`` (won, of the plays whose
    answer most plays give), where tasks are played more than once; means over the tasks with at
    least k plays, of which ``val/tasks@k`` says the number where it is not all.

    ``rows`` are the first rows of the trajectories that have a grade. k is 1, 2, 4, ... and the
    number of plays. A play without an answer agrees with no other.
    """
    fields = batch.non_tensor_batch
    plays: dict[str, list[int]] = {}
    for row in rows.tolist():
        plays.setdefault(str(fields["uid"][row]), []).append(row)
    n = max(map(len, plays.values()), default=0)
    if n < 2:
        return {}
    votes = answers_given(batch)
    found: dict[str, list[float]] = {}
    for members in plays.values():
        won = [float(fields["won"][row]) for row in members]
        returns = [float(fields["episode_rewards"][row]) for row in members]
        answers = [votes.get(str(fields["traj_uid"][row]), row) for row in members]
        for k in powers_up_to(n):
            if k > len(members):
                continue
            of_task = {
                "pass": pass_at_k(len(members), int(sum(won)), k),
                "best": best_at_k(returns, k),
                "maj": maj_at_k(answers, won, k),
            }
            for kind, value in of_task.items():
                found.setdefault(f"val/{kind}@{k}", []).append(value)
    fewer = {
        f"val/tasks@{name.partition('@')[2]}": float(len(values))
        for name, values in found.items()
        if len(values) < len(plays)
    }
    return {name: float(np.mean(values)) for name, values in found.items()} | fewer


def answers_given(batch: DataProto) -> dict[str, str]:
    """The answer of every trajectory that has one: what its environment took from the text (column
    ``answer``), else its last action.
    """
    answers = last_actions(batch)
    columns = batch.non_tensor_batch
    if ANSWER in columns:
        for trajectory, answer in zip(columns["traj_uid"], columns[ANSWER], strict=True):
            if answer is not None:
                answers[str(trajectory)] = answer
    return {trajectory: answer for trajectory, answer in answers.items() if answer}


def last_actions(batch: DataProto) -> dict[str, str]:
    """The last action of every trajectory that has one."""
    latest: dict[str, tuple[int, str]] = {}
    columns = batch.non_tensor_batch
    for trajectory, steps in zip(columns["traj_uid"], columns["steps"], strict=True):
        for step in steps:
            # A trajectory's steps may lie in several rows, in any order.
            if step.step >= latest.get(str(trajectory), (-1, ""))[0]:
                latest[str(trajectory)] = (step.step, step.action)
    return {trajectory: action for trajectory, (_, action) in latest.items()}


def mean_per_task(values: np.ndarray, uids: np.ndarray) -> np.ndarray:
    """``values`` [N] averaged over the plays of each task [T]."""
    _, task = np.unique(uids.astype(str), return_inverse=True)
    return np.bincount(task, weights=values) / np.bincount(task)


def tokens_per_trajectory(batch: DataProto) -> dict[str, float]:
    """Sampled tokens of every trajectory, summed over its rows."""
    counts: dict[str, float] = {}
    per_row = batch.batch["response_mask"].sum(-1).tolist()
    for trajectory, count in zip(batch.non_tensor_batch["traj_uid"], per_row, strict=True):
        counts[trajectory] = counts.get(trajectory, 0.0) + count
    return counts


def reduce_metrics(metrics: Mapping[str, float | list[float]]) -> dict[str, float]:
    """One number for every list among ``metrics``: values of micro-batches, ranks or parts.

    A word of the name says how: ``max``, ``min`` and ``sum`` (``perf/max_memory_gb``, ``loss_sum``)
    are what they say, everything else is a mean. Numbers pass as they are.
    """
    return {key: _reduced(key, value) for key, value in metrics.items()}


def _reduced(name: str, value: float | list[float]) -> float:
    if not isinstance(value, list):
        return float(value)
    words = re.split(r"[/_]", name)
    kind = next((kind for kind in REDUCTIONS if kind in words), "mean")
    return float(REDUCTIONS[kind](value))


def _mean(values: list[float]) -> float:
    # Ranks often tell the same number, whose mean would be rounded.
    return values[0] if len(set(values)) == 1 else float(np.mean(values))


REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "max": max,
    "min": min,
    "sum": math.fsum,
    "mean": _mean,
}
