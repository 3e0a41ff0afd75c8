"""Rows with a prompt that is too long are dropped, cut or refused, depending on the config."""

import json
import logging

import pytest
import regex

from agent_system.environments.manager import EnvironmentManagerBase
from agent_system.multi_turn_rollout.first_prompts import (
    PromptsTooLongError,
    cut_text,
    find_dropped_range,
    limit_first_prompts,
    measure_first_prompts,
)
from tests.helpers.chat_tokenizers import TOKENIZERS
from tests.helpers.number_line_world import make_config
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_tokenizer

WORDS = "one two three four five six seven eight nine ten " * 3


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture
def envs(tmp_path):
    """Make one row for each of ``texts``, with the configuration that uses them."""

    def make(*texts, split="train", **data):
        path = tmp_path / "rows.jsonl"
        system = {"role": "system", "content": "Be short."}
        rows = [{"prompt": [system, {"role": "user", "content": text}]} for text in texts]
        path.write_text("\n".join(json.dumps(row | {"ground_truth": "1"}) for row in rows))
        config = make_config("dataset", max_steps=1)
        config.env.kwargs = {"train_files": [str(path)], "val_files": [str(path)]}
        for key, value in data.items():
            setattr(config.data, key, value)
        return config, EnvironmentManagerBase(config, split)

    return make


def measure_lengths(config, tokenizer, envs):
    shown = [envs.package.task_text.first_observation(task) for task in envs.task_list]
    return measure_first_prompts(config, tokenizer, shown)


@pytest.mark.parametrize("split", ["train", "val"])
def test_overlong_rows_are_dropped_and_counted(envs, tokenizer, caplog, split):
    config, manager = envs("2?", WORDS, "3?", split=split, filter_overlong_prompts=True)
    config.data.max_prompt_length = max(measure_lengths(config, tokenizer, manager)) - 1
    with caplog.at_level(logging.WARNING):
        limit_first_prompts(config, tokenizer, manager)
    assert [task["task_id"][-1] for task in manager.task_list] == ["0", "2"]
    assert "1 of 3" in caplog.text
    assert len(manager.validation_set) == (2 if split == "val" else 0)
    assert len(manager.gen_batch(1, 2)) == 2 * config.env.rollout.n


def test_row_that_just_fits_is_kept(envs, tokenizer, caplog):
    config, manager = envs("2?", WORDS)
    config.data.max_prompt_length = max(measure_lengths(config, tokenizer, manager))
    limit_first_prompts(config, tokenizer, manager)
    assert len(manager.task_list) == 2 and not caplog.records


def test_overlong_row_is_refused_by_default(envs, tokenizer):
    config, manager = envs("2?", WORDS, "3?")
    longest = max(measure_lengths(config, tokenizer, manager))
    config.data.max_prompt_length = longest - 1
    fixes = (f"data.max_prompt_length={longest}", "data.filter_overlong_prompts=true")
    expected = mentions(
        f"data.max_prompt_length={longest - 1}", "1 of 3", "data.train_files", *fixes
    )
    with pytest.raises(PromptsTooLongError, check=expected):
        limit_first_prompts(config, tokenizer, manager)


def test_run_without_any_fitting_row_is_refused(envs, tokenizer):
    config, manager = envs("2?", "3?", filter_overlong_prompts=True, max_prompt_length=3)
    with pytest.raises(PromptsTooLongError, check=mentions(2, "data.max_prompt_length")):
        limit_first_prompts(config, tokenizer, manager)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_last_message_is_cut_until_the_prompt_fits(envs, tokenizer, side):
    config, manager = envs("2?", WORDS, truncation=side)
    limit = max(measure_lengths(config, tokenizer, manager)) - 5
    config.data.max_prompt_length = limit
    limit_first_prompts(config, tokenizer, manager)
    short, long = manager.task_list
    text = long["messages"][1]["content"]
    assert short["messages"][1]["content"] == "2?" and long["messages"][0]["content"] == "Be short."
    assert max(measure_lengths(config, tokenizer, manager)) <= limit and 0 < len(text) < len(WORDS)
    assert text.startswith("one") == (side != "left")
    assert text.endswith("ten ") == (side != "right")


def test_prompt_that_cannot_be_cut_enough_is_refused(envs, tokenizer):
    config, manager = envs("2?", truncation="left", max_prompt_length=3)
    with pytest.raises(PromptsTooLongError, check=mentions("dataset/train/0")):
        limit_first_prompts(config, tokenizer, manager)


@pytest.mark.parametrize("side, dropped", [("left", [0, 1]), ("right", [3, 4]), ("middle", [1, 2])])
def test_tokens_are_dropped_on_the_side(side, dropped):
    assert list(find_dropped_range(5, 2, side)) == dropped
    assert list(find_dropped_range(2, 3, side)) == [0, 1] and not find_dropped_range(2, 0, side)


@pytest.mark.parametrize("kind", ["bytes", "first", "unigram", "word pieces", "llama, legacy"])
@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize(
    "text",
    [
        *(
            "日本語のテスト🙂です",
            "cafe\u0301 nai\u0308ve",
            "a👩\u200d👩\u200d👧b go north",
            "look",
        ),
        *("look", "👍🏽👍🏽", "🇩🇪🇫🇷🇬🇧", "a\r\nb\r\nc", "क्षत्रिय", "\u0600123", "1️⃣2️⃣"),
        *("👨🏿\u200d🚀👨🏿\u200d🚀", "🏴\U000e0067\U000e0062\U000e0065\U000e007f!", "한글각"),
    ],
)
def test_cut_keeps_whole_characters(kind, side, text):
    """Every cut leaves whole characters of the text, in order."""
    tokenizer = TOKENIZERS[kind]()
    count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    units = regex.findall(r"\X", text)
    for surplus in range(1, count + 1):
        remaining = cut_text(tokenizer, text, surplus, side)
        remaining_units = regex.findall(r"\X", remaining)
        splits = (
            units[:n] + units[len(units) - len(remaining_units) + n :]
            for n in range(len(remaining_units) + 1)
        )
        assert remaining_units in splits, (remaining, surplus)
        assert len(remaining) < len(text)
        if side == "left":
            assert text.endswith(remaining)
        if side == "right":
            assert text.startswith(remaining)


def test_environment_without_dataset_rows_is_not_cut(tokenizer):
    config = make_config(max_steps=1)
    config.data.max_prompt_length = 3
    manager = EnvironmentManagerBase(config, "train")
    before = list(manager.task_list)
    limit_first_prompts(config, tokenizer, manager)
    assert manager.task_list == before
