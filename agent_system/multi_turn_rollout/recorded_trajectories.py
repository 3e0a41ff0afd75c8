"""Trajectories that were recorded elsewhere, as a task, a seed and actions, and their replay.

    {"task_id": "7", "seed": 3, "actions": ["go north", "take key"]}
        ──reset(task 7, seed 3), then the actions──▶ trajectory of this framework

The environment must reproduce the episode from task, seed and actions.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from agent_system.environments.env import Task
from agent_system.environments.package import EnvPackage
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory
from verl.config.settings.errors import ProblemCode
from verl.utils.commands import UsageError


@dataclass(frozen=True, slots=True)
class RecordedTrajectory:
    """Recorded episode of ``task``; ``source`` names its file and line in errors.

    An action is the text that the environment gets, or a whole reply.
    """

    source: str  # file and line, for error messages
    task: Task
    seed: int
    actions: tuple[str, ...]


def build_recorded_specs(
    recorded_trajectories: Sequence[RecordedTrajectory],
    package: EnvPackage[Any],
    encode: Callable[[str], Sequence[int]],
) -> list[RolloutSpec]:
    """Return the rollout specs that replay ``recorded_trajectories``.

    Trajectories of one task and seed are a group. The second one of task 7 with seed 3 has the
    ``traj_uid`` ``recorded-7-3/1``.
    """
    group_sizes: Counter[str] = Counter()
    specs = []
    for index, trajectory in enumerate(recorded_trajectories):
        uid = f"recorded-{trajectory.task['task_id']}-{trajectory.seed}"
        traj_uid = f"{uid}/{group_sizes[uid]}"
        group_sizes[uid] += 1
        task_package = package.package_for_task(trajectory.task)
        specs.append(
            RolloutSpec(
                index=index,
                task=trajectory.task,
                uid=uid,
                traj_uid=traj_uid,
                env_seed=trajectory.seed,
                replayed_turns=tuple(
                    tuple(encode(_format_reply(action, task_package)))
                    for action in trajectory.actions
                ),
                max_turns=len(trajectory.actions),
            )
        )
    return specs


def _format_reply(action: str, package: EnvPackage[Any]) -> str:
    """Return ``action`` as a reply in the format of the environment, unless it already is one."""
    if package.project(action)[1]:
        return action
    if package.format_action is not None:
        return package.format_action(action)
    return f"<action>{action}</action>"


def check_replays(
    recorded_trajectories: Sequence[RecordedTrajectory], trajectories: Sequence[Trajectory]
) -> None:
    """Raise ``UsageError`` with file and line of the first trajectory that was not reproduced."""
    for recorded_trajectory, trajectory in zip(recorded_trajectories, trajectories, strict=True):
        num_recorded_actions, num_executed_actions = (
            len(recorded_trajectory.actions),
            len(trajectory.turns),
        )
        if trajectory.aborted is not None:
            reason = f"the replay failed ({trajectory.aborted}): {trajectory.abort_detail}"
            code: ProblemCode = "failed_call"
        elif num_executed_actions == num_recorded_actions:
            continue
        elif trajectory.truncated is not None:
            reason = (
                f"only {num_executed_actions} of {num_recorded_actions} actions fit; reason: "
                f"{trajectory.truncated}; fix: raise env.max_steps or data.max_response_length"
            )
            code = "does_not_fit"
        else:
            reason = (
                f"action {num_executed_actions + 1} comes after the end of the episode; allowed: "
                f"at most {num_executed_actions} actions; fix: remove the actions after it, or "
                "correct task and seed"
            )
            code = "wrong_cell"
        raise UsageError(f"{recorded_trajectory.source}: {reason}", code)
