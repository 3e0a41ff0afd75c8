"""Supervised rows with ``data.history=chat``: prompts of the chat template, each reply once."""

import itertools
import json
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.template_support import TemplateVerdict, check_template_support
from tests.helpers.refusals import allowed, fix, mentions
from tests.helpers.tiny_model import make_tiny_policy
from tests.helpers.trl_templates import template_names, trl_tokenizer
from verl.config.load import load_config
from verl.config.schema import SFTConfig
from verl.config.settings import ConfigError
from verl.config.validate import find_problems
from verl.trainer.launch.sft import encode_chat_episode, encode_episode, load_records, make_rows
from verl.trainer.sft.rows import SFTRow

TURNS = 3
THOUGHT = "<think>\nhm {}\n</think>\n\nlook {}"
WITHOUT_PLAIN_REPLIES = ("deepseek", "nemotron")  # the prompt opens a thought


def make_episode(reply: str, turns: int = TURNS) -> list[dict[str, Any]]:
    pairs = [
        [
            {"role": "user", "content": f"You see a desk {n}."},
            {"role": "assistant", "content": reply.replace("{}", str(n))},
        ]
        for n in range(turns)
    ]
    return list(itertools.chain(*pairs))


def list_prompts(tokenizer: Any, turn: int, has_thoughts: bool) -> list[list[int]]:
    """Return the tokens of ``apply_chat_template`` for every form in which users pass replies."""
    forms = [{"content": THOUGHT if has_thoughts else "look {}"}]
    for key in ("reasoning_content", "thinking") if has_thoughts else ():
        forms.append({"content": "look {}", key: "hm {}"})
    if not has_thoughts:  # the template writes an empty thought into the sampled text
        forms.append({"content": "<think>\n\n</think>\n\nlook {}"})
    prompts = []
    for form in forms:
        messages = make_episode("", turn + 1)[:-1]
        for number, message in enumerate(messages[1::2]):
            message |= {key: text.replace("{}", str(number)) for key, text in form.items()}
        if ChatBridge(tokenizer).template.uses_parts:
            for message in messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
        try:
            prompts.append(
                tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            )
        except TemplateError:
            continue
    return prompts


def split_replies(row: SFTRow) -> list[tuple[list[int], list[int]]]:
    """Return prompt and tokens of each run of tokens that are trained on."""
    spans = itertools.groupby(range(len(row)), key=lambda i: row.loss_weights[i] > 0)
    runs = [list(positions) for is_trained, positions in spans if is_trained]
    ids = list(row.input_ids)
    return [(ids[: run[0]], ids[run[0] : run[-1] + 1]) for run in runs]


CASES = [
    (name, reply)
    for name in template_names()
    for reply in (THOUGHT, "look {}")
    if not (name.startswith("gptoss") and reply == THOUGHT)  # thoughts of gpt-oss have channels
    and not (name.startswith(WITHOUT_PLAIN_REPLIES) and reply != THOUGHT)
]


@pytest.mark.parametrize(("name", "reply"), CASES)
def test_replies_follow_the_prompts_of_the_template_once(name, reply):
    tokenizer = trl_tokenizer(name)
    bridge = ChatBridge(tokenizer)
    rows = encode_chat_episode(bridge, make_episode(reply), 10_000)
    replies = [pair for row in rows for pair in split_replies(row)]
    assert len(replies) == TURNS
    for turn, (prompt, ids) in enumerate(replies):
        assert prompt in list_prompts(tokenizer, turn, reply == THOUGHT), tokenizer.decode(prompt)
        text = tokenizer.decode(ids)
        assert f"look {turn}" in text and (reply != THOUGHT or f"hm {turn}" in text)
        if bridge.end_of_turn_id is not None:
            assert ids[-1] == bridge.end_of_turn_id and ids.count(ids[-1]) == 1
    if len(rows) == 1 and check_template_support(tokenizer).verdict is TemplateVerdict.APPEND:
        assert rows == [encode_episode(bridge, make_episode(reply), 0.0, 10_000)]


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseekv3", "nemotron_3_nano"])
def test_template_that_opens_thoughts_refuses_replies_without_one(name):
    bridge = ChatBridge(trl_tokenizer(name))
    with pytest.raises(ValueError, check=mentions("opens a thought", "look 0")):
        encode_chat_episode(bridge, make_episode("look {}"), 10_000)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1)


def configure(policy, tmp_path, *overrides):
    words = ["env.env_name=number_line", f"model.path={policy}", f"data.data_dir={tmp_path}"]
    return load_config("sft_trainer", [*words, *overrides], SFTConfig)


def test_weights_of_messages_and_the_longest_row(policy):
    bridge = ChatBridge(AutoTokenizer.from_pretrained(policy))
    episode = make_episode("look {}")
    (whole,) = encode_chat_episode(bridge, episode, 10_000)
    episode[3]["weight"] = 0.0
    (row,) = encode_chat_episode(bridge, episode, 10_000)
    assert row.input_ids == whole.input_ids
    assert split_replies(row) == [split_replies(whole)[n] for n in (0, 2)]
    (cut,) = encode_chat_episode(bridge, episode, len(whole) - 1)
    assert len(split_replies(cut)) == 1 and whole.input_ids[: len(cut)] == cut.input_ids
    assert encode_chat_episode(bridge, episode, 3) == []
    episode[2]["weight"] = 1.0
    with pytest.raises(ValueError, check=mentions("data.history=chat")):
        encode_chat_episode(bridge, episode, 10_000)


def test_history_and_weight_follow_the_environment(policy, tmp_path):
    data = configure(policy, tmp_path).data
    assert (data.history, data.env_loss_weight) == ("append", 0.5)
    for override in ("env.history=chat", "data.history=chat"):
        data = configure(policy, tmp_path, override).data
        assert (data.history, data.env_loss_weight) == ("chat", 0.0)
    assert configure(policy, tmp_path, "env.history=chat", "data.history=append").data.history == (
        "append"
    )


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data.history=chat", "data.env_loss_weight=0.5"], "data.env_loss_weight"),
        (["env.compact.enable=true"], "env.compact.enable"),
    ],
)
def test_settings_without_effect_are_refused(policy, tmp_path, overrides, key):
    (problem,) = find_problems(configure(policy, tmp_path, *overrides))
    assert problem.startswith(f"{key}=") and allowed(problem) and fix(problem)


def test_demonstrations_of_an_expert_become_chat_rows(policy, tmp_path):
    overrides = ("data.episodes=3", "data.val_episodes=0", "env.max_steps=8", "data.num_workers=1")
    cfg = configure(policy, tmp_path, "env.history=chat", *overrides)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    records, _ = load_records(cfg)
    rows = make_rows(cfg, records, tokenizer)
    replies = [m for r in records for m in r["messages"] if m["role"] == "assistant"]
    trained = [ids for row in rows for _, ids in split_replies(row)]
    assert [tokenizer.decode(ids) for ids in trained] == [
        f"{reply['content']}{tokenizer.decode(trained[0][-1:])}" for reply in replies
    ]


def test_row_of_a_file_with_a_weighted_prompt_is_named(policy, tmp_path):
    episode = make_episode("look {}")
    episode[0]["weight"] = 1
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": episode}) + "\n")
    cfg = configure(
        policy, tmp_path, "data.history=chat", f"data.train_files={tmp_path}/rows.jsonl"
    )
    records, _ = load_records(cfg)
    with pytest.raises(ConfigError, check=mentions("row 0", "data.history=chat")):
        make_rows(cfg, records, AutoTokenizer.from_pretrained(policy))
