"""Packing of trajectories into rows: widths, padding, masks and dropped trajectories."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agent_system.multi_turn_rollout.metrics import compute_episode_metrics
from agent_system.multi_turn_rollout.packing import (
    build_row_turns,
    build_rows,
    collate_rows,
    list_trajectories,
    make_turn_record,
    rebuild_last_conversations,
    select_usable_trajectories,
)
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory, Turn
from agent_system.tokens.bridge import TOKEN_SPLIT_CHARACTER
from agent_system.tokens.ledger import SegmentKind, TokenLedger
from rlvcr.alternatives import TurnAlternativeThoughts
from rlvcr.levels import ParsedTurn, ParseFailure
from rlvcr.records import ThinkingTurnRecord
from rlvcr.report_sections import compute_level_shares
from rlvcr.score_table import RowTurn
from tests.helpers.refusals import mentions
from verl.utils.sampling import StopReason

PAD = 99


def make_spec(uid="g", member=0, index=0) -> RolloutSpec:
    task = {"task_id": "task-1", "data_source": "desk"}
    return RolloutSpec(index, task, uid, f"{uid}/{member}", 7)


def make_turn(step: int, ledger: int, start: int, end: int, **values) -> Turn:
    return Turn(
        step, f"obs {step}", f"anchor {step}", ledger, start, end, "look", StopReason.STOP, **values
    )


def make_appended(prompt=3, **values) -> Trajectory:
    """Return a trajectory of two turns in one row.

    Its tokens: [prompt][2 agent][3 environment][1 agent][2 environment].
    """
    ledger = TokenLedger()
    ledger.append(range(10, 10 + prompt), SegmentKind.PROMPT)
    ledger.append([1, 2], SegmentKind.AGENT, logprobs=[-0.5, -0.25], turn=0)
    ledger.append([20, 21, 22], SegmentKind.ENV, turn=1)
    ledger.append([3], SegmentKind.AGENT, logprobs=[-1.0], turn=1)
    ledger.append([23, 24], SegmentKind.ENV, turn=2)
    turns = [
        make_turn(0, 0, prompt, prompt + 2, is_action_valid=True),
        make_turn(1, 0, prompt + 5, prompt + 6, reward=1.0, done=True),
    ]
    return Trajectory(make_spec(**values), [ledger], turns, reward=1.0, won=True)


def make_windowed(**values) -> Trajectory:
    ledgers = []
    for step in range(2):
        ledger = TokenLedger()
        ledger.append(range(10, 12 + step), SegmentKind.PROMPT)
        ledger.append([1 + step], SegmentKind.AGENT, logprobs=[-0.5], turn=step)
        ledgers.append(ledger)
    turns = [make_turn(0, 0, 2, 3), make_turn(1, 1, 3, 4, reward=1.0, done=True)]
    return Trajectory(make_spec(**values), ledgers, turns, reward=1.0)


def test_append_row_is_the_ledger_up_to_the_last_sampled_token():
    data = collate_rows(build_rows([make_appended(), make_appended(prompt=1, member=1)]), PAD)
    assert data.batch["prompts"].tolist() == [[10, 11, 12], [PAD, PAD, 10]]
    assert data.batch["responses"].tolist() == [[1, 2, 20, 21, 22, 3]] * 2
    assert data.batch["input_ids"][1].tolist() == [PAD, PAD, 10, 1, 2, 20, 21, 22, 3]
    assert data.batch["attention_mask"][1].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert data.batch["position_ids"].tolist() == [list(range(9)), [0, 0, 0, 1, 2, 3, 4, 5, 6]]
    assert data.batch["response_mask"].tolist() == [[1, 1, 0, 0, 0, 1]] * 2
    assert data.batch["step_ids"].tolist() == [[0, 0, -1, -1, -1, 1]] * 2
    assert data.batch["rollout_log_probs"].tolist() == [[-0.5, -0.25, 0, 0, 0, -1.0]] * 2
    assert {
        key: tensor.dtype for key, tensor in data.batch.items() if tensor.dtype != torch.int64
    } == {"rollout_log_probs": torch.float32}


def test_window_gives_one_row_per_turn():
    data = collate_rows(build_rows([make_windowed()]), PAD)
    assert len(data) == 2
    assert data.batch["prompts"].tolist() == [[PAD, 10, 11], [10, 11, 12]]
    assert data.batch["step_ids"].tolist() == [[0], [1]]
    columns = data.non_tensor_batch
    assert columns["step_index"].tolist() == [[0], [1]] and columns["step_rewards"].tolist() == [
        [0.0],
        [1.0],
    ]
    assert columns["episode_rewards"].tolist() == [1.0, 1.0] and columns[
        "episode_lengths"
    ].tolist() == [2, 2]
    assert list(columns["traj_uid"]) == ["g/0", "g/0"]


def test_columns_hold_one_list_per_row():
    columns = collate_rows(
        build_rows([make_appended(), make_appended(prompt=1, member=1)]), PAD
    ).non_tensor_batch
    assert all(len(column) == 2 and isinstance(column, np.ndarray) for column in columns.values())
    assert columns["anchor_obs"][0] == ["anchor 0", "anchor 1"]
    assert columns["is_action_valid"][0] == [True, False]
    assert [step.span for step in columns["steps"][1]] == [(1, 3), (6, 7)]
    assert columns["data_source"].tolist() == ["desk", "desk"] and columns["won"].dtype == bool


def test_trajectory_without_turns_is_an_empty_row():
    data = collate_rows(build_rows([Trajectory(make_spec()), make_windowed(uid="h")]), PAD)
    assert data.batch["attention_mask"][0].sum() == data.batch["response_mask"][0].sum() == 0
    assert data.non_tensor_batch["steps"][0] == []


def test_retokenized_text_is_refused_unless_allowed():
    trajectory = make_appended()
    trajectory.ledgers[0].append([5], SegmentKind.AGENT, turn=2, retokenized=True)
    with pytest.raises(ValueError, check=mentions("allow_retokenized")):
        collate_rows(build_rows([trajectory]), PAD)
    assert len(collate_rows(build_rows([trajectory]), PAD, allow_retokenized=True)) == 1


@pytest.mark.parametrize(
    ("on_abort", "uids", "counts"),
    [("drop_group", ["b/0"], (1, 1, 1)), ("keep_rest", ["a/1", "b/0"], (1, 0, 1))],
)
def test_dropped_trajectories_are_counted_by_reason(on_abort, uids, counts):
    failed = make_appended(uid="a")
    failed.abort("env_dead", "killed")
    empty = Trajectory(make_spec(uid="b", member=1), truncated="budget")
    trajectories = [failed, make_appended(uid="a", member=1), make_appended(uid="b"), empty]
    chosen, dropped = select_usable_trajectories(trajectories, on_abort)
    assert [t.spec.traj_uid for t in chosen] == uids
    reasons = ("aborted", "group_of_aborted", "without_turn")
    assert tuple(dropped[f"rollout/left_out_{reason}"] for reason in reasons) == counts


def test_reasons_without_trajectories_are_zero():
    names = [f"rollout/left_out_{name}" for name in ("aborted", "group_of_aborted", "without_turn")]
    assert select_usable_trajectories([], "keep_rest") == ([], dict.fromkeys(names, 0.0))
    failed = [make_appended(uid="a"), make_appended(uid="a", member=1)]
    for trajectory in failed:
        trajectory.abort("env_dead", "killed")
    members = [make_appended(uid="a", member=2), make_appended(uid="a", member=3)]
    empty = [Trajectory(make_spec(uid="b")), Trajectory(make_spec(uid="b", member=1))]
    selected, counts = select_usable_trajectories([*failed, *members, *empty], "drop_group")
    assert selected == [] and counts == dict.fromkeys(names, 2.0)


def test_rows_are_as_wide_as_the_longest_and_never_empty():
    data = collate_rows(build_rows([make_appended(prompt=1)]), PAD)
    assert data.batch["prompts"].tolist() == [[10]]
    assert collate_rows(build_rows([make_windowed()]), PAD).batch["responses"].tolist() == [
        [1],
        [2],
    ]
    nothing = collate_rows(build_rows([Trajectory(make_spec())]), PAD)
    assert nothing.batch["prompts"].tolist() == nothing.batch["responses"].tolist() == [[PAD]]
    assert nothing.batch["step_ids"].tolist() == [[-1]]


def test_every_column_of_a_row():
    first = make_appended(uid="g", member=0)
    failed = make_appended(uid="g", member=1)
    failed.abort("env_dead", "killed")
    failed.truncated = "budget"
    # Environments may return integers.
    first.reward = 1
    failed.reward = 0
    failed.won = False
    data = collate_rows(build_rows([first, failed]), PAD)
    columns = {key: column.tolist() for key, column in data.non_tensor_batch.items()}
    steps = columns.pop("steps")
    assert columns == {
        "uid": ["g", "g"],
        "traj_uid": ["g/0", "g/1"],
        "data_source": ["desk", "desk"],
        "task_id": ["task-1", "task-1"],
        "anchor_obs": [["anchor 0", "anchor 1"]] * 2,
        "is_action_valid": [[True, False]] * 2,
        "step_rewards": [[0.0, 1.0]] * 2,
        "step_index": [[0, 1]] * 2,
        "episode_rewards": [1.0, 0.0],
        "episode_lengths": [2, 2],
        "won": [True, False],
        "aborted": [False, True],
        "truncated": ["", "budget"],
    }
    assert [[step.step for step in row] for row in steps] == [[0, 1], [0, 1]]
    dtypes = {key: data.non_tensor_batch[key].dtype for key in ("won", "aborted")}
    assert dtypes == {"won": bool, "aborted": bool}
    assert data.non_tensor_batch["episode_rewards"].dtype == np.float64


def test_images_are_in_the_row_of_their_turn():
    with_image = make_windowed()
    with_image.turns[1].image = "picture"
    data = collate_rows(build_rows([with_image, make_appended()]), PAD)
    images = data.non_tensor_batch["multi_modal_data"].tolist()
    assert images == [{"image": []}, {"image": ["picture"]}, {"image": []}]


def parsed(failure: ParseFailure | None = None) -> ParsedTurn:
    return ParsedTurn(3, (1, 2), (3, 5), (6, 7), (6, 8), "why", "look", "tags", failure)


def test_turn_record_holds_the_turn():
    recorded_turn = make_turn(
        4, 0, 10, 20, action="look", is_action_valid=True, reward=0.5, done=True, needed_level=2
    )
    recorded_turn.situation = "a fork"
    record = ThinkingTurnRecord(
        step=4,
        observation="obs 4",
        response="look",
        action="look",
        is_action_valid=True,
        reward=0.5,
        done=True,
        num_tokens=10,
        stop_reason="stop",
        span=(10, 20),
        situation="a fork",
        needed_level=2,
    )
    assert make_turn_record(recorded_turn) == record
    assert (record.level, record.parse_failure, record.thought_tokens) == (None, None, 0)
    assert not make_turn_record(recorded_turn).level_forced
    recorded_turn.situation = "anchor 4"
    assert make_turn_record(recorded_turn).situation == "", (
        "a situation equal to the anchor is not repeated"
    )


@pytest.mark.parametrize("name", [None, "a fork"], ids=["states", "named"])
def test_level_information_is_equal_in_training_and_validation(name):
    # Observations differ although the state is the same.
    trajectories = [make_appended(prompt=1 + member, member=member) for member in range(4)]
    for member, trajectory in enumerate(trajectories):
        for turn in trajectory.turns:
            turn.observation = f"obs {member} {turn.step}"
            turn.situation = name or turn.anchor
            turn.parsed = replace(parsed(), level=1 + 2 * turn.step + member % 2)
    trained = compute_episode_metrics(trajectories)["rlvcr/level_information"]
    validated = compute_level_shares(collate_rows(build_rows(trajectories), PAD), "val")[
        "val/level_information"
    ]
    # Each of the two states has its own two levels: log 2. By observation it would be log 4, and
    # for a single situation 0.
    assert trained == validated == pytest.approx(0.0 if name else math.log(2))


def test_turn_record_holds_the_parsed_level():
    parsed_turn = make_turn(0, 0, 10, 20, parsed=parsed(), num_forced_tokens=1)
    record = make_turn_record(parsed_turn)
    assert (record.level, record.level_forced, record.parse_failure) == (3, True, None)
    assert (record.thought_tokens, record.num_tokens) == (2, 9)
    failure = next(iter(ParseFailure))
    parsed_turn.parsed = parsed(failure)
    assert make_turn_record(parsed_turn).parse_failure == failure.value


def test_row_turns_for_scoring():
    trajectory = make_appended()
    alternatives = TurnAlternativeThoughts()
    for number, turn in enumerate(trajectory.turns):
        turn.parsed = parsed()
        turn.alternatives = alternatives
        turn.num_forced_tokens = number
    assert build_row_turns(build_rows([trajectory])) == [
        [
            RowTurn(0, 3, [1, 2], parsed(), alternatives, 0),
            RowTurn(1, 8, [3], parsed(), alternatives, 1),
        ]
    ]
    trajectory.turns[1].parsed = None
    with pytest.raises(ValueError, check=mentions(1)):
        build_row_turns(build_rows([trajectory]))


def test_trajectories_of_the_rows_are_listed_once():
    first, second = make_windowed(), make_appended()
    assert list_trajectories(build_rows([first, second])) == [first, second]
    assert list_trajectories([]) == []


def test_conversation_is_rebuilt_without_cut_marks():
    observations = [
        {"role": "user", "content": f"<{TOKEN_SPLIT_CHARACTER}|a|>"},
        {"role": "user", "content": f"b{TOKEN_SPLIT_CHARACTER}"},
    ]
    turns = [SimpleNamespace(response="one"), SimpleNamespace(response="two")]
    trajectory = SimpleNamespace(shown_messages=observations)
    row: Any = SimpleNamespace(trajectory=trajectory, turns=turns, summary=None)
    assert rebuild_last_conversations([row]) == [
        [
            {"role": "user", "content": "<|a|>"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "b"},
            {"role": "assistant", "content": "two"},
        ]
    ]
