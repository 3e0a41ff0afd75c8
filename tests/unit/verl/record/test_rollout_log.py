"""Tests that rollout lines hold the advantage of every sampled token next to its text."""

import json

import numpy as np
import pytest
import torch

from tests.helpers.refusals import mentions
from verl import DataProto
from verl.protocol import object_array
from verl.record.rollout_log import (
    format_rollout_lines,
    format_token_lines,
    round_decimals,
    round_significant,
)
from verl.records import CORRECTION_WEIGHTS, SUMMARY, StepRecord, SummaryRecord
from verl.utils import jsonl


class LetterTokenizer:
    """Tokenizer in which token 1 is a, 2 is b, and so on. It counts the calls of ``decode``."""

    calls = 0

    def decode(self, ids):
        self.calls += 1
        return "".join(chr(96 + i) for i in ids)


def make_record(step: int, action: str, observation: str = "a desk") -> StepRecord:
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


def make_batch(advantages=True):
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
    columns = {
        "uid": ["u", "u"],
        "traj_uid": ["t0", "t1"],
        "task_id": ["k", "k"],
        "data_source": ["s", "s"],
        "won": [True, False],
        "episode_rewards": [1.0, 0.0],
        "episode_lengths": [2, 5],
        "steps": [
            [make_record(0, "look"), make_record(1, "go")],
            [make_record(4, "take")],
        ],
    }
    return DataProto.from_dict(tensors, columns)


def test_lines_hold_the_credit_of_sampled_tokens_only():
    first, second = format_rollout_lines(make_batch(), LetterTokenizer())
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


def test_lines_without_advantages_have_no_credit():
    for line in format_rollout_lines(make_batch(advantages=False), LetterTokenizer()):
        assert all("token_credit" not in step and "advantage" not in step for step in line["steps"])


def test_every_token_is_decoded_once():
    tokenizer = LetterTokenizer()
    list(format_rollout_lines(make_batch(), tokenizer))
    assert tokenizer.calls == 2 + 3  # two prompts; f, g and i


def test_records_of_the_batch_are_not_changed():
    data = make_batch()
    list(format_rollout_lines(data, LetterTokenizer()))
    assert data.non_tensor_batch["steps"][0][0] == make_record(0, "look")


def test_lines_are_restored_from_the_file(tmp_path):
    data = make_batch()
    data.non_tensor_batch["steps"][0][0] = make_record(0, "look", 'quotes " and\nnewlines é')
    jsonl.write(tmp_path / "1.jsonl", format_rollout_lines(data, LetterTokenizer()))
    lines = list(jsonl.read(tmp_path / "1.jsonl"))
    assert lines[0]["steps"][0]["observation"] == 'quotes " and\nnewlines é'
    assert lines == [
        json.loads(jsonl.dumps(line)) for line in format_rollout_lines(data, LetterTokenizer())
    ]


def test_turn_without_sampled_tokens_has_advantage_zero():
    data = make_batch()
    data.non_tensor_batch["steps"][1] = [make_record(7, "wait")]
    assert list(format_rollout_lines(data, LetterTokenizer()))[1]["steps"][0] == {
        **make_record(7, "wait").to_json(),
        "advantage": 0.0,
        "token_credit": [],
    }


@pytest.mark.parametrize("key", ["responses", "step_ids"])
def test_missing_column_is_named(key):
    data = make_batch()
    data.pop(batch_keys=[key])
    with pytest.raises(KeyError, check=mentions(key)):
        list(format_rollout_lines(data, LetterTokenizer()))


def read_token_lines(data: DataProto) -> list[dict]:
    """Return the token lines after a round trip through JSON."""
    return [json.loads(jsonl.dumps(line)) for line in format_token_lines(data, LetterTokenizer())]


def test_token_lines_hold_all_token_columns_of_the_batch():
    data = make_batch()
    # The policy did not sample the first token of the second row's turn.
    data.batch["response_mask"][1, 0] = 0
    entropies = torch.tensor([[0.1234, 1.0, 9.0, 0.0, 2.0], [9.0, 0.5, 0.0, 0.0, 0.0]])
    engine = torch.tensor([[-1.0, -2.0, 0.0, -0.5, 0.0], [0.0, -1.0, 0.0, 0.0, 0.0]])
    data.batch["entropys"] = entropies
    data.batch["rollout_log_probs"] = engine
    data.batch["old_log_probs"] = torch.where(engine < 0, engine - 0.25, -3.0)
    data.batch[CORRECTION_WEIGHTS] = torch.full((2, 5), 0.5)
    data.non_tensor_batch["anchor_obs"] = object_array([["a desk", "room 2"], ["a desk"]])
    first, second = read_token_lines(data)
    assert first["traj_uid"] == "t0" and [step["step"] for step in first["steps"]] == [0, 1]
    assert first["steps"][0] == {
        "step": 0,
        "tokens": ["f", "g"],
        "mask": [1, 1],
        "weight": [0.5, 0.5],
        "entropy": [0.123, 1.0],
        "gap": [0.25, 0.25],
    }
    # A log-prob of 0 may be a certain token or an unknown one, so the gap is null.
    assert first["steps"][1]["gap"] == [0.25, None] and first["steps"][1]["state"] == "room 2"
    assert second["steps"][0]["mask"] == [0, 1] and second["steps"][0]["tokens"] == ["f", "f"]


def test_token_lines_hold_the_tokens_of_summaries():
    data = make_batch()
    # The second row ends with a summary of two tokens. The token before them asks for it.
    data.batch["response_mask"][1] = torch.tensor([1, 1, 0, 1, 1])
    data.batch["responses"][1] = torch.tensor([6, 6, 5, 8, 9])
    data.batch["entropys"] = torch.tensor([[0.0] * 5, [0.1, 0.2, 9.0, 0.3, 0.4]])
    summary = SummaryRecord(5, "hi", 2, "stop", (6, 8))
    data.non_tensor_batch[SUMMARY] = object_array([None, summary])
    first, second = read_token_lines(data)
    assert SUMMARY not in first and second["steps"][0]["tokens"] == ["f", "f"]
    assert second[SUMMARY] == {
        "step": 5,
        "tokens": ["h", "i"],
        "mask": [1, 1],
        "entropy": [0.3, 0.4],
    }


def test_unscored_tokens_have_only_text_and_mask():
    data = make_batch()
    data.batch["rollout_log_probs"] = data.batch["old_log_probs"] = torch.full((2, 5), -1.0)
    first, _ = read_token_lines(data)
    assert first["steps"][0] == {"step": 0, "tokens": ["f", "g"], "mask": [1, 1]}


def make_numbers() -> np.ndarray:
    """Return numbers of all magnitudes, halfway cases of float32, infinity and NaN."""
    draw = np.random.default_rng(0)
    random_values = draw.normal(size=20_000) * 10.0 ** draw.integers(-9, 6, 20_000)
    special_values = [*(np.arange(-64, 64) / 64), 2.5e-5, -1e-9, 0.0, np.inf, np.nan, 1e-19, 3e21]
    return np.concatenate([random_values, special_values]).astype(np.float32)


@pytest.mark.parametrize("digits", [3, 5])
def test_numbers_are_rounded_as_in_python(digits):
    values = make_numbers()
    expected = [round(value, digits) for value in values.tolist()]
    assert json.dumps(round_decimals(values, digits).tolist()) == json.dumps(expected)


@pytest.mark.parametrize("digits", [2, 4])
def test_significant_digits_equal_those_of_python(digits):
    values = make_numbers()
    expected = [float(f"{value:.{digits}g}") for value in values.tolist()]
    actual = round_significant(values, digits).tolist()
    different = [
        pair for pair in zip(actual, expected, strict=True) if repr(pair[0]) != repr(pair[1])
    ]
    assert not different
