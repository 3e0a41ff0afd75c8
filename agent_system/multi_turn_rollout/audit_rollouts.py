"""Rollouts of a credit audit, which measures the effect of thinking levels on the return.
At selected turns of finished episodes every level is forced, and the episode continues to its end.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from agent_system.multi_turn_rollout.branches import make_branch_spec
from agent_system.multi_turn_rollout.collector_worker import CollectedTrajectories
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory, Turn
from rlvcr.levels import LEVELS
from rlvcr.records import SCORE_KEYS, ThinkingTurnRecord
from rlvcr.research.audit import AuditPoint
from verl.protocol import DataProto
from verl.utils.seeds import derive_seed

TurnRecords = dict[tuple[str, int], ThinkingTurnRecord]  # by traj_uid and turn number


def index_records(data: DataProto) -> TurnRecords:
    """Return the turn records of ``data`` by trajectory and turn."""
    columns = data.non_tensor_batch
    return {
        (uid, step.step): step
        for uid, steps in zip(columns["traj_uid"], columns["steps"], strict=True)
        for step in steps
    }


def select_decision_points(
    trajectories: Sequence[Trajectory],
    records: TurnRecords,
    count: int,
    seed: int,
) -> list[tuple[Trajectory, Turn, ThinkingTurnRecord]]:
    """Return at most ``count`` turns with scores at all four levels, drawn uniformly."""
    points = []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            record = records[trajectory.spec.traj_uid, turn.step]
            if len(record.contexts) == len(LEVELS):
                points.append((trajectory, turn, record))
    points.sort(key=lambda point: derive_seed(seed, "audit", point[0].spec.traj_uid, point[1].step))
    return points[:count]


def continue_from_points(
    points: Sequence[tuple[Trajectory, Turn, ThinkingTurnRecord]],
    generate: Callable[[Sequence[RolloutSpec]], CollectedTrajectories],
    rollouts_per_level: int,
) -> list[AuditPoint]:
    """Continue from every point ``rollouts_per_level`` times with every level.

    The result has the returns of these rollouts. A point is dropped where a rollout failed, for
    example because its state was not reproduced.
    """
    specs = [
        make_branch_spec(trajectory, turn, level, f"#{rollout_number}")
        for trajectory, turn, _ in points
        for level in LEVELS
        for rollout_number in range(rollouts_per_level)
    ]
    branches = generate(
        [replace(spec, index=index) for index, spec in enumerate(specs)]
    ).trajectories
    audit_points: list[AuditPoint] = []
    per_point = len(LEVELS) * rollouts_per_level
    for point_index, (trajectory, turn, record) in enumerate(points):
        point_branches = branches[point_index * per_point : (point_index + 1) * per_point]
        if any(branch.aborted is not None for branch in point_branches) or record.level is None:
            continue
        returns = [branch.reward for branch in point_branches]
        audit_points.append(
            AuditPoint(
                traj_uid=trajectory.spec.traj_uid,
                step=turn.step,
                level=record.level,
                won=trajectory.won,
                returns=tuple(
                    tuple(returns[column * rollouts_per_level : (column + 1) * rollouts_per_level])
                    for column in range(len(LEVELS))
                ),
                scores=_collect_scores(record),
                task=trajectory.spec.uid,
            )
        )
    return audit_points


def _collect_scores(record: ThinkingTurnRecord) -> dict[str, tuple[float, ...]]:
    """Return the scores of every level that the audit compares with returns; higher is better.

    They are the scores of the action and ``deeper``: the number of the level.
    """
    scores = {
        name: tuple(float(getattr(context.scores, name)) for context in record.contexts)
        for name in SCORE_KEYS
    }
    # Negated, because an action with low entropy is better.
    scores["entropy"] = tuple(-value for value in scores["entropy"])
    return scores | {"deeper": tuple(float(level) for level in LEVELS)}
