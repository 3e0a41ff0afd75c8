"""Every sampled token's credit is written next to its text, under the step that sampled it."""

import json

import numpy as np
import pytest
import torch

from verl import DataProto
from verl.protocol import object_array
from verl.record.rollout_log import rollout_lines, round_decimals, round_significant, token_lines
from verl.records import CORRECTION_WEIGHTS, StepRecord
from verl.utils import jsonl


class Letters:
    """Token 1 is a, 2 is b ...; counts how often it decodes."""

    calls = 0

    def decode(self, ids):
        self.calls += 1
        return "".join(chr(96 + i) for i in ids)


def record(step: int, action: str, observation: str = "a desk") -> StepRecord:
    return StepRecord(
        step=step,
        observation=observation,
        response=f"<action>{action}</action>",
        action=action,
        is_action_valid=True,
        reward=0.0,
        done=False,
        num_tokens=2,
        stop_reason="stop",
        span=(3, 5),
    )


def batch(advantages=True):
    tensors = {
        "prompts": torch.tensor([[0, 1, 2], [3, 4, 5]]),
        "responses": torch.tensor([[6, 7, 8, 9, 6], [6, 6, 0, 0, 0]]),
        "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]]),
        "response_mask": torch.tensor([[1, 1, 0, 1, 1], [1, 1, 0, 0, 0]]),
        "step_ids": torch.tensor([[0, 0, -1, 1, 1], [4, 4, -1, -1, -1]]),
    }
    if advantages:
        tensors["advantages"] = torch.tensor(
            [[1.0, 2.0, 99.0, -1.0, -2.0], [0.123456789, 0.5, 0.0, 0.0, 0.0]]
        )
    others = {
        "uid": ["u", "u"],
        "traj_uid": ["t0", "t1"],
        "task_id": ["k", "k"],
        "data_source": ["s", "s"],
        "won": [True, False],
        "episode_rewards": [1.0, 0.0],
        "episode_lengths": [2, 5],
        "steps": [
            [record(0, "look"), record(1, "go")],
            [record(4, "take")],
        ],
    }
    return DataProto.from_dict(tensors, others)


def test_lines_hold_the_credit_of_the_sampled_tokens_only():
    first, second = rollout_lines(batch(), Letters())
    assert first["prompt"] == "ab" and second["prompt"] == "cde"
    assert (first["won"], first["return"], first["length"]) == (True, 1.0, 2)
    assert (
        first["steps"][0]["token_credit"] == [("f", 1.0), ("g", 2.0)]
        and first["steps"][0]["advantage"] == 1.5
    )
    assert (
        first["steps"][1]["token_credit"] == [("i", -1.0), ("f", -2.0)]
        and first["steps"][1]["action"] == "go"
    )
    assert second["steps"][0]["token_credit"] == [("f", 0.12346), ("f", 0.5)]


def test_without_advantages_there_is_no_credit():
    for line in rollout_lines(batch(advantages=False), Letters()):
        assert all("token_credit" not in step and "advantage" not in step for step in line["steps"])


def test_a_token_is_decoded_once():
    tokenizer = Letters()
    list(rollout_lines(batch(), tokenizer))
    assert tokenizer.calls == 2 + 3  # two prompts; f, g and i


def test_the_records_of_the_batch_are_not_changed():
    data = batch()
    list(rollout_lines(data, Letters()))
    assert data.non_tensor_batch["steps"][0][0] == record(0, "look")


def test_lines_survive_the_file(tmp_path):
    data = batch()
    data.non_tensor_batch["steps"][0][0] = record(0, "look", 'quotes " and\nnewlines é')
    assert jsonl.write(tmp_path / "1.jsonl", rollout_lines(data, Letters())) == 2
    lines = list(jsonl.read(tmp_path / "1.jsonl"))
    assert lines[0]["steps"][0]["observation"] == 'quotes " and\nnewlines é'
    assert lines == [json.loads(jsonl.dumps(line)) for line in rollout_lines(data, Letters())]


def test_a_step_without_sampled_tokens_has_advantage_zero():
    data = batch()
    data.non_tensor_batch["steps"][1] = [record(7, "wait")]
    assert list(rollout_lines(data, Letters()))[1]["steps"][0] == {
        **record(7, "wait").to_json(),
        "advantage": 0.0,
        "token_credit": [],
    }


@pytest.mark.parametrize("key", ["responses", "step_ids"])
def test_a_missing_column_is_named(key):
    data = batch()
    data.pop(batch_keys=[key])
    with pytest.raises(KeyError, match=key):
        list(rollout_lines(data, Letters()))


def token_lines_of(data: DataProto) -> list[dict]:
    """As they are read again."""
    return [json.loads(jsonl.dumps(line)) for line in token_lines(data, Letters())]


def test_tokens_of_a_turn_are_told_with_what_the_batch_knows_of_them():
    data = batch()
    # The policy did not sample the first token of the second row's turn.
    data.batch["response_mask"][1, 0] = 0
    entropies = torch.tensor([[0.1234, 1.0, 9.0, 0.0, 2.0], [9.0, 0.5, 0.0, 0.0, 0.0]])
    engine = torch.tensor([[-1.0, -2.0, 0.0, -0.5, 0.0], [0.0, -1.0, 0.0, 0.0, 0.0]])
    data.batch["entropys"] = entropies
    data.batch["rollout_log_probs"] = engine
    data.batch["old_log_probs"] = torch.where(engine < 0, engine - 0.25, -3.0)
    data.batch[CORRECTION_WEIGHTS] = torch.full((2, 5), 0.5)
    data.non_tensor_batch["anchor_obs"] = object_array([["a desk", "room 2"], ["a desk"]])
    first, second = token_lines_of(data)
    assert first["traj_uid"] == "t0" and [step["step"] for step in first["steps"]] == [0, 1]
    assert first["steps"][0] == {
        "step": 0,
        "tokens": ["f", "g"],
        "mask": [1, 1],
        "weight": [0.5, 0.5],
        "entropy": [0.123, 1.0],
        "gap": [0.25, 0.25],
    }
    # A log-prob of 0 is a certain token or an unknown one: the gap is not told.
    assert first["steps"][1]["gap"] == [0.25, None] and first["steps"][1]["state"] == "room 2"
    assert second["steps"][0]["mask"] == [0, 1] and second["steps"][0]["tokens"] == ["f", "f"]


def test_tokens_that_the_trainer_did_not_score_have_text_and_mask_alone():
    data = batch()
    data.batch["rollout_log_probs"] = data.batch["old_log_probs"] = torch.full((2, 5), -1.0)
    first, _ = token_lines_of(data)
    assert first["steps"][0] == {"step": 0, "tokens": ["f", "g"], "mask": [1, 1]}


def some_numbers() -> np.ndarray:
    """Of any size; halfway cases that float32 holds, and what is no number."""
    draw = np.random.default_rng(0)
    some = draw.normal(size=20_000) * 10.0 ** draw.integers(-9, 6, 20_000)
    odd = [*(np.arange(-64, 64) / 64), 2.5e-5, -1e-9, 0.0, np.inf, np.nan, 1e-19, 3e21]
    return np.concatenate([some, odd]).astype(np.float32)


@pytest.mark.parametrize("digits", [3, 5])
def test_numbers_are_rounded_as_python_rounds_them(digits):
    values = some_numbers()
    expected = [round(value, digits) for value in values.tolist()]
    assert json.dumps(round_decimals(values, digits).tolist()) == json.dumps(expected)


@pytest.mark.parametrize("digits", [2, 4])
def test_numbers_have_the_digits_that_python_gives_them(digits):
    values = some_numbers()
    expected = [float(f"{value:.{digits}g}") for value in values.tolist()]
    found = round_significant(values, digits).tolist()
    different = [
        pair for pair in zip(found, expected, strict=True) if repr(pair[0]) != repr(pair[1])
    ]
    assert not different
