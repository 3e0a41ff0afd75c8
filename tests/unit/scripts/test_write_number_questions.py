"""Tests of the data files that ``configs/smollm2_numbers.yaml`` trains on."""

import json
import re

import pytest

from scripts.write_number_questions import main
from tests.helpers.refusals import mentions
from verl.config.settings.errors import ConfigError
from verl.trainer.launch.extensions import load_config


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_have_distinct_questions_with_the_larger_number(tmp_path):
    assert main(["--out", str(tmp_path)]) == 0
    train, test = read_rows(tmp_path / "train.jsonl"), read_rows(tmp_path / "test.jsonl")
    questions = [row["prompt"][-1]["content"] for row in [*train, *test]]
    assert (len(train), len(test), len(set(questions))) == (4000, 256, 4256)
    examples = train[0]["prompt"][:-1]
    assert [message["role"] for message in examples] == ["user", "assistant"] * 2
    assert [message["content"] for message in examples[1::2]] == ["45", "82"]
    for row, question in zip([*train, *test], questions, strict=True):
        numbers = [int(text) for text in re.findall(r"\d+", question)]
        assert row["reward_model"]["ground_truth"] == str(max(numbers))


def test_existing_files_are_kept(tmp_path):
    (tmp_path / "test.jsonl").write_text("mine\n")
    with pytest.raises(ConfigError, check=mentions("--out", "--overwrite")):
        main(["--out", str(tmp_path)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test.jsonl"]
    assert main(["--out", str(tmp_path), "--overwrite"]) == 0


def test_config_reads_the_default_files():
    data = load_config("smollm2_numbers").data
    assert (data.train_files, data.val_files) == (
        ["data/numbers/train.jsonl"],
        ["data/numbers/test.jsonl"],
    )
