"""Branches: a step of a play is returned to, another thinking level is forced there, and the play
goes on.

    play     s0 ──3── s1 ──2── s2 ──4── ...
    branch   s0 ──3── s1 ──1── s2' ── ...       turn 0 is repeated token by token, not sampled

The same task, seed and actions lead to the same state, or the branch breaks and is left out: its
player compares what it sees with what was seen, up to the step where the level is forced. Branches
are never trained on; their returns are what is wanted.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from agent_system.multi_turn_rollout.collector_worker import Collected
from agent_system.multi_turn_rollout.trajectory import Job, Trajectory, Turn
from rlvcr.research.executed import SHARE_OF_OTHERS, level_to_try, priced_tokens, worth
from rlvcr.settings import RLVCRSettings


def branch_job(trajectory: Trajectory, turn: Turn, level: int, name: str = "") -> Job:
    """The job that repeats ``trajectory`` up to ``turn`` and thinks at ``level`` there.

    ``name`` tells branches of a step apart. What is sampled hangs on it and on the step, not on the
    level: branches that differ in their level draw alike.
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
    """The branch in which ``turn`` differs by its level digit alone.

    What follows the digit is the policy's own in both: a branch may be cut, leave out its thought
    or be unreadable as often as a turn whose level was sampled.
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
    """Play on with another level at a share of the steps, and note in their turns how much more
    their own play was worth: ``Turn.executed``, in units of the return.

    Returns metrics. A branch that broke says nothing.
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
    """What ``trajectory`` was worth, less the price of its thought at ``step``; None where it broke
    or was never there.
    """
    if trajectory.aborted is not None or len(trajectory.turns) <= step:
        return None
    turn = trajectory.turns[step]
    tokens = priced_tokens(turn.parsed, turn.end - turn.start)
    return worth(trajectory.reward, trajectory.won, tokens, rlvcr)


def sampled_since_branch(trajectory: Trajectory) -> int:
    """Tokens that were sampled after what the branch repeats."""
    repeated = len(trajectory.job.replay)
    return sum(turn.num_tokens for turn in trajectory.turns[repeated:])
