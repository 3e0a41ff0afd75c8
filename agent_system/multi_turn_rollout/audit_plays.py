"""Rollouts of a credit audit: at decision points every level is forced and the episode continues to
its end.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from agent_system.multi_turn_rollout.branches import branch_job
from agent_system.multi_turn_rollout.collector_worker import Collected
from agent_system.multi_turn_rollout.trajectory import Job, Trajectory, Turn
from rlvcr.levels import LEVELS
from rlvcr.records import MEASURES, ThinkingStep
from rlvcr.research.audit import AuditPoint
from verl.protocol import DataProto
from verl.utils.seeds import derive_seed

Records = dict[tuple[str, int], ThinkingStep]  # by trajectory and step


def records_of(data: DataProto) -> Records:
    """Return the turn records of ``data`` by trajectory and turn."""
    columns = data.non_tensor_batch
    return {
        (uid, step.step): step
        for uid, steps in zip(columns["traj_uid"], columns["steps"], strict=True)
        for step in steps
    }


def decision_points(
    trajectories: Sequence[Trajectory],
    records: Records,
    count: int,
    seed: int,
) -> list[tuple[Trajectory, Turn, ThinkingStep]]:
    """Return at most ``count`` turns with scores at all four levels, drawn uniformly."""
    found = []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            record = records[trajectory.job.traj_uid, turn.step]
            if len(record.contexts) == len(LEVELS):
                found.append((trajectory, turn, record))
    found.sort(key=lambda point: derive_seed(seed, "audit", point[0].job.traj_uid, point[1].step))
    return found[:count]


def play_points(
    points: Sequence[tuple[Trajectory, Turn, ThinkingStep]],
    play: Callable[[Sequence[Job]], Collected],
    plays: int,
) -> list[AuditPoint]:
    """Continue every point ``rollouts_per_level`` times with every level, and return the returns.

    A point is dropped where a rollout failed, for example because its state was not reproduced.
    """
    jobs = [
        branch_job(trajectory, turn, level, f"#{number}")
        for trajectory, turn, _ in points
        for level in LEVELS
        for number in range(plays)
    ]
    played = play([replace(job, index=index) for index, job in enumerate(jobs)]).trajectories
    audited: list[AuditPoint] = []
    per_point = len(LEVELS) * plays
    for place, (trajectory, turn, record) in enumerate(points):
        own = played[place * per_point : (place + 1) * per_point]
        if any(branch.aborted is not None for branch in own) or record.level is None:
            continue
        returns = [branch.reward for branch in own]
        audited.append(
            AuditPoint(
                traj_uid=trajectory.job.traj_uid,
                step=turn.step,
                level=record.level,
                won=trajectory.won,
                returns=tuple(
                    tuple(returns[column * plays : (column + 1) * plays])
                    for column in range(len(LEVELS))
                ),
                scores=_scores(record),
                task=trajectory.job.uid,
            )
        )
    return audited


def _scores(record: ThinkingStep) -> dict[str, tuple[float, ...]]:
    """Return the scores of every level that the audit compares with returns; higher is better.

    They are the measures of the action and ``deeper``, the level itself.
    """
    scores = {
        name: tuple(float(getattr(context.scores, name)) for context in record.contexts)
        for name in MEASURES
    }
    # Higher is better: negative entropy.
    scores["entropy"] = tuple(-value for value in scores["entropy"])
    return scores | {"deeper": tuple(float(level) for level in LEVELS)}
