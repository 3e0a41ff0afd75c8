"""An agent built with a library is trained through the endpoint, without changes to the library."""

import pytest

from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from tests.helpers.number_line_world import Group, make_config
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_tokenizer

pytest.importorskip("smolagents")
AGENT = "tests.helpers.smol_agent"
COMPUTE = "I compute it first.\n<code>\nprint(6 * 7)\n</code>"
ANSWER = "I know it now.\n<code>\nfinal_answer(42)\n</code>"


def writes_python(_request, prompt: str) -> str:
    """Compute the number first, and answer once it is in the prompt."""
    return ANSWER if "42" in prompt.rpartition("Execution logs:")[2] else COMPUTE


def test_agent_that_writes_code_gives_rows():
    tokenizer = make_tiny_tokenizer()
    kwargs = {"path": f"{AGENT}:play", "tasks": f"{AGENT}:tasks", "placement": "inline"}
    config = make_config("agent", kwargs=kwargs, n=1, max_turn_tokens=96)
    config.data.max_prompt_length = 20_000
    engine = ScriptedEngine(tokenizer, writes_python)
    collector = TrajectoryCollector(config, tokenizer)
    envs = make_envs(config)[0]
    try:
        data = collector.multi_turn_loop(envs.gen_batch(1, 1), Group([engine]), envs)
    finally:
        collector.close()
    assert list(data.non_tensor_batch["episode_rewards"]) == [1.0, 1.0]
    # The agent adds its results to the replies it quotes, so each of its turns is a row.
    assert [[step.step for step in row] for row in data.non_tensor_batch["steps"]] == [[0], [1]]
    reply_ids = [tokenizer(text)["input_ids"] for text in (COMPUTE, ANSWER)]
    for row, (request, ids) in enumerate(zip(engine.requests, reply_ids, strict=True)):
        row_tokens = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()].tolist()
        assert "</code>" in request.stop, "the agent's stop strings end a turn"
        assert row_tokens == [*request.prompt_ids, *ids]
        assert int(data.batch["response_mask"][row].sum()) == len(ids)
