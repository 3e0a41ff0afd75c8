"""Rollouts of a credit audit, which measures how a level or an action changes the return.

At selected turns of finished episodes every option is executed, and the episode continues to its
end. With thinking levels the options are the four levels. Without, they are actions: the original
one, and others that the policy samples at that turn. A branch is a replay up to such a turn:

    original   s0 ──3── s1 ──2── s2 ──4── ...
    branch     s0 ──3── s1 ──1── s2' ── ...     turn 0 is repeated token by token, not sampled

The same task, seed and actions should lead to the same state. The replay compares observations up
to the forced turn. If they differ, the branch is aborted and dropped. Branches are never trained
on; only their returns are used.

An audit can also replay trajectories that other programs recorded. Each has a task, a seed and
actions:

    {"task_id": "7", "seed": 3, "actions": ["go north", "take key"]}
        ──reset(task 7, seed 3), then the actions──▶ trajectory of this framework

The environment must reproduce the episode from task, seed and actions.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from agent_system.environments.env import Task
from agent_system.environments.package import EnvPackage
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory, Turn
from rlvcr.levels import LEVELS
from rlvcr.records import SCORE_KEYS, ThinkingTurnRecord
from rlvcr.research.audit import AuditedTurn
from verl.config.settings.errors import ProblemCode
from verl.protocol import DataProto
from verl.utils.commands import UsageError
from verl.utils.sampling import StopReason
from verl.utils.seeds import derive_seed

# Function that generates branches: replays of trajectories up to a turn, continued to the end.
GenerateBranches = Callable[[Sequence[RolloutSpec]], list[Trajectory]]
TurnRecords = dict[tuple[str, int], ThinkingTurnRecord]  # by traj_uid and turn number
SAMPLES_PER_EXTRA_ACTION = 4  # sampled turns per extra action, because many repeat an action
# Number of rollouts that are generated at a time. Their whole trajectories are in memory.
ROLLOUTS_PER_CALL = 2048


class SampledAction(NamedTuple):
    """Action that was sampled at a turn, with the tokens of the whole turn."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DecisionPoint:
    """Turn of a trajectory at which an audit executes every option.

    ``actions`` are the options of an audit without levels, the original action first. They are
    empty if the options are the thinking levels.
    """

    trajectory: Trajectory
    turn: Turn
    record: ThinkingTurnRecord
    actions: tuple[SampledAction, ...] = ()


class AuditRollouts(NamedTuple):
    """Result of the rollouts of a credit audit.

    ``points``: the audited turns, with the returns of each option. ``data``: rows of the original
    trajectories for the rollout log. ``scored_data``: the same rows with log-probs and entropies of
    each action after the thoughts of all levels.
    """

    data: DataProto
    scored_data: DataProto  # the rows of ``data`` with scores of their actions
    points: list[AuditedTurn]


def select_decision_points(
    trajectories: Sequence[Trajectory], data: DataProto, count: int, seed: int, has_levels: bool
) -> list[DecisionPoint]:
    """Return at most ``count`` turns, drawn uniformly from those that can be audited.

    In an audit of thinking levels these are turns with a scored thought at each of the four levels.
    Without levels they are turns that were not cut by a length limit. ``data`` has the turn records
    of ``trajectories``.
    """
    columns = data.non_tensor_batch
    records: TurnRecords = {
        (uid, turn_record.step): turn_record
        for uid, turn_records in zip(columns["traj_uid"], columns["steps"], strict=True)
        for turn_record in turn_records
    }
    points = []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            record = records[trajectory.spec.traj_uid, turn.step]
            is_complete = turn.stop_reason is StopReason.STOP
            if len(record.contexts) == len(LEVELS) if has_levels else is_complete:
                points.append(DecisionPoint(trajectory, turn, record))
    points.sort(
        key=lambda point: derive_seed(
            seed, "audit", point.trajectory.spec.traj_uid, point.turn.step
        )
    )
    return points[:count]


def sample_alternative_actions(
    points: Sequence[DecisionPoint], generate: GenerateBranches, num_actions: int
) -> list[DecisionPoint]:
    """Return ``points`` with up to ``num_actions`` different actions each.

    The first is the original action. A point at which the policy sampled no other is dropped.
    """
    num_candidates = SAMPLES_PER_EXTRA_ACTION * (num_actions - 1)
    specs_by_point = [
        [
            replace(
                make_branch_spec(point.trajectory, point.turn, None, f"?{number}"),
                max_turns=point.turn.step + 1,
            )
            for number in range(num_candidates)
        ]
        for point in points
    ]
    points_with_actions = []
    for point, sampled_branches in zip(
        points, _generate_branches_in_chunks(specs_by_point, generate), strict=True
    ):
        actions = {point.turn.action: _get_turn_ids(point.trajectory, point.turn)}
        for sampled_branch in sampled_branches:
            turns_from_point = (
                sampled_branch.turns[point.turn.step :] if sampled_branch.aborted is None else []
            )
            if turns_from_point and turns_from_point[0].stop_reason is StopReason.STOP:
                actions.setdefault(
                    turns_from_point[0].action, _get_turn_ids(sampled_branch, turns_from_point[0])
                )
        if len(actions) > 1:
            action_options = tuple(itertools.starmap(SampledAction, actions.items()))[:num_actions]
            points_with_actions.append(replace(point, actions=action_options))
    return points_with_actions


def measure_option_returns(
    points: Sequence[DecisionPoint], generate: GenerateBranches, rollouts_per_option: int
) -> list[AuditedTurn]:
    """Continue from every turn in ``points`` with every option, ``rollouts_per_option`` times each.

    An option is a thinking level or an action. The result has the returns of these rollouts. A
    point is dropped if one of its rollouts failed, for example because the state was not
    reproduced.
    """
    specs_by_point = [_make_option_specs(point, rollouts_per_option) for point in points]
    branches = _generate_branches_in_chunks(specs_by_point, generate)
    audited_turns: list[AuditedTurn] = []
    for point, point_branches in zip(points, branches, strict=True):
        original_option = 1 if point.actions else point.record.level
        if any(branch.aborted is not None for branch in point_branches) or original_option is None:
            continue
        returns = [branch.reward for branch in point_branches]
        spec = point.trajectory.spec
        audited_turns.append(
            AuditedTurn(
                traj_uid=spec.traj_uid,
                step=point.turn.step,
                chosen=original_option,
                won=point.trajectory.won,
                returns=tuple(
                    tuple(returns[start : start + rollouts_per_option])
                    for start in range(0, len(returns), rollouts_per_option)
                ),
                scores={} if point.actions else _collect_level_scores(point.record),
                task=spec.task["task_id"],
                seed=spec.env_seed,
                options=tuple(action.text for action in point.actions),
            )
        )
    return audited_turns


def _make_option_specs(point: DecisionPoint, rollouts_per_option: int) -> list[RolloutSpec]:
    """Return ``rollouts_per_option`` rollout specs for each option of the turn ``point``."""
    branch_names = [f"#{rollout_number}" for rollout_number in range(rollouts_per_option)]
    trajectory, turn = point.trajectory, point.turn
    if not point.actions:
        return [
            make_branch_spec(trajectory, turn, level, name)
            for level in LEVELS
            for name in branch_names
        ]
    specs = [make_branch_spec(trajectory, turn, None, name) for name in branch_names]
    return [
        replace(spec, replayed_turns=(*spec.replayed_turns, action.token_ids))
        for action in point.actions
        for spec in specs
    ]


def _generate_branches_in_chunks(
    specs_by_point: Sequence[Sequence[RolloutSpec]], generate: GenerateBranches
) -> Iterator[list[Trajectory]]:
    """Yield the trajectories of each point, generated in chunks that limit the memory."""
    max_specs_per_point = max(map(len, specs_by_point), default=1)
    points_per_call = max(1, ROLLOUTS_PER_CALL // max_specs_per_point)
    for chunk_start in range(0, len(specs_by_point), points_per_call):
        chunk_specs_by_point = specs_by_point[chunk_start : chunk_start + points_per_call]
        specs = [spec for specs_of_point in chunk_specs_by_point for spec in specs_of_point]
        branches = iter(generate([replace(spec, index=index) for index, spec in enumerate(specs)]))
        for specs_of_point in chunk_specs_by_point:
            yield list(itertools.islice(branches, len(specs_of_point)))


def make_branch_spec(
    trajectory: Trajectory, turn: Turn, level: int | None, name: str = ""
) -> RolloutSpec:
    """Return the rollout spec of a branch of ``trajectory``.

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
            _get_turn_ids(trajectory, repeated_turn) for repeated_turn in repeated_turns
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


def _get_turn_ids(trajectory: Trajectory, turn: Turn) -> tuple[int, ...]:
    return tuple(trajectory.ledgers[turn.ledger].token_ids[turn.start : turn.end])


def _collect_level_scores(record: ThinkingTurnRecord) -> dict[str, tuple[float, ...]]:
    """Return the scores of the four thinking levels at one turn, as a dict by kind of score.

    The kinds are log-prob, probability and negative entropy of the turn's action, computed after
    the thought of each level. A level with a higher score is rated as better. The kind ``deeper``
    is the number of the level, as a baseline.
    """
    scores = {
        name: tuple(float(getattr(context.scores, name)) for context in record.contexts)
        for name in SCORE_KEYS
    }
    # Negate the entropy: a low entropy is better.
    scores["entropy"] = tuple(-value for value in scores["entropy"])
    return scores | {"deeper": tuple(float(level) for level in LEVELS)}


# ---- trajectories that were recorded elsewhere ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordedTrajectory:
    """Recorded episode of ``task``. An action is the text for the environment, or a whole reply."""

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
        num_recorded_actions = len(recorded_trajectory.actions)
        num_executed_actions = len(trajectory.turns)
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
