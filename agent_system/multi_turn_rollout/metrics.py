"""Metrics of the rollouts of one batch. Every trajectory counts once."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from agent_system.multi_turn_rollout.trajectory import Trajectory, Turn
from rlvcr.level_metrics import compute_level_metrics, compute_level_mutual_information
from verl.utils.sampling import StopReason

MIN_DIVISOR_S = 1e-9  # seconds; avoids division by a time of 0


def compute_rollout_metrics(
    trajectories: Sequence[Trajectory], rollout_s: float
) -> dict[str, float]:
    """Return ``rollout/*`` of all trajectories, including aborted ones.

    ``active_ratio``: mean share of the rollout time ``rollout_s`` (seconds) in which a trajectory
    was in flight. ``env_wait_s`` and ``engine_wait_s``: mean seconds that a trajectory waited for
    its environment and for tokens.
    """
    num_trajectories = max(len(trajectories), 1)
    abort_counts = Counter(t.aborted for t in trajectories if t.aborted is not None)
    truncation_counts = Counter(t.truncated for t in trajectories if t.truncated is not None)
    total_active_s = sum(t.active_s for t in trajectories)
    metrics = {
        "rollout/trajectories": float(len(trajectories)),
        "rollout/active_ratio": total_active_s / (num_trajectories * max(rollout_s, MIN_DIVISOR_S)),
        "rollout/env_wait_s": sum(t.env_wait_s for t in trajectories) / num_trajectories,
        "rollout/engine_wait_s": sum(t.engine_wait_s for t in trajectories) / num_trajectories,
        "rollout/aborted": float(abort_counts.total()),
        "rollout/tokens_per_episode": sum(t.num_sampled_tokens for t in trajectories)
        / num_trajectories,
    }
    for reason, count_of_reason in sorted(abort_counts.items()):
        metrics[f"rollout/aborted_{reason}"] = float(count_of_reason)
    metrics |= compute_policy_versions(trajectories)
    return metrics | {
        f"rollout/truncated_{reason}": truncation_counts[reason] / num_trajectories
        # Report every reason, also if its value is 0: a missing value would mean "not measured".
        for reason in ("steps", "length", "budget")
    }


def compute_summary_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of the summaries (``env.compact``) in all trajectories, aborted ones too."""
    summaries = [summary for t in trajectories for summary in t.summaries.values()]
    num_trajectories = max(len(trajectories), 1)
    num_summaries = max(len(summaries), 1)
    num_cut_summaries = sum(summary.stop_reason == StopReason.LENGTH.value for summary in summaries)
    return {
        "rollout/summaries": len(summaries) / num_trajectories,
        "rollout/summary_tokens": sum(summary.num_tokens for summary in summaries)
        / num_trajectories,
        "rollout/summaries_cut": num_cut_summaries / num_summaries,
        "rollout/summaries_empty": sum(not s.response.strip() for s in summaries) / num_summaries,
    }


def compute_policy_versions(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return mean and oldest version of the weights that sampled the tokens, if known."""
    token_count_by_version: Counter[int] = Counter()
    for trajectory in trajectories:
        for token_arrays in trajectory.list_token_arrays():
            token_count_by_version.update(token_arrays.token_count_by_version)
    if not token_count_by_version.total():
        return {}
    version_sum = sum(version * count for version, count in token_count_by_version.items())
    return {
        "rollout/policy_version": version_sum / token_count_by_version.total(),
        "rollout/policy_version_min": float(min(token_count_by_version)),
    }


def compute_episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return ``episode/*`` and ``rlvcr/*`` (thinking levels) of trajectories that did not fail."""
    completed_trajectories = [t for t in trajectories if t.aborted is None]
    if not completed_trajectories:
        return {}
    turns = [(t, turn) for t in completed_trajectories for turn in t.turns]
    rewards = [t.reward for t in completed_trajectories]
    metrics = {
        "episode/reward": float(np.mean(rewards)),
        "episode/reward_max": max(rewards),
        "episode/reward_min": min(rewards),
        "episode/length": float(np.mean([len(t.turns) for t in completed_trajectories])),
        "episode/success_rate": float(np.mean([t.won for t in completed_trajectories])),
        "episode/graded": float(len(completed_trajectories)),
    }
    if turns:
        validity_flags = [turn.is_action_valid for _, turn in turns]
        metrics["episode/valid_action_ratio"] = float(np.mean(validity_flags))
        metrics["episode/turn_tokens"] = float(np.mean([turn.num_tokens for _, turn in turns]))
    successes_by_source: dict[str, list[bool]] = {}
    for trajectory in completed_trajectories:
        successes_by_source.setdefault(trajectory.spec.data_source, []).append(trajectory.won)
    # For a single data source the rate equals ``episode/success_rate``.
    if len(successes_by_source) > 1:
        for data_source, successes in successes_by_source.items():
            metrics[f"episode/{data_source}/success_rate"] = float(np.mean(successes))
            metrics[f"episode/{data_source}/graded"] = float(len(successes))
    return metrics | _compute_thinking_metrics(turns)


def _compute_thinking_metrics(turns: Sequence[tuple[Trajectory, Turn]]) -> dict[str, float]:
    """Return metrics of chosen levels and thought lengths, and the share of forced levels."""
    parsed_turns = [(t, turn, turn.parsed) for t, turn in turns if turn.parsed is not None]
    if not parsed_turns:
        return {}
    # ``chosen_level`` is None for a forced level: level shares count only choices of the policy.
    chosen_levels = [turn.chosen_level for _, turn, _ in parsed_turns]
    successes = [t.won for t, _, _ in parsed_turns]
    parse_failures = [parsed.failure for _, _, parsed in parsed_turns]
    situations = [turn.situation for _, turn, _ in parsed_turns]
    thought_token_counts = [parsed.thought_tokens for _, _, parsed in parsed_turns]
    return {
        **compute_level_metrics(chosen_levels, successes, parse_failures),
        **compute_level_mutual_information(chosen_levels, situations),
        "rlvcr/thought_tokens_mean": float(np.mean(thought_token_counts)),
        "rlvcr/level_forced_share": float(
            np.mean([t.num_forced_tokens > 0 for _, t, _ in parsed_turns])
        ),
    }


def split_rollout_time(
    trajectories: Sequence[Trajectory], rollout_s: float, thoughts_s: float
) -> dict[str, float]:
    """Split the rollout time into seconds for policy turns, environments and alternative thoughts.

    ``rollout_s`` is split by the time that trajectories waited for the engine and for environments.
    The engine's part is split by the tokens sampled for turns and thoughts. Engine and environments
    work concurrently, so these are shares of the rollout time, not busy times. ``thoughts_s``, the
    wait for alternative thoughts after the last episode, is added to the time of thoughts.

        rollout_s 10, waits 30 (engine) and 10 (environments): 7.5 s engine, 2.5 s environments
    """
    engine_wait_s = sum(t.engine_wait_s for t in trajectories)
    env_wait_s = sum(t.env_wait_s for t in trajectories)
    engine_s = rollout_s * engine_wait_s / max(engine_wait_s + env_wait_s, MIN_DIVISOR_S)
    alternative_thoughts = [turn.alternatives for t in trajectories for turn in t.turns]
    num_thought_tokens = sum(a.sampled_tokens for a in alternative_thoughts if a is not None)
    num_turn_tokens = sum(t.num_sampled_tokens for t in trajectories)
    # Tokens of turns and thoughts are assumed to take the same time: they share batches.
    thought_sampling_s = (
        engine_s * num_thought_tokens / max(num_thought_tokens + num_turn_tokens, 1)
    )
    return {
        "gen_engine": engine_s - thought_sampling_s,
        "gen_env": rollout_s - engine_s,
        "alternatives": thought_sampling_s + thoughts_s,
    }
