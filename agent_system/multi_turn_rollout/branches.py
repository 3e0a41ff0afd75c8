"""Branches: replays of a trajectory up to a turn, in which another thinking level is forced.

    original   s0 ──3── s1 ──2── s2 ──4── ...
    branch     s0 ──3── s1 ──1── s2' ── ...     turn 0 is repeated token by token, not sampled

The same task, seed and actions should lead to the same state. The replay compares observations up
to the forced turn. If they differ, the branch is aborted and dropped. Branches are never trained
on; only their returns are used. ``execute_alternatives`` turns them into credit, and
``audit_rollouts`` measures with them the effect of decisions on the return.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from agent_system.multi_turn_rollout.collector_worker import CollectedTrajectories
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory, Turn
from rlvcr.research.executed import (
    DIFFERENCE_FACTOR,
    choose_executed_level,
    compute_priced_return,
    count_priced_tokens,
)
from rlvcr.settings import RLVCRSettings

GenerateBranches = Callable[[Sequence[RolloutSpec]], CollectedTrajectories]


def make_branch_spec(
    trajectory: Trajectory, turn: Turn, level: int | None, name: str = ""
) -> RolloutSpec:
    """Return the rollout spec that repeats ``trajectory`` up to ``turn`` and forces ``level``
    there.

    With ``level=None`` the policy samples the turn without a forced level. ``name`` distinguishes
    replays of one turn. Sampling seeds depend on ``name`` and on the turn, not on the level:
    replays with different levels use the same seeds.
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
        forced_level=level,
        max_turns=None,
    )


def _make_executed_spec(trajectory: Trajectory, turn: Turn, level: int) -> RolloutSpec:
    """Return the spec of a branch in which only the level digit of ``turn`` is forced.

    The policy samples everything after the digit, as in the original turn. A branch therefore has
    cut turns, empty thoughts and parse failures as often as a sampled turn.
    """
    spec = make_branch_spec(trajectory, turn, level)
    level_choice = None if turn.parsed is None else turn.parsed.choice
    if level_choice is None:
        return spec
    ids = trajectory.ledgers[turn.ledger].token_ids
    return replace(
        spec, tokens_before_level=tuple(ids[turn.start : turn.start + level_choice.position])
    )


def execute_alternatives(
    trajectories: Sequence[Trajectory],
    generate: GenerateBranches,
    rlvcr: RLVCRSettings,
    seed: int,
) -> dict[str, float]:
    """Replay a share of the turns with another level, store the credit in the turns, return
    metrics.

    ``Turn.executed_credit`` is 3/4 of the difference: return of the original trajectory minus
    return of the replay, both after token cost. The factor 3/4 makes its expectation the advantage
    over the mean of all four levels. Failed replays give no credit.
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
    num_dropped = 0
    for (trajectory, turn), branch in zip(branch_points, branches, strict=True):
        branch_priced_return = priced_return_at(branch, turn.step, rlvcr)
        original_priced_return = priced_return_at(trajectory, turn.step, rlvcr)
        if branch_priced_return is None or original_priced_return is None:
            num_dropped += 1
            continue
        turn.executed_credit = DIFFERENCE_FACTOR * (original_priced_return - branch_priced_return)
    # The turns before the forced one were repeated, not sampled.
    sampled_turns = [
        turn for branch in branches for turn in branch.turns[len(branch.spec.replayed_turns) :]
    ]
    return {
        "rlvcr/executed_dropped": num_dropped / len(specs),
        "rlvcr/executed_tokens": float(sum(turn.num_tokens for turn in sampled_turns)),
    }


def priced_return_at(trajectory: Trajectory, step: int, rlvcr: RLVCRSettings) -> float | None:
    """Return the return of ``trajectory`` minus the token cost of its thought at turn ``step``.

    Return None if the trajectory failed or has no such turn.
    """
    if trajectory.aborted is not None or len(trajectory.turns) <= step:
        return None
    turn = trajectory.turns[step]
    num_priced_tokens = count_priced_tokens(turn.parsed, turn.end - turn.start)
    return compute_priced_return(trajectory.reward, trajectory.won, num_priced_tokens, rlvcr)
