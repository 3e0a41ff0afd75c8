"""Files of an audit: recorded trajectories and external scores, with errors by line."""

import math

import pytest

from agent_system.multi_turn_rollout.audit_rollouts import RecordedTrajectory
from rlvcr.research.audit import AuditedTurn
from tests.helpers.refusals import has_problem
from verl.config.settings.errors import UserError
from verl.trainer.launch.audit_files import (
    SCORES_KEY,
    ExternalScores,
    add_external_scores,
    read_external_scores,
    read_recorded_trajectories,
    refuse_ambiguous_scores,
)

TASKS = {"7": {"task_id": "7", "data_source": "x"}}


def write_lines(tmp_path, *lines: str) -> str:
    path = tmp_path / "file.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def test_recorded_trajectories_have_task_seed_and_actions(tmp_path):
    line = '{"task_id": "7", "seed": 3, "actions": ["go north", "take\u2028key"], "note": 1}'
    path = write_lines(tmp_path, line, "", line.replace("3", "4"))
    first, second = read_recorded_trajectories(path, TASKS)
    assert (first.task, first.seed, first.actions) == (TASKS["7"], 3, ("go north", "take\u2028key"))
    assert (first.source, second.source) == (f"{path}, line 1", f"{path}, line 3")
    assert second.seed == 4


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", ""),
        ("[1]", ""),
        ('{"task_id": 7, "seed": 3, "actions": ["a"]}', "task_id: "),
        ('{"task_id": "7", "actions": ["a"]}', "seed: "),
        ('{"task_id": "7", "seed": true, "actions": ["a"]}', "seed: "),
        ('{"task_id": "7", "seed": 3, "actions": "a"}', "actions: "),
        ('{"task_id": "7", "seed": 3, "actions": [1]}', "actions.0: "),
    ],
)
def test_line_that_is_no_trajectory_is_named(tmp_path, line, expected):
    good = '{"task_id": "7", "seed": 3, "actions": ["a"]}'
    path = write_lines(tmp_path, good, line)
    expected_problem = has_problem("wrong_cell", "", f"{path}, line 2: {expected}")
    with pytest.raises(UserError, check=expected_problem):
        read_recorded_trajectories(path, TASKS)


def test_trajectory_of_an_unknown_task_is_refused(tmp_path):
    path = write_lines(tmp_path, '{"task_id": "8", "seed": 3, "actions": ["a"]}')
    expected = has_problem("unknown_name", "", f"{path}, line 1: task_id='8'")
    with pytest.raises(UserError, check=expected):
        read_recorded_trajectories(path, TASKS)


def test_file_without_trajectories_is_refused(tmp_path):
    with pytest.raises(UserError, check=has_problem("no_rows")):
        read_recorded_trajectories(write_lines(tmp_path, ""), TASKS)


@pytest.mark.parametrize(
    "line",
    [
        '{"traj_uid": "a", "step": 0}',
        '{"traj_uid": "a", "step": 0, "score": "high"}',
        '{"traj_uid": "a", "step": 0, "score": NaN}',
        '{"traj_uid": "a", "step": 1.5, "score": 1}',
        '{"task_id": "7", "step": 0, "score": 1}',
        '{"traj_uid": "b", "step": 2, "score": 2}',
    ],
)
def test_line_that_is_no_score_is_named(tmp_path, line):
    path = write_lines(tmp_path, '{"traj_uid": "b", "step": 2, "score": 1}', line)
    with pytest.raises(UserError, check=has_problem("wrong_cell", "", f"{path}, line 2: ")):
        read_external_scores(path)


def test_file_without_scores_is_refused(tmp_path):
    with pytest.raises(UserError, check=has_problem("no_rows", SCORES_KEY)):
        read_external_scores(write_lines(tmp_path, "", ""))


@pytest.mark.parametrize(
    ("seeds", "group_size", "is_ambiguous"),
    [([3], 8, False), ([3, 4], 8, False), ([3, 3], 1, True), ([], 1, False), ([], 2, True)],
)
def test_score_that_names_several_trajectories_is_refused(seeds, group_size, is_ambiguous):
    recorded = [RecordedTrajectory("f", TASKS["7"], seed, ("a",)) for seed in seeds]
    refuse_ambiguous_scores({("recorded-7-3/1", 0): 0.5}, recorded, group_size)
    scores: ExternalScores = {("7", 3, 0): 0.5}
    if is_ambiguous:
        with pytest.raises(UserError, check=has_problem("wrong_cell", "", "'7'", 3, "traj_uid")):
            refuse_ambiguous_scores(scores, recorded, group_size)
    else:
        refuse_ambiguous_scores(scores, recorded, group_size)


def test_external_scores_match_by_trajectory_or_task(tmp_path, caplog):
    path = write_lines(
        tmp_path,
        '{"traj_uid": "a", "step": 2, "score": 0.5}',
        '{"task_id": "7", "seed": 3, "step": 1, "score": -1}',
    )
    scores = read_external_scores(path)
    points = [
        AuditedTurn("a", 2, 1, True, ((0.0,), (1.0,)), {}, {"grpo": 1.0}, task="9"),
        AuditedTurn("b", 1, 1, True, ((0.0,), (1.0,)), {}, task="7", seed=3),
        AuditedTurn("b", 1, 1, True, ((0.0,), (1.0,)), {}, task="7", seed=4),
    ]
    first, second, third = add_external_scores(points, scores)
    assert first.step_scores == {"grpo": 1.0, "external": 0.5}
    assert second.step_scores == {"external": -1.0}
    assert math.isnan(third.step_scores["external"]) and "1 of 3" in caplog.text
    assert add_external_scores(points, {}) == points
