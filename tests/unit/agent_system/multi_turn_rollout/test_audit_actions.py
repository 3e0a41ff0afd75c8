"""Audits without levels: sampled actions are executed, and recorded trajectories replayed.

On the number line, a trajectory whose first action is "stay" stays until it fails; every other
trajectory succeeds.
"""

import re
from typing import Any

import pytest
import torch

from agent_system.environments.env_package.number_line.package import PACKAGE
from agent_system.multi_turn_rollout.audit_rollouts import (
    RecordedTrajectory,
    build_recorded_specs,
    check_replays,
)
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.trajectory import Trajectory
from rlvcr.research.audit import correlate_scores
from rlvcr.settings import get_rlvcr_settings
from tests.helpers.number_line_world import PLACE, make_config, make_world, walk
from tests.helpers.refusals import has_problem
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.protocol import DataProto
from verl.records import PRICE_MULTIPLIER
from verl.utils.commands import UsageError

TASK = {"task_id": "number_line/1-3", "data_source": "number_line", "start": 1, "target": 3}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def script(request: Any, prompt: str) -> str:
    """Draw the first action by the seed. Then repeat "stay", or else walk to the target."""
    earlier_actions = re.findall(r"<action>(left|right|stay)</action>", prompt)
    if len(PLACE.findall(prompt)) == 1:
        return f"<action>{('stay', walk(prompt))[request.seed % 2]}</action>"
    return f"<action>{'stay' if 'stay' in earlier_actions else walk(prompt)}</action>"


def compute_log_prob(data: DataProto) -> DataProto:
    zeros = torch.zeros(data.batch["responses"].shape)
    return DataProto.from_dict({"old_log_probs": zeros, "entropys": zeros.clone()})


def audit(tokenizer, recorded=()):
    config = make_config(n=2, max_steps=12)
    settings = get_rlvcr_settings(config.algorithm)
    settings.audit_points, settings.audit_plays, settings.audit_actions = 30, 2, 3
    group, envs, _ = make_world(tokenizer, config, script, score=compute_log_prob)
    collector = TrajectoryCollector(config, tokenizer)
    try:
        tasks = envs.gen_batch(1, 4)
        tasks.meta_info[PRICE_MULTIPLIER] = 0.25
        return collector.audit_loop(tasks, group, envs, recorded)
    finally:
        collector.close()


def test_different_actions_are_executed_and_the_original_is_the_first(tokenizer):
    data, _, points = audit(tokenizer)
    first_actions = {
        uid: steps[0].action
        for uid, steps in zip(
            data.non_tensor_batch["traj_uid"], data.non_tensor_batch["steps"], strict=True
        )
    }
    # After the first move the policy repeats itself, so only the first turns have two actions.
    assert points and {point.step for point in points} == {0}
    assert data.meta_info["metrics"]["audit/points_failed"] > 0
    for point in points:
        original = first_actions[point.traj_uid]
        assert point.options[0] == original and point.chosen == 1
        assert set(point.options) == {"stay", next(a for a in point.options if a != "stay")}
        assert point.returns == tuple((float(a != "stay"),) * 2 for a in point.options)
        assert point.option_effects[0] == (-0.5 if original == "stay" else 0.5)
        assert point.won == (original != "stay") and not point.scores
        assert point.task is not None and point.task.startswith("number_line/")


def test_tables_of_an_audit_without_levels_have_the_chosen_action_only(tokenizer):
    result = correlate_scores(audit(tokenizer).points, resamples=20)
    assert result.level_effects == () and result.reliability == pytest.approx(1)
    assert [score.name for score in result.scores] == ["random"]
    assert result.scores[0].all_levels is None and result.second_audit.all_levels is None
    assert result.second_audit.chosen[0] == pytest.approx(1)


def test_a_recorded_trajectory_is_replayed_and_audited(tokenizer):
    recorded = [
        RecordedTrajectory("file, line 1", TASK, 3, ("left", "<action>right</action>", "right")),
        RecordedTrajectory("file, line 2", TASK, 3, ("right", "right")),
        RecordedTrajectory("file, line 3", TASK, 4, ("stay",)),
    ]
    data, scored, points = audit(tokenizer, recorded)
    columns = data.non_tensor_batch
    names = ["recorded-number_line/1-3-3/0", "recorded-number_line/1-3-3/1"]
    assert columns["traj_uid"].tolist() == [*names, "recorded-number_line/1-3-4/0"]
    actions = [[step.action for step in steps] for steps in columns["steps"]]
    assert actions == [["left", "right", "right"], ["right", "right"], ["stay"]]
    assert columns["won"].tolist() == [False, True, False]
    # Every token of a recorded turn counts as sampled.
    assert scored.batch["response_mask"].any(-1).all()
    assert {(point.traj_uid, point.step) for point in points} == {
        (columns["traj_uid"][row], 0) for row in range(3)
    }
    by_uid = {point.traj_uid: point for point in points}
    stayed = by_uid["recorded-number_line/1-3-4/0"]
    assert stayed.options == ("stay", "right") and stayed.returns == ((0.0, 0.0), (1.0, 1.0))
    assert (stayed.task, stayed.seed) == (TASK["task_id"], 4)
    # After "left", the recorded action, the trajectory continues beyond its recorded end.
    assert by_uid[names[0]].options == ("left", "stay", "right")
    assert by_uid[names[0]].returns == ((1.0, 1.0), (0.0, 0.0), (1.0, 1.0))


@pytest.mark.parametrize("recorded", [(), (RecordedTrajectory("f", TASK, 3, ("right",)),)])
def test_rows_have_the_price_multiplier_of_the_tasks(tokenizer, recorded):
    """Credit is computed from these rows, so prices are those of the audited checkpoint."""
    data, scored, _ = audit(tokenizer, recorded)
    assert data.meta_info[PRICE_MULTIPLIER] == scored.meta_info[PRICE_MULTIPLIER] == 0.25


def test_an_action_after_the_end_names_its_line(tokenizer):
    recorded = [
        RecordedTrajectory("file, line 1", TASK, 3, ("right",)),
        RecordedTrajectory("file, line 2", TASK, 3, ("right", "right", "left")),
    ]
    with pytest.raises(UsageError, check=has_problem("wrong_cell", "", "file, line 2: ", 3)):
        audit(tokenizer, recorded)


def test_a_replay_that_failed_or_did_not_fit_names_its_line():
    recorded = [RecordedTrajectory("file, line 1", TASK, 3, ("right",))]
    specs = build_recorded_specs(recorded, PACKAGE, lambda text: [*text.encode()])
    with pytest.raises(UsageError, check=has_problem("failed_call", "", "file, line 1: ")):
        check_replays(recorded, [Trajectory(specs[0], aborted="env_error", abort_detail="lost")])
    with pytest.raises(UsageError, check=has_problem("does_not_fit", "", "file, line 1: ")):
        check_replays(recorded, [Trajectory(specs[0], truncated="budget")])


def test_actions_become_replies_that_the_package_reads():
    recorded = [RecordedTrajectory("f", TASK, 0, ("left", "so <action>right</action>"))]
    (spec,) = build_recorded_specs(recorded, PACKAGE, lambda text: [*text.encode()])
    texts = [bytes(ids).decode() for ids in spec.replayed_turns]
    assert texts == ["<action>left</action>", "so <action>right</action>"]
    assert spec.max_turns == 2 and spec.env_seed == 0
