"""Rows of ``env.history=chat``: equal to ``append`` where the template keeps earlier turns, and one
per thought where it removes thoughts.
"""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from tests.helpers.chat_tokenizers import make_forgetful_tokenizer
from tests.helpers.engine_cases import rollout_section
from tests.helpers.number_line_world import Group, make_config, walk
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from tests.helpers.trl_templates import template_names, trl_tokenizer
from verl.algos import compute_policy_loss_vanilla
from verl.workers.rollout import create_engine
from verl.workers.rollout.worker import RolloutWorker

TENSORS = ("prompts", "responses", "attention_mask", "response_mask", "step_ids")
LINE_AGENT = "tests.helpers.number_line_agents"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture(scope="module")
def forgetful_tokenizer():
    return make_forgetful_tokenizer()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), std=0.2)


@pytest.fixture(scope="module")
def model(policy):
    return AutoModelForCausalLM.from_pretrained(policy).eval()


def collect(config, tokenizer, engine, groups: int = 2):
    collector = TrajectoryCollector(config, tokenizer)
    try:
        envs = make_envs(config)[0]
        if config.env.env_name == "number_line":
            envs.replace_tasks([t for t in envs.task_list if abs(t["start"] - t["target"]) >= 3])
        return collector.multi_turn_loop(envs.gen_batch(1, groups), Group([engine]), envs)
    finally:
        collector.close()


def thinking_script(_request: object, prompt: str) -> str:
    return f"<think>\nI go {walk(prompt)}\n</think>\n\n<action>{walk(prompt)}</action>"


@torch.no_grad()
def new_log_probs(model, data) -> torch.Tensor:
    """Return the log-probs [B, R] of the responses."""
    logits = model(
        data.batch["input_ids"],
        attention_mask=data.batch["attention_mask"],
        position_ids=data.batch["position_ids"],
    ).logits
    width = data.batch["responses"].shape[1]
    log_probs = logits[:, -width - 1 : -1].float().log_softmax(-1)
    return log_probs.gather(-1, data.batch["responses"].unsqueeze(-1)).squeeze(-1)


def policy_loss(model, data) -> float:
    """Return the loss of ``model``. The tokens of turn ``step`` have the advantage ``step + 1``."""
    advantages = (data.batch["step_ids"] + 1.0) * data.batch["response_mask"]
    loss, *_ = compute_policy_loss_vanilla(
        data.batch["rollout_log_probs"],
        new_log_probs(model, data),
        advantages,
        data.batch["response_mask"],
    )
    return loss.item()


def test_rows_and_loss_equal_those_of_append_where_no_thought_is_removed(policy, model, tokenizer):
    """A random policy samples any tokens: most are not those that the tokenizer gives for them."""
    section = rollout_section(max_model_len=1024, max_num_seqs=1)

    def generate(history):
        engine = create_engine("hf", section, str(policy), seed=3, num_threads=1)
        config = make_config(history=history, max_turn_tokens=24, max_steps=4)
        return collect(config, tokenizer, RolloutWorker(None, "", engine=engine), 6)

    append, chat = generate("append"), generate("chat")
    assert max(append.non_tensor_batch["episode_lengths"]) > 1
    for name in (*TENSORS, "rollout_log_probs"):
        assert chat.batch[name].tolist() == append.batch[name].tolist(), name
    assert policy_loss(model, chat) == policy_loss(model, append) != 0.0


def test_turn_after_a_thought_is_a_row_of_its_own_prompt(forgetful_tokenizer, model):
    tokenizer = forgetful_tokenizer
    engine = ScriptedEngine(tokenizer, thinking_script)
    data = collect(make_config(history="chat", n=1), tokenizer, engine)
    steps = [[step.step for step in row] for row in data.non_tensor_batch["steps"]]
    assert len(steps) > 5 and all(len(row) == 1 for row in steps)
    assert data.non_tensor_batch["won"].all()
    prompts = [request.prompt_ids for request in engine.requests]
    sampled = 0
    for row, (record,) in enumerate(data.non_tensor_batch["steps"]):
        mask = data.batch["attention_mask"][row].bool()
        tokens = data.batch["input_ids"][row][mask].tolist()
        start, end = record.span
        assert tokens[:start] in prompts and end == len(tokens)
        text = tokenizer.decode(tokens)
        assert text.count("I go") == 1, "only the thought of the turn itself"
        assert text.count("<|im_start|>assistant\n") == record.step + 1
        sampled += end - start
        own = data.batch["response_mask"][row].bool()
        assert data.batch["responses"][row][own].tolist() == tokens[start:end]
    assert data.batch["response_mask"].sum() == sampled == sum(map(len, engine_samples(engine)))
    check_log_probs(model, data)


def engine_samples(engine: ScriptedEngine) -> list[list[int]]:
    """Return the sampled tokens of all requests."""
    decode = engine.tokenizer.decode
    texts = [thinking_script(request, decode(request.prompt_ids)) for request in engine.requests]
    return [engine.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def check_log_probs(model, data) -> None:
    """Compare log-probs of padded rows with those of one forward per turn."""
    log_probs = new_log_probs(model, data)
    for row, (record,) in enumerate(data.non_tensor_batch["steps"]):
        mask = data.batch["attention_mask"][row].bool()
        ids = data.batch["input_ids"][row][mask]
        with torch.no_grad():
            logits = model(ids[None]).logits[0].float()
        start, end = record.span
        expected = logits[start - 1 : end - 1].log_softmax(-1)
        expected = expected.gather(-1, ids[start:end, None])[:, 0]
        own = data.batch["response_mask"][row].bool()
        assert torch.allclose(log_probs[row][own], expected, atol=1e-5)


def test_forks_of_an_agent_follow_the_same_rule(tokenizer, forgetful_tokenizer):
    """An agent's dialogue is one row, or a row per thought if the template removes thoughts."""

    def script(_request: object, prompt: str) -> str:
        count = prompt.count("<|im_start|>")
        return f"<think>{'so ' * count}</think>look {count}<|im_end|>"

    kwargs = {"path": f"{LINE_AGENT}:fork", "tasks": f"{LINE_AGENT}:tasks", "placement": "inline"}
    steps_by_template = []
    for one in (tokenizer, forgetful_tokenizer):
        config = make_config("agent", "chat", n=1, kwargs=kwargs)
        engine = ScriptedEngine(one, script)
        data = collect(config, one, engine, groups=1)
        records = data.non_tensor_batch["steps"]
        steps_by_template.append([[step.step for step in row] for row in records])
        for row, turns in enumerate(records):
            mask = data.batch["attention_mask"][row].bool()
            tokens = data.batch["input_ids"][row][mask].tolist()
            for turn in turns:
                assert tokens[: turn.span[0]] == engine.requests[turn.step].prompt_ids
    assert steps_by_template == [[[0, 1, 3], [2], [4]], [[0], [1], [2], [3], [4]]]


@pytest.mark.skipif(not template_names(), reason="trl is not installed")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "llama3_1", "glm4moe"])
def test_tools_are_rendered_by_the_template_and_called_in_its_format(name):
    """The policy calls a tool in the format of its family, and its result is a tool message."""
    tokenizer = trl_tokenizer(name)
    written = {
        "qwen3": '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n'
        "</tool_call>",
        "qwen3_6": "hm\n</think>\n\n<tool_call>\n<function=calculator>\n<parameter=expression>\n"
        "6 * 7\n</parameter>\n</function>\n</tool_call>",
        "llama3_1": '{"name": "calculator", "parameters": {"expression": "6 * 7"}}',
        "glm4moe": "<tool_call>calculator\n<arg_key>expression</arg_key>\n"
        "<arg_value>6 * 7</arg_value>\n</tool_call>",
    }[name]
    prompts: list[str] = []

    def script(_request: object, prompt: str) -> str:
        prompts.append(prompt)
        return written if len(prompts) == 1 else "<answer>42</answer>"

    config: Any = make_config("tools", "chat", n=1, max_turn_tokens=128)
    config.env.kwargs = {}
    config.data.max_prompt_length = 4096
    data = collect(config, tokenizer, ScriptedEngine(tokenizer, script), groups=1)
    records = [record for row in data.non_tensor_batch["steps"] for record in row]
    first, second = records
    assert first.is_action_valid and not first.done and second.done
    assert '"result": 42' in second.observation
    assert "This is what there is, as JSON" not in prompts[0] and "calculator" in prompts[0]
    assert "42" in prompts[1].rpartition("6 * 7")[2] and '"result"' not in prompts[1]
    assert written.rpartition("</think>")[2].strip() in prompts[1]
