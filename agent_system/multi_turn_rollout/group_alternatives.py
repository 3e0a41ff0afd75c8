"""Alternative thoughts of a whole group, sampled after its rollout.

prompt p: member 1 at level 2, member 5 at level 3     levels 1, 2, 3, 4 are sampled once after p
prompt q: member 1 at level 4                          levels 1, 2, 3 are sampled after q
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_system.multi_turn_rollout.trajectory import Trajectory, Turn
from agent_system.multi_turn_rollout.trajectory_generator import (
    RolloutContext,
    gather_or_cancel,
    generate_alternative_thinking_levels,
)
from rlvcr.alternatives import AlternativeSampler, TurnAlternatives
from rlvcr.levels import ParsedTurn


async def generate_group_alternatives(
    context: RolloutContext, trajectories: Sequence[Trajectory]
) -> None:
    """Sample alternative thoughts for all turns of ``trajectories``, the members of one group.

    With ``share_thoughts``, turns with equal prompts and formats get the same thoughts. They are
    sampled once, with the seed of the first of these turns.
    """
    sampler = context.alternatives
    if sampler is None:
        return
    turns = [(trajectory, turn) for trajectory in trajectories for turn in trajectory.turns]
    if not sampler.settings.share:
        await gather_or_cancel(
            generate_alternative_thinking_levels(context, trajectory, turn)
            for trajectory, turn in turns
        )
        return
    sharing_turns: dict[object, list[_WantedThoughts]] = {}
    for trajectory, turn in turns:
        if turn.parsed is None:
            continue
        levels = sampler.choose_levels(turn.parsed, trajectory.spec.traj_uid, turn.step)
        if levels:
            prompt = trajectory.ledgers[turn.ledger].token_ids[: turn.start]
            key = (tuple(prompt), turn.parsed.turn_format)
            sharing_turns.setdefault(key, []).append(
                _WantedThoughts(trajectory, turn, turn.parsed, levels)
            )
    await gather_or_cancel(
        _sample_shared_thoughts(sampler, members) for members in sharing_turns.values()
    )


@dataclass(frozen=True, slots=True)
class _WantedThoughts:
    """Turn that needs thoughts at ``levels``."""

    trajectory: Trajectory
    turn: Turn
    parsed: ParsedTurn
    levels: list[int]


async def _sample_shared_thoughts(
    sampler: AlternativeSampler, members: Sequence[_WantedThoughts]
) -> None:
    """Sample the thoughts that any of ``members`` needs, and store them in the turns.

    The members have equal prompts.
    """
    first = members[0]
    spec = first.trajectory.spec
    shared = await sampler.sample_thoughts(
        first.trajectory.ledgers[first.turn.ledger].token_ids[: first.turn.start],
        first.parsed,
        sorted({level for member in members for level in member.levels}),
        spec.traj_uid,
        first.turn.step,
        spec.index,
    )
    for member in members:
        thoughts = [thought for thought in shared.thoughts if thought.level in member.levels]
        # Dropped thoughts and sampled tokens are counted once, in the first turn.
        member.turn.alternatives = (
            replace(shared, thoughts=thoughts) if member is first else TurnAlternatives(thoughts)
        )
