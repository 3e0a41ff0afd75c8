"""Branches: replays of a trajectory up to a turn, in which another thinking level is forced.

    original   s0 ──3── s1 ──2── s2 ──4── ...
    branch     s0 ──3── s1 ──1── s2' ── ...     turn 0 is repeated token by token, not sampled

The same task, seed and actions should lead to the same state. The replay compares observations up
to the forced turn; where they differ the branch is aborted and dropped. Branches are never trained
on; only their returns are used.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from agent_system.multi_turn_rollout.collector_worker import Collected
from agent_system.multi_turn_rollout.trajectory import Job, Trajectory, Turn
from rlvcr.research.executed import SHARE_OF_OTHERS, level_to_try, priced_tokens, worth
from rlvcr.settings import RLVCRSettings


def branch_job(trajectory: Trajectory, turn: Turn, level: int, name: str = "") -> Job:
    """Return the spec that repeats ``trajectory`` up to ``turn`` and forces ``level`` there.

    ``name`` distinguishes branches of one turn. Sampling seeds depend on it and on the turn, not on
    the level: branches with different levels use the same seeds.
    """
    until = trajectory.turns[: turn.step]
    return replace(
        trajectory.job,
        traj_uid=f"{trajectory.job.traj_uid}@{turn.step}{name}",
        replay=tuple(tuple(trajectory.ledgers[t.ledger].ids[t.start : t.end]) for t in until),
        seen=tuple(t.observation for t in (*until, turn)),
        level=level,
    )


def _executed_job(trajectory: Trajectory, turn: Turn, level: int) -> Job:
    """Return the spec of a branch in which ``turn`` differs only by its level digit.

    The policy samples everything after the digit, as in the original turn. A branch is therefore
    cut, without thought or unreadable as often as a sampled turn.
    """
    job = branch_job(trajectory, turn, level)
    choice = None if turn.parsed is None else turn.parsed.choice
    if choice is None:
        return job
    ids = trajectory.ledgers[turn.ledger].ids
    return replace(job, opening=tuple(ids[turn.start : turn.start + choice.position]))


def execute_alternatives(
    trajectories: Sequence[Trajectory],
    play: Callable[[Sequence[Job]], Collected],
    rlvcr: RLVCRSettings,
    seed: int,
) -> dict[str, float]:
    """Run branches with another level at a share of the turns, and store the credit in the turns.

    ``Turn.executed_credit`` is 3/4 of the original's priced return minus the branch's. Failed
    branches give no credit. Returns metrics.
    """
    asked: list[tuple[Trajectory, Turn]] = []
    jobs: list[Job] = []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            uid = trajectory.job.traj_uid
            level = level_to_try(turn.parsed, rlvcr.executed_share, seed, uid, turn.step)
            if level is not None:
                asked.append((trajectory, turn))
                jobs.append(replace(_executed_job(trajectory, turn, level), index=len(jobs)))
    if not jobs:
        return {"rlvcr/executed_dropped": 0.0, "rlvcr/executed_tokens": 0.0}
    branches = play(jobs).trajectories
    dropped = 0
    for (trajectory, turn), branch in zip(asked, branches, strict=True):
        other = value_at(branch, turn.step, rlvcr)
        own = value_at(trajectory, turn.step, rlvcr)
        if other is None or own is None:
            dropped += 1
            continue
        turn.executed = SHARE_OF_OTHERS * (own - other)
    return {
        "rlvcr/executed_dropped": dropped / len(jobs),
        "rlvcr/executed_tokens": float(np.sum([sampled_since_branch(b) for b in branches])),
    }


def value_at(trajectory: Trajectory, step: int, rlvcr: RLVCRSettings) -> float | None:
    """Return the return of ``trajectory`` minus the token cost of its thought at turn ``step``.

    None where the trajectory failed or has no such turn.
    """
    if trajectory.aborted is not None or len(trajectory.turns) <= step:
        return None
    turn = trajectory.turns[step]
    tokens = priced_tokens(turn.parsed, turn.end - turn.start)
    return worth(trajectory.reward, trajectory.won, tokens, rlvcr)


def sampled_since_branch(trajectory: Trajectory) -> int:
    """Return the number of tokens that were sampled after the repeated turns."""
    repeated = len(trajectory.job.replay)
    return sum(turn.num_tokens for turn in trajectory.turns[repeated:])
