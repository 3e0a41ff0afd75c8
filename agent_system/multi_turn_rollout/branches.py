"""Branches: replays of a trajectory up to a turn, in which another thinking level is forced.

    original   s0 ──3── s1 ──2── s2 ──4── ...
    branch     s0 ──3── s1 ──1── s2' ── ...     turn 0 is repeated token by token, not sampled

The same task, seed and actions should lead to the same state. The replay compares observations up
to the forced turn. If they differ, the branch is aborted and dropped. Branches are never trained
on; only their returns are used. ``audit_rollouts`` uses them to measure how levels and actions
change the return.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory, Turn

GenerateBranches = Callable[[Sequence[RolloutSpec]], list[Trajectory]]


def make_branch_spec(
    trajectory: Trajectory, turn: Turn, level: int | None, name: str = ""
) -> RolloutSpec:
    """Return the rollout spec (request for a trajectory) of a branch of ``trajectory``.

    A branch repeats the turns before ``turn`` and forces thinking level ``level`` at ``turn``. With
    ``level=None`` the policy samples the turn without a forced level. ``name`` distinguishes
    branches of one turn. Sampling seeds depend on ``name`` and on the turn, not on the level:
    branches with different levels use the same seeds.
    """
    repeated_turns = trajectory.turns[: turn.step]
    return replace(
        trajectory.spec,
        traj_uid=f"{trajectory.spec.traj_uid}@{turn.step}{name}",
        replayed_turns=tuple(
            tuple(
                trajectory.ledgers[repeated_turn.ledger].token_ids[
                    repeated_turn.start : repeated_turn.end
                ]
            )
            for repeated_turn in repeated_turns
        ),
        expected_observations=tuple(
            repeated_turn.observation for repeated_turn in (*repeated_turns, turn)
        ),
        replayed_summaries=tuple(
            tuple(trajectory.ledgers[ledger].token_ids[slice(*summary.span)])
            for ledger, summary in trajectory.summaries.items()
            if summary.step <= turn.step
        ),
        forced_level=level,
        max_turns=None,
    )
