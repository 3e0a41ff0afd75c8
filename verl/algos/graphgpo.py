"""GraphGPO (2026, arXiv 2605.26684): step returns from the distance to the goal in a state graph.

The trajectories of a task form a graph. States (anchor observations) are nodes, observed steps are
edges, and the end of every successful trajectory is the goal. d is the number of steps on the
shortest path from a state to the goal in this graph:

    return of a step = goal_value * gamma^d(state after it)     0 if there is no path

A good step of an unsuccessful trajectory gets a return if its next state is on another path to the
goal. A detour of a successful trajectory increases the distance, so it gets a smaller return.
"""

from collections import deque
from collections.abc import Hashable, Iterable

import torch

from verl.algos.algorithm_registry import choose, register_adv_est
from verl.algos.gigpo import (
    STEP_INPUTS,
    EnvSteps,
    StepLists,
    add_step_advantages,
    compute_step_advantages,
    flatten_steps,
)
from verl.algos.groups import group_normalised_scores
from verl.algos.shapes import Ids, PerStep, PerToken, TokenIndex, TokenMask
from verl.names import NORM_MODES


def find_next_states(steps: EnvSteps, successful_trajectories: set[Hashable]) -> list[Hashable]:
    """Return the state after each step: the trajectory's next state, the task's goal, or None.

    The goal follows the last step of each trajectory in ``successful_trajectories``. None means
    that the state after the step is unknown.
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

    ``next_states`` are the states after ``states``. A goal is ``(uid, None)``. The search is
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
    values = [
        goal_value * gamma ** goal_distances[s] if s in goal_distances else 0.0 for s in next_states
    ]
    return torch.tensor(values, dtype=torch.float64)


@register_adv_est(
    "graphgpo",
    inputs=STEP_INPUTS | {"won": "won"},
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
    """
    by_std = choose(mode, NORM_MODES, "mode (algorithm.graphgpo.mode)") == "mean_std_norm"
    steps = flatten_steps(index, traj_index, step_rewards, step_index, anchor_obs)
    trajectory_outcomes = zip(index, traj_index, won, strict=True)
    returns = compute_graph_returns(
        steps, {(u, t) for u, t, w in trajectory_outcomes if w}, gamma, goal_value
    )
    per_step = compute_step_advantages(returns, steps.state, by_std, epsilon)
    scores = token_level_rewards.double().sum(-1)
    per_row = group_normalised_scores(scores, index, traj_index, by_std, epsilon)
    return add_step_advantages(per_row, per_step, step_advantage_w, steps, step_ids, response_mask)
