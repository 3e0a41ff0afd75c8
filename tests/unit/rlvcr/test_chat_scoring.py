"""RLVCR with ``env.history=chat`` and a template that removes earlier thoughts.

Every turn is a row. Its contexts are scored after the prompt from which the turn was sampled.
"""

import asyncio

import pytest
from transformers import AutoModelForCausalLM

from agent_system.environments.env_registry import get_package
from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout.audit_rollouts import make_branch_spec
from agent_system.multi_turn_rollout.collector_worker import CollectorWorker
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import make_rollout_specs
from tests.helpers.chat_tokenizers import make_forgetful_tokenizer
from tests.helpers.policy_rows import actor_of
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.thinking_trajectories import (
    Reference,
    collect,
    list_trajectories,
    real_tokens,
    steps_of,
    thinking_config,
    thinking_script,
)
from tests.helpers.tiny_model import make_tiny_policy

EXACT = 1e-5


@pytest.fixture(scope="module")
def tokenizer():
    return make_forgetful_tokenizer()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), std=0.2)


@pytest.fixture(scope="module")
def data(tokenizer, policy):
    return collect(tokenizer, actor_of(policy).compute_log_prob, thinking_config("chat"))


def test_contexts_are_scored_after_the_prompt_of_their_turn(data, tokenizer, policy):
    """Compare with plain forwards of the text that ``apply_chat_template`` gives for each turn."""
    reference = Reference(AutoModelForCausalLM.from_pretrained(policy), tokenizer, "chat")
    differences = reference.differences(data)
    assert len(differences) == 4 * len(steps_of(data)) > 40
    assert max(differences) < EXACT
    for trajectory in list_trajectories(data).values():
        records = [record for _, record in trajectory]
        for step, (row, record) in enumerate(trajectory):
            prompt = tokenizer.decode(real_tokens(data, row)[: record.span[0]])
            assert prompt == reference.render_conversation(records, step)
            assert prompt.count("</think>") == reference.render_conversation(records, 0).count(
                "</think>"
            )


def test_credit_is_on_level_digit_and_thought_of_the_row(data, tokenizer):
    credit, width = data.batch["thinking_level_entropies"], data.batch["responses"].shape[1]
    assert len(data) == len(steps_of(data)), "a row per turn"
    for row, record in steps_of(data):
        prompt = int(data.batch["attention_mask"][row][:-width].sum())
        of_turn = slice(record.span[0] - prompt, record.span[1] - prompt)
        credited = data.batch["responses"][row][of_turn][credit[row][of_turn] != 0].tolist()
        thought = next(context.thought for context in record.contexts if context.original)
        assert tokenizer.decode(credited) == f"{record.level}{thought}"
    assert (credit != 0).any() and (credit[~data.batch["response_mask"].bool()] == 0).all()


def test_branch_repeats_the_prompts_up_to_its_turn(tokenizer):
    config = thinking_config("chat", n=1)
    settings = RolloutSettings.from_config(config, get_package("number_line"), is_train=True)
    specs = make_rollout_specs(make_envs(config)[0].gen_batch(1, 1))

    async def generate():
        engine = ScriptedEngine(tokenizer, thinking_script())
        worker = CollectorWorker(config.env, tokenizer, [engine])
        try:
            (original,) = (await worker.collect(specs, settings)).trajectories
            spec = make_branch_spec(original, original.turns[2], level=None)
            (branch,) = (await worker.collect([spec], settings)).trajectories
            return original, branch
        finally:
            await worker.close()

    original, branch = asyncio.run(generate())
    assert branch.aborted is None and len(original.ledgers) == len(original.turns) > 2
    for step in range(3):
        prompts = []
        for trajectory in (original, branch):
            turn = trajectory.turns[step]
            assert turn.ledger == step
            prompts.append(trajectory.ledgers[step].token_ids[: turn.start])
        assert prompts[0] == prompts[1]
