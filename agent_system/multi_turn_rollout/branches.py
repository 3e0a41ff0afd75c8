"""Branches: replays of a trajectory up to a turn, in which another thinking level is forced.

    original   s0 ──3── s1 ──2── s2 ──4── ...
    branch     s0 ──3── s1 ──1── s2' ── ...     turn 0 is repeated token by token, not sampled

The same task, seed and actions should lead to the same state. The replay compares observations up
to the forced turn; where they differ the branch is aborted and dropped. Branches are never trained
on; only their returns are used. ``execute_alternatives`` turns them into credit. A credit audit
measures with them the effect of every level on the return (``continue_from_points``).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from agent_system.multi_turn_rollout.collector_worker import CollectedTrajectories
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory, Turn
from rlvcr.levels import LEVELS
from rlvcr.records import SCORE_KEYS, ThinkingTurnRecord
from rlvcr.research.audit import AuditPoint
from rlvcr.research.executed import (
    DIFFERENCE_FACTOR,
    choose_executed_level,
    count_priced_tokens,
    priced_return,
)
from rlvcr.settings import RLVCRSettings
from verl.protocol import DataProto
from verl.utils.seeds import derive_seed

GenerateBranches = Callable[[Sequence[RolloutSpec]], CollectedTrajectories]
DecisionPoint = tuple[Trajectory, Turn, ThinkingTurnRecord]


def make_branch_spec(trajectory: Trajectory, turn: Turn, level: int, name: str = "") -> RolloutSpec:
    """Return the request to repeat ``trajectory`` up to ``turn`` and to force ``level`` there.

    ``name`` distinguishes branches of one turn. Sampling seeds depend on it and on the turn, not on
    the level: branches with different levels use the same seeds.
    """
    repeated_turns = trajectory.turns[: turn.step]
    return replace(
        trajectory.spec,
        traj_uid=f"{trajectory.spec.traj_uid}@{turn.step}{name}",
        replay=tuple(
            tuple(trajectory.ledgers[t.ledger].token_ids[t.start : t.end]) for t in repeated_turns
        ),
        expected_observations=tuple(t.observation for t in (*repeated_turns, turn)),
        forced_level=level,
    )


def _make_executed_spec(trajectory: Trajectory, turn: Turn, level: int) -> RolloutSpec:
    """Return the request for a branch in which only the level digit of ``turn`` is forced.

    The policy samples everything after the digit, as in the original turn. A branch therefore has
    cut turns, empty thoughts and parse failures as often as a sampled turn.
    """
    spec = make_branch_spec(trajectory, turn, level)
    choice = None if turn.parsed is None else turn.parsed.choice
    if choice is None:
        return spec
    ids = trajectory.ledgers[turn.ledger].token_ids
    return replace(spec, tokens_before_level=tuple(ids[turn.start : turn.start + choice.position]))


def execute_alternatives(
    trajectories: Sequence[Trajectory],
    generate: GenerateBranches,
    rlvcr: RLVCRSettings,
    seed: int,
) -> dict[str, float]:
    """Replay a share of the turns with another level, and store the credit in the turns.

    ``Turn.executed_credit`` is 3/4 of the difference between the original's and the branch's
    return, both minus token cost. Failed branches give no credit. Returns metrics.
    """
    branch_points: list[tuple[Trajectory, Turn]] = []
    specs: list[RolloutSpec] = []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            uid = trajectory.spec.traj_uid
            level = choose_executed_level(turn.parsed, rlvcr.executed_share, seed, uid, turn.step)
            if level is not None:
                spec = _make_executed_spec(trajectory, turn, level)
                branch_points.append((trajectory, turn))
                specs.append(replace(spec, index=len(specs)))
    if not specs:
        return {"rlvcr/executed_dropped": 0.0, "rlvcr/executed_tokens": 0.0}
    branches = generate(specs).trajectories
    dropped = 0
    for (trajectory, turn), branch in zip(branch_points, branches, strict=True):
        branch_value = priced_return_at(branch, turn.step, rlvcr)
        original_value = priced_return_at(trajectory, turn.step, rlvcr)
        if branch_value is None or original_value is None:
            dropped += 1
            continue
        turn.executed_credit = DIFFERENCE_FACTOR * (original_value - branch_value)
    # The turns before the forced one were repeated, not sampled.
    sampled_turns = [turn for b in branches for turn in b.turns[len(b.spec.replay) :]]
    return {
        "rlvcr/executed_dropped": dropped / len(specs),
        "rlvcr/executed_tokens": float(sum(turn.num_tokens for turn in sampled_turns)),
    }


def priced_return_at(trajectory: Trajectory, step: int, rlvcr: RLVCRSettings) -> float | None:
    """Return the return of ``trajectory`` minus the token cost of its thought at turn ``step``.

    None where the trajectory failed or has no such turn.
    """
    if trajectory.aborted is not None or len(trajectory.turns) <= step:
        return None
    turn = trajectory.turns[step]
    tokens = count_priced_tokens(turn.parsed, turn.end - turn.start)
    return priced_return(trajectory.reward, trajectory.won, tokens, rlvcr)


def select_decision_points(
    trajectories: Sequence[Trajectory], data: DataProto, count: int, seed: int
) -> list[DecisionPoint]:
    """Return at most ``count`` turns with scores at all four levels, drawn uniformly.

    The records of the turns are those in ``data``, the scored rows of ``trajectories``.
    """
    columns = data.non_tensor_batch
    records = {
        (uid, record.step): record
        for uid, steps in zip(columns["traj_uid"], columns["steps"], strict=True)
        for record in steps
    }
    points: list[DecisionPoint] = []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            record = records[trajectory.spec.traj_uid, turn.step]
            if len(record.contexts) == len(LEVELS):
                points.append((trajectory, turn, record))
    points.sort(key=lambda point: derive_seed(seed, "audit", point[0].spec.traj_uid, point[1].step))
    return points[:count]


def continue_from_points(
    points: Sequence[DecisionPoint],
    generate: GenerateBranches,
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
    numbered_specs = [replace(spec, index=index) for index, spec in enumerate(specs)]
    branches = generate(numbered_specs).trajectories
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
                    tuple(returns[start : start + rollouts_per_level])
                    for start in range(0, per_point, rollouts_per_level)
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
