"""Rows whose prompt is too long are left out, cut or refused, as the job says."""

import json
import logging

import pytest
import regex

from agent_system.environments.manager import EnvironmentManagerBase
from agent_system.multi_turn_rollout.first_prompts import (
    PromptsTooLong,
    cut_ids,
    cut_text,
    fit_prompts,
    measure_first_prompts,
)
from tests.helpers.chat_kinds import TOKENIZERS
from tests.helpers.play import make_config
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_tokenizer

WORDS = "one two three four five six seven eight nine ten " * 3


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture
def envs(tmp_path):
    """Of ``asked`` a row each, with the configuration that plays them."""

    def make(*asked, split="train", **data):
        path = tmp_path / "rows.jsonl"
        system = {"role": "system", "content": "Be short."}
        rows = [{"prompt": [system, {"role": "user", "content": text}]} for text in asked]
        path.write_text("\n".join(json.dumps(row | {"ground_truth": "1"}) for row in rows))
        config = make_config("dataset", max_steps=1)
        config.env.kwargs = {"train_files": [str(path)], "val_files": [str(path)]}
        for key, value in data.items():
            setattr(config.data, key, value)
        return config, EnvironmentManagerBase(config, split)

    return make


def lengths(config, tokenizer, envs):
    shown = [envs.package.task_text.first_observation(task) for task in envs.task_list]
    return measure_first_prompts(config, tokenizer, shown)


@pytest.mark.parametrize("split", ["train", "val"])
def test_longer_rows_are_left_out_and_counted(envs, tokenizer, caplog, split):
    config, manager = envs("2?", WORDS, "3?", split=split, filter_overlong_prompts=True)
    config.data.max_prompt_length = max(lengths(config, tokenizer, manager)) - 1
    with caplog.at_level(logging.WARNING):
        fit_prompts(config, tokenizer, manager)
    assert [task["task_id"][-1] for task in manager.task_list] == ["0", "2"]
    assert "1 of 3" in caplog.text
    assert len(manager.panel) == (2 if split == "val" else 0)
    assert len(manager.gen_batch(1, 2)) == 2 * config.env.rollout.n


def test_a_row_that_just_fits_is_kept(envs, tokenizer, caplog):
    config, manager = envs("2?", WORDS)
    config.data.max_prompt_length = max(lengths(config, tokenizer, manager))
    fit_prompts(config, tokenizer, manager)
    assert len(manager.task_list) == 2 and not caplog.records


def test_without_a_word_about_it_a_longer_row_is_refused(envs, tokenizer):
    config, manager = envs("2?", WORDS, "3?")
    longest = max(lengths(config, tokenizer, manager))
    config.data.max_prompt_length = longest - 1
    why = (
        rf"data.max_prompt_length={longest - 1}.* 1 of 3 .*data.train_files.*"
        rf"data.max_prompt_length={longest}, or data.filter_overlong_prompts=true"
    )
    with pytest.raises(PromptsTooLong, match=why):
        fit_prompts(config, tokenizer, manager)


def test_where_none_is_left_the_run_is_refused(envs, tokenizer):
    config, manager = envs("2?", "3?", filter_overlong_prompts=True, max_prompt_length=3)
    with pytest.raises(PromptsTooLong, check=mentions(2, "data.max_prompt_length")):
        fit_prompts(config, tokenizer, manager)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_the_last_message_is_cut_until_the_prompt_fits(envs, tokenizer, side):
    config, manager = envs("2?", WORDS, truncation=side)
    limit = max(lengths(config, tokenizer, manager)) - 5
    config.data.max_prompt_length = limit
    fit_prompts(config, tokenizer, manager)
    short, long = manager.task_list
    text = long["messages"][1]["content"]
    assert short["messages"][1]["content"] == "2?" and long["messages"][0]["content"] == "Be short."
    assert max(lengths(config, tokenizer, manager)) <= limit and 0 < len(text) < len(WORDS)
    assert text.startswith("one") == (side != "left")
    assert text.endswith("ten ") == (side != "right")


def test_what_cannot_be_cut_short_enough_is_refused(envs, tokenizer):
    config, manager = envs("2?", truncation="left", max_prompt_length=3)
    with pytest.raises(PromptsTooLong, check=mentions("dataset/train/0")):
        fit_prompts(config, tokenizer, manager)


@pytest.mark.parametrize(
    "side, left", [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])]
)
def test_which_tokens_are_cut(side, left):
    assert cut_ids([1, 2, 3, 4, 5], 2, side) == left
    assert cut_ids([1, 2], 3, side) == [] and cut_ids([1, 2], 0, side) == [1, 2]


@pytest.mark.parametrize("kind", ["bytes", "first", "unigram", "word pieces", "llama, legacy"])
@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize(
    "text",
    ["日本語のテスト🙂です", "cafe\u0301 nai\u0308ve", "a👩\u200d👩\u200d👧b go north", "look"],
)
def test_no_character_is_cut(kind, side, text):
    """Every cut leaves whole characters of the text, in order."""
    tokenizer = TOKENIZERS[kind]()
    count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    units = regex.findall(r"\X", text)
    for surplus in range(1, count + 1):
        left = cut_text(tokenizer, text, surplus, side)
        rest = regex.findall(r"\X", left)
        splits = (units[:n] + units[len(units) - len(rest) + n :] for n in range(len(rest) + 1))
        assert rest in splits, (left, surplus)
        assert len(left) < len(text)
        if side == "left":
            assert text.endswith(left)
        if side == "right":
            assert text.startswith(left)


def test_an_environment_that_speaks_for_itself_is_left_alone(tokenizer):
    config = make_config(max_steps=1)
    config.data.max_prompt_length = 3
    manager = EnvironmentManagerBase(config, "train")
    before = list(manager.task_list)
    fit_prompts(config, tokenizer, manager)
    assert manager.task_list == before
