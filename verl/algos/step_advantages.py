"""Estimators with an advantage per environment step: GiGPO, HGPO and GraphGPO.

``A = A_trajectory + step_advantage_w * A_step``. ``A_trajectory`` compares the trajectories of a
task, ``A_step`` its steps in equal states. A state is the ``uid`` of the task with the anchor
observation.

- GiGPO (Feng et al., 2025): the return of an environment step is the discounted sum of its reward
  and all later rewards. It is compared with the returns of all steps in the same state.
- HGPO (hierarchy of groups) also compares steps with the same preceding states. ``A_k`` compares
  the steps of a task whose last k + 1 states are the same. The step advantage is the weighted mean
  of ``A_0`` to ``A_K`` with weights ``(k + 1)^alpha``. Steps with a longer common history are
  fewer, but more comparable. Longer contexts therefore get larger weights. The code of its authors
  (He et al., 2026, arXiv 2602.22817) has no ``A_trajectory``. It omits an ``A_k`` that is 0 from
  the weighted mean; here the mean includes it.
- GraphGPO (2026, arXiv 2605.26684): the trajectories of a task form a graph. States are nodes,
  observed steps are edges, and the end of every successful trajectory is the goal. d is the number
  of steps on the shortest path from a state to the goal in this graph::

      return of a step = goal_value * gamma^d(state after it)     0 if there is no path

  A good step of an unsuccessful trajectory gets a return if its next state is on another path to
  the goal. A detour of a successful trajectory increases the distance, so it gets a smaller return.
"""

import difflib
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from verl.algos.advantages import spread
from verl.algos.algorithm_registry import choose, register_adv_est
from verl.algos.groups import compute_group_stats, factorize_keys, group_normalised_scores
from verl.algos.shapes import Ids, PerRow, PerStep, PerToken, TokenIndex, TokenMask
from verl.names import NORM_MODES

# One list of environment step values per row [B], as an object array or a plain list.
StepLists: TypeAlias = Sequence[Sequence[Any]] | np.ndarray
StateKey: TypeAlias = tuple[Hashable, str]  # uid and anchor observation


class EnvSteps(NamedTuple):
    """The S environment steps of a batch. Every field has S entries.

    ``row`` is the row that holds the step, ``step_number`` its number in the trajectory.
    ``trajectory`` is the pair of ``uid`` and ``traj_uid``. Steps with equal ``state`` (``uid`` and
    anchor observation) are compared with each other.
    """

    row: list[int]
    step_number: list[int]
    trajectory: list[tuple[Hashable, Hashable]]
    reward: list[float]
    state: list[StateKey]


def flatten_steps(
    index: Ids,
    traj_index: Ids,
    step_rewards: StepLists,
    step_index: StepLists,
    anchor_obs: StepLists,
) -> EnvSteps:
    """Flatten the per-row lists of environment steps. Raises ``ValueError`` for unequal lengths."""
    steps = EnvSteps([], [], [], [], [])
    columns = zip(index, traj_index, step_rewards, step_index, anchor_obs, strict=True)
    for row, (uid, trajectory_id, rewards, step_numbers, anchors) in enumerate(columns):
        if not len(rewards) == len(step_numbers) == len(anchors):
            raise ValueError(
                f"row {row}: {len(rewards)} rewards, {len(step_numbers)} step numbers, "
                f"{len(anchors)} anchors"
            )
        steps.row.extend([row] * len(step_numbers))
        steps.step_number.extend(int(k) for k in step_numbers)
        steps.trajectory.extend([(uid, trajectory_id)] * len(step_numbers))
        steps.reward.extend(float(r) for r in rewards)
        steps.state.extend((uid, anchor) for anchor in anchors)
    return steps


def compute_discounted_step_returns(steps: EnvSteps, gamma: float) -> PerStep:
    """Return ``sum_{j >= k} gamma^(j-k) r_j`` for each step k of a trajectory, float64 ``[S]``.

    The steps of one trajectory may be in several rows. Example: rewards (0, 0, 1) with
    ``gamma=0.5`` give (0.25, 0.5, 1).
    """
    returns = [0.0] * len(steps.row)
    next_step_by_trajectory: dict[tuple[Hashable, Hashable], tuple[int, float]] = {}
    # Go backwards through each trajectory. The batch may lack steps of a trajectory. Their rewards
    # count as 0, and gamma is applied once for each of them.
    for step in sorted(range(len(steps.row)), key=lambda s: -steps.step_number[s]):
        later_step_number, later_return = next_step_by_trajectory.get(
            steps.trajectory[step], (steps.step_number[step], 0.0)
        )
        returns[step] = (
            steps.reward[step]
            + gamma ** (later_step_number - steps.step_number[step]) * later_return
        )
        next_step_by_trajectory[steps.trajectory[step]] = (steps.step_number[step], returns[step])
    return torch.tensor(returns, dtype=torch.float64)


def merge_similar_states(states: Sequence[StateKey], threshold: float) -> list[StateKey]:
    """Replace each state (uid, anchor observation) by the first similar state of the same uid.

    Two observations are similar if their ``difflib`` ratio (0 to 1) is at least ``threshold``.
    """
    first_anchors: dict[Hashable, list[str]] = {}
    merged_states: dict[StateKey, StateKey] = {}
    for uid, anchor in dict.fromkeys(states):
        anchors_of_uid = first_anchors.setdefault(uid, [])
        # Compare only with the first anchor of each merged state, not with all anchors in it.
        # Otherwise a chain of small differences could merge unrelated states.
        similar_anchor = next(
            (
                first_anchor
                for first_anchor in anchors_of_uid
                if difflib.SequenceMatcher(None, first_anchor, anchor).ratio() >= threshold
            ),
            None,
        )
        if similar_anchor is None:
            anchors_of_uid.append(anchor)
        merged_states[uid, anchor] = (uid, anchor if similar_anchor is None else similar_anchor)
    return [merged_states[state] for state in states]


def broadcast_to_step_tokens(values: PerStep, steps: EnvSteps, step_ids: TokenIndex) -> PerToken:
    """Broadcast ``values [S]`` to the tokens of their steps, float32 ``[B, R]``.

    ``step_ids`` is the step number of each token. A token without a step of its row gets 0.
    """
    token_zeros = torch.zeros(step_ids.shape, dtype=torch.float32, device=step_ids.device)
    if not steps.row:
        return token_zeros
    num_step_numbers = max(max(steps.step_number), int(step_ids.max())) + 1
    step_values = torch.zeros(
        (step_ids.shape[0], num_step_numbers), dtype=torch.float32, device=step_ids.device
    )
    step_values[torch.tensor(steps.row), torch.tensor(steps.step_number)] = values.float().to(
        step_values.device
    )
    return torch.where(
        step_ids >= 0, step_values.gather(-1, step_ids.long().clamp(min=0)), token_zeros
    )


def compute_step_advantages(
    returns: PerStep, groups: Sequence[Hashable], by_std: bool, epsilon: float
) -> PerStep:
    """Return the return of each step minus its group's mean, float64 ``[S]``.

    ``groups [S]`` is the group of each step. The result is exactly 0 in a group of one. ``by_std``
    also divides by the group's sample standard deviation plus ``epsilon``.
    """
    stats = compute_group_stats(returns, factorize_keys(groups))
    centred_returns = returns - stats.mean
    return centred_returns / (stats.std + epsilon) if by_std else centred_returns


def add_step_advantages(
    per_row: PerRow,
    step_values: PerStep,
    weight: float,
    steps: EnvSteps,
    step_ids: TokenIndex,
    response_mask: TokenMask,
) -> tuple[PerToken, PerToken]:
    """Add ``weight`` times the step advantage to the row advantage of each sampled token.

    Returns advantages and returns ``[B, R]``, which are the same tensor.
    """
    advantages = spread(per_row, response_mask)
    step_advantages = broadcast_to_step_tokens(step_values, steps, step_ids) * response_mask.float()
    combined_advantages = advantages + weight * step_advantages.to(advantages.device)
    return combined_advantages, combined_advantages


@register_adv_est(
    "gigpo",
    params={
        "step_advantage_w": "algorithm.gigpo.step_advantage_w",
        "mode": "algorithm.gigpo.mode",
        "gamma": "algorithm.gamma",
        "enable_similarity": "algorithm.gigpo.enable_similarity",
        "similarity_thresh": "algorithm.gigpo.similarity_thresh",
    },
)
def compute_gigpo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids,
    step_ids: TokenIndex,
    step_rewards: StepLists,
    step_index: StepLists,
    anchor_obs: StepLists,
    step_advantage_w: float = 1.0,
    mode: str = "mean_norm",
    gamma: float = 0.95,
    enable_similarity: bool = False,
    similarity_thresh: float = 0.95,
    epsilon: float = 1e-6,
) -> tuple[PerToken, PerToken]:
    """Compute GiGPO advantages: trajectory advantage plus weighted step advantage.

    ``step_rewards``, ``step_index`` and ``anchor_obs`` are ``[B]`` object arrays. Each row has a
    list with one entry per environment step. ``step_ids [B, R]`` is the step of each sampled token.
    ``mode`` applies to trajectories and to steps: ``mean_norm`` subtracts the group's mean,
    ``mean_std_norm`` also divides by its sample standard deviation. A state that occurs once has
    step advantage 0. The trajectory advantage of a group of one is its return, as in GRPO.
    ``returns`` is the same tensor as the advantages.

        trajectory 1: states s and t, reward 1 in t; trajectory 2: s and u, no reward; gamma 0.95
        returns in state s: 0.95 and 0, mean 0.475; trajectory advantages 0.5 and -0.5
        advantages of trajectory 1: 0.5 + 0.475 in s, 0.5 + 0 in t, because t occurs only once
    """
    by_std = choose(mode, NORM_MODES, "mode (algorithm.gigpo.mode)") == "mean_std_norm"
    steps = flatten_steps(index, traj_index, step_rewards, step_index, anchor_obs)
    if enable_similarity:
        steps = steps._replace(state=merge_similar_states(steps.state, similarity_thresh))
    returns = compute_discounted_step_returns(steps, gamma)
    step_advantages = compute_step_advantages(returns, steps.state, by_std, epsilon)
    scores = token_level_rewards.double().sum(-1)
    row_advantages = group_normalised_scores(scores, index, traj_index, by_std, epsilon)
    return add_step_advantages(
        row_advantages, step_advantages, step_advantage_w, steps, step_ids, response_mask
    )


def build_state_histories(steps: EnvSteps, length: int) -> list[Hashable]:
    """Return for each step its state and the ``length`` states before it, None before the first."""
    step_keys = list(zip(steps.trajectory, steps.step_number, strict=True))
    state_by_step = dict(zip(step_keys, steps.state, strict=True))
    return [
        tuple(
            state_by_step.get((trajectory, step_number - distance))
            for distance in range(length + 1)
        )
        for trajectory, step_number in step_keys
    ]


def compute_hierarchical_advantages(
    returns: PerStep, steps: EnvSteps, max_context: int, alpha: float, by_std: bool, epsilon: float
) -> PerStep:
    """Return the weighted mean of the step advantages over context lengths, float64 ``[S]``.

    A context is the state of a step and the k states before it, with k = 0 to ``max_context``.
    Steps with equal contexts are compared. If a context occurs once, the advantage for this k is 0,
    and the mean includes this 0.
    """
    weighted_mean = torch.zeros_like(returns)
    weights = [(k + 1.0) ** alpha for k in range(max_context + 1)]
    for k, weight in enumerate(weights):
        context_advantages = compute_step_advantages(
            returns, build_state_histories(steps, k), by_std, epsilon
        )
        weighted_mean += weight / sum(weights) * context_advantages
    return weighted_mean


@register_adv_est(
    "hgpo",
    params={
        "step_advantage_w": "algorithm.hgpo.step_advantage_w",
        "mode": "algorithm.hgpo.mode",
        "context": "algorithm.hgpo.context",
        "alpha": "algorithm.hgpo.alpha",
        "gamma": "algorithm.gamma",
    },
)
def compute_hgpo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids,
    step_ids: TokenIndex,
    step_rewards: StepLists,
    step_index: StepLists,
    anchor_obs: StepLists,
    step_advantage_w: float = 1.0,
    mode: str = "mean_norm",
    context: int = 2,
    alpha: float = 1.0,
    gamma: float = 0.95,
    epsilon: float = 1e-6,
) -> tuple[PerToken, PerToken]:
    """Compute HGPO advantages: GRPO advantage plus ``step_advantage_w`` times the step advantage.

    The arguments are those of ``compute_gigpo_outcome_advantage``. In addition, ``context`` is the
    largest number of previous states to compare (0 equals GiGPO). Advantages for k previous states
    have the weight ``(k + 1)^alpha``. ``returns`` is the same tensor as the advantages.

        state B in three trajectories: return 1 after state A, 0 after C, 0 after A; context 1
        A_0 compares all three: 2/3, -1/3, -1/3. A_1 compares those after A: 1/2, 0, -1/2
        step advantages (1 A_0 + 2 A_1) / 3 in B: 0.56, -0.11, -0.44
    """
    by_std = choose(mode, NORM_MODES, "mode (algorithm.hgpo.mode)") == "mean_std_norm"
    steps = flatten_steps(index, traj_index, step_rewards, step_index, anchor_obs)
    returns = compute_discounted_step_returns(steps, gamma)
    step_advantages = compute_hierarchical_advantages(
        returns, steps, context, alpha, by_std, epsilon
    )
    scores = token_level_rewards.double().sum(-1)
    row_advantages = group_normalised_scores(scores, index, traj_index, by_std, epsilon)
    return add_step_advantages(
        row_advantages, step_advantages, step_advantage_w, steps, step_ids, response_mask
    )


def find_next_states(steps: EnvSteps, successful_trajectories: set[Hashable]) -> list[Hashable]:
    """Return the state after each step: the trajectory's next state, the task's goal, or None.

    The goal follows the last step of a successful trajectory. None means an unknown state.
    """
    step_keys = list(zip(steps.trajectory, steps.step_number, strict=True))
    state_by_step = dict(zip(step_keys, steps.state, strict=True))
    last_step_number: dict[Hashable, int] = {}
    for trajectory, step_number in step_keys:
        last_step_number[trajectory] = max(
            step_number, last_step_number.get(trajectory, step_number)
        )
    next_states: list[Hashable] = []
    for trajectory, step_number in step_keys:
        is_successful_end = (
            step_number == last_step_number[trajectory] and trajectory in successful_trajectories
        )
        goal = (trajectory[0], None)
        next_states.append(
            goal if is_successful_end else state_by_step.get((trajectory, step_number + 1))
        )
    return next_states


def compute_goal_distances(
    states: Iterable[Hashable], next_states: Iterable[Hashable]
) -> dict[Hashable, int]:
    """Return the number of steps to the goal for every state with a path to it.

    ``next_states`` are the states after ``states``. A state is a pair of the group's uid and the
    observation. The goal of a group, ``(uid, None)``, follows its last state. The search is
    breadth-first from the goals and follows the edges backwards.
    """
    predecessors: dict[Hashable, set[Hashable]] = {}
    for state, next_state in zip(states, next_states, strict=True):
        if next_state is not None:
            predecessors.setdefault(next_state, set()).add(state)
    goals: list[Hashable] = [
        node for node in predecessors if isinstance(node, tuple) and node[1] is None
    ]
    goal_distances: dict[Hashable, int] = dict.fromkeys(goals, 0)
    node_queue: deque[Hashable] = deque(goals)
    while node_queue:
        node = node_queue.popleft()
        for predecessor in predecessors.get(node, ()):
            if predecessor not in goal_distances:
                goal_distances[predecessor] = goal_distances[node] + 1
                node_queue.append(predecessor)
    return goal_distances


def compute_graph_returns(
    steps: EnvSteps, successful_trajectories: set[Hashable], gamma: float, goal_value: float
) -> PerStep:
    """Return ``goal_value * gamma^d`` of every step, float64 ``[S]``; 0 without a path to the goal.

    ``d`` is the number of steps from the state after the step to the goal.
    """
    next_states = find_next_states(steps, successful_trajectories)
    goal_distances = compute_goal_distances(steps.state, next_states)
    step_returns = [
        goal_value * gamma ** goal_distances[next_state] if next_state in goal_distances else 0.0
        for next_state in next_states
    ]
    return torch.tensor(step_returns, dtype=torch.float64)


@register_adv_est(
    "graphgpo",
    params={
        "step_advantage_w": "algorithm.graphgpo.step_advantage_w",
        "mode": "algorithm.graphgpo.mode",
        "gamma": "algorithm.graphgpo.gamma",
        "goal_value": "algorithm.graphgpo.goal_value",
    },
)
def compute_graphgpo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids,
    step_ids: TokenIndex,
    step_rewards: StepLists,
    step_index: StepLists,
    anchor_obs: StepLists,
    won: Ids,
    step_advantage_w: float = 1.0,
    mode: str = "mean_std_norm",
    gamma: float = 0.1,
    goal_value: float = 10.0,
    epsilon: float = 1e-6,
) -> tuple[PerToken, PerToken]:
    """Compute GraphGPO advantages: GRPO plus ``step_advantage_w`` times the step advantage.

    A step is compared with all steps of its task from the same state. The arguments are those of
    ``compute_gigpo_outcome_advantage``, plus the success ``won [B]`` of the trajectory. The step
    advantage is exactly 0 in a task without success and in a state that occurs once. ``returns`` is
    the same tensor as the advantages.

        trajectory 1: states A, B, C, success; trajectory 2: A, C, D, no success
        distances to the goal: C 1, B 2; returns in A: 10 * 0.1^2 = 0.1 (to B), 10 * 0.1 = 1 (to C)
        step advantages in A with mode mean_norm: 0.1 - 0.55 = -0.45, and 1 - 0.55 = 0.45
    """
    by_std = choose(mode, NORM_MODES, "mode (algorithm.graphgpo.mode)") == "mean_std_norm"
    steps = flatten_steps(index, traj_index, step_rewards, step_index, anchor_obs)
    trajectory_outcomes = zip(index, traj_index, won, strict=True)
    returns = compute_graph_returns(
        steps, {(u, t) for u, t, w in trajectory_outcomes if w}, gamma, goal_value
    )
    step_advantages = compute_step_advantages(returns, steps.state, by_std, epsilon)
    scores = token_level_rewards.double().sum(-1)
    row_advantages = group_normalised_scores(scores, index, traj_index, by_std, epsilon)
    return add_step_advantages(
        row_advantages, step_advantages, step_advantage_w, steps, step_ids, response_mask
    )
