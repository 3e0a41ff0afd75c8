"""An agent library that was not made for this trains through the endpoint as it is."""

import pytest

from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from tests.helpers.play import Group, make_config
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_tokenizer

pytest.importorskip("smolagents")
HOME = "tests.helpers.smol_agent"
COMPUTE = "I compute it first.\n<code>\nprint(6 * 7)\n</code>"
ANSWER = "I know it now.\n<code>\nfinal_answer(42)\n</code>"


def writes_python(_request, prompt: str) -> str:
    """Computes, and answers once it has seen the number."""
    return ANSWER if "42" in prompt.rpartition("Execution logs:")[2] else COMPUTE


def test_an_agent_that_writes_code_is_played_and_packed():
    tokenizer = make_tiny_tokenizer()
    places = {"path": f"{HOME}:play", "tasks": f"{HOME}:tasks", "placement": "inline"}
    config = make_config("agent", kwargs=places, n=1, max_turn_tokens=96)
    config.data.max_prompt_length = 20_000
    engine = ScriptedEngine(tokenizer, writes_python)
    collector = TrajectoryCollector(config, tokenizer)
    envs = make_envs(config)[0]
    try:
        data = collector.multi_turn_loop(envs.gen_batch(1, 1), Group([engine]), envs)
    finally:
        collector.close()
    assert list(data.non_tensor_batch["episode_rewards"]) == [1.0, 1.0]
    # It quotes its replies with what it made of them: each of its steps is a row.
    assert [[step.step for step in row] for row in data.non_tensor_batch["steps"]] == [[0], [1]]
    said = [tokenizer(text)["input_ids"] for text in (COMPUTE, ANSWER)]
    for row, (request, ids) in enumerate(zip(engine.requests, said, strict=True)):
        real = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()].tolist()
        assert "</code>" in request.stop, "its own strings end a turn"
        assert real == [*request.prompt_ids, *ids]
        assert int(data.batch["response_mask"][row].sum()) == len(ids)
