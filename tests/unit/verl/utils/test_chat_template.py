"""Tests that engine, token ledger and decoder use the same set of end-of-turn tokens."""

import json

import pytest

from agent_system.tokens.bridge import ChatBridge, PlainBridge
from tests.helpers.chat_tokenizers import BOS, END, EOS, chat_tokenizer
from verl.utils.chat_template import find_stop_token_ids

PAD = "<|pad|>"


@pytest.mark.parametrize(
    "eos, template, files, ends",
    [
        # The sequence of a base model ends with another token than the turns of its template.
        (PAD, "chatml", {}, {PAD, END}),
        (END, "system in the first", {}, {END, EOS}),
        (END, "space before the end", {}, {END, EOS}),
        (END, "plain text", {}, {END}),
        (None, "chatml", {}, {END}),
        (END, "chatml", {"generation_config.json": [PAD, EOS]}, {END, PAD, EOS}),
        (END, "chatml", {"generation_config.json": PAD, "config.json": BOS}, {END, PAD}),
        (END, "chatml", {"config.json": EOS}, {END, EOS}),
        (END, "no generation prompt", {"generation_config.json": None}, {END}),
    ],
)
def test_engine_ledger_and_decoder_share_one_set(tmp_path, eos, template, files, ends):
    tokenizer = chat_tokenizer("bytes", template)
    token_ids = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in (BOS, EOS, END, PAD)}
    for name, marks in files.items():
        ids = (
            [token_ids[mark] for mark in marks] if isinstance(marks, list) else token_ids.get(marks)
        )
        (tmp_path / name).write_text(json.dumps({"eos_token_id": ids}))
    before = tokenizer.eos_token, tokenizer.name_or_path
    tokenizer.eos_token, tokenizer.name_or_path = eos, str(tmp_path)
    try:
        expected = {token_ids[mark] for mark in ends}
        assert (
            find_stop_token_ids(tokenizer, tmp_path) == expected == find_stop_token_ids(tokenizer)
        )
        bridge = ChatBridge(tokenizer)
        assert bridge.end_ids == expected
        text_ids = tokenizer("look", add_special_tokens=False)["input_ids"]
        for end in expected:
            assert bridge.decode([*text_ids, end]) == "look"
    finally:
        tokenizer.eos_token, tokenizer.name_or_path = before


def test_end_of_sequence_ends_a_turn_without_a_chat_template():
    tokenizer = chat_tokenizer("first, BOS of its own", "chatml")
    tokenizer.chat_template = None
    bridge = PlainBridge(tokenizer)
    assert bridge.end_ids == {tokenizer.eos_token_id}
    messages = [{"role": "user", "content": "a desk"}, {"role": "user", "content": "go north"}]
    assert bridge.encode_first_prompt(messages) == tokenizer("a desk\ngo north")["input_ids"]
    text_ids = tokenizer("look", add_special_tokens=False)["input_ids"]
    assert bridge.decode([*text_ids, tokenizer.eos_token_id]) == "look"
