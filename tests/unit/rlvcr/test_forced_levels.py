"""``algorithm.rlvcr.epsilon_levels``: levels that are drawn and forced.

Forced tokens are not trained on.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_system.multi_turn_rollout.trajectory import RolloutSpec
from agent_system.multi_turn_rollout.trajectory_generator import TrajectoryGenerator
from rlvcr.levels import LevelCodec
from rlvcr.research.level_rules import FREE_RULE, LevelRule
from rlvcr.settings import get_rlvcr_settings
from tests.helpers.number_line_world import make_world
from tests.helpers.policy_rows import actor_of, policy_config
from tests.helpers.thinking_trajectories import (
    Reference,
    collect,
    real_tokens,
    steps_of,
    thinking_config,
    thinking_script,
    thought_of,
)
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from verl.algos import factorize_keys
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.workers.actor import ActorWorker

both = pytest.mark.parametrize("history", ["append", "window"])


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), std=0.2)


@pytest.fixture(scope="module")
def scorer(policy):
    worker = actor_of(policy)
    return worker.compute_log_prob


def forcing_script():
    """Answer a turn that begins with a forced level: the thought, then the action of the turn."""
    thinking = thinking_script()

    def script(request, prompt):
        if not prompt.endswith("<think>") or request.stop == ("</think>", "<action>"):
            return thinking(request, prompt)
        free_turn = thinking(request, prompt[: -len("<level>1</level><think>")])
        return thinking(request, prompt) + free_turn[free_turn.index("<action>") :]

    return script


@pytest.fixture(scope="module")
def forced(tokenizer, scorer):
    """Return rows by history policy in which about half of the levels are forced."""
    return {
        history: collect(
            tokenizer, scorer, thinking_config(history, epsilon_levels=0.5), forcing_script()
        )
        for history in ("append", "window")
    }


def prefix_range(data, row, record, tokenizer):
    """Return the range in the response of the level and the tag after it."""
    start = record.span[0] - int(
        data.batch["attention_mask"][row][: data.batch["prompts"].shape[1]].sum()
    )
    return slice(start, start + len(LevelCodec(tokenizer).prefix_ids[1]))


@both
def test_forced_level_has_no_entropy_cost_or_loss(history, forced, tokenizer):
    data, codec = forced[history], LevelCodec(tokenizer)
    num_forced = Counter(record.level_forced for _, record in steps_of(data))
    assert num_forced[True] >= 4 and num_forced[False] >= 4
    for row, record in steps_of(data):
        prefix = prefix_range(data, row, record, tokenizer)
        digit = data.batch["responses"][row][prefix].tolist()[:-1]  # level 1 may have no thought
        assert record.level is not None
        assert digit == codec.prefix_ids[record.level][:-1]
        is_zero = {
            key: data.batch[key][row][prefix] == 0
            for key in ("response_mask", "old_log_probs", "entropys")
        }
        is_zero |= {
            key: data.batch[key][row][prefix] == 0
            for key in ("choice_mask", "thinking_level_entropies")
        }
        assert all(zero.all() for zero in is_zero.values()) == record.level_forced
        assert (data.batch["step_ids"][row][prefix] == -1).all() == record.level_forced
        sampled = (
            record.span[1] - record.span[0] - (prefix.stop - prefix.start) * record.level_forced
        )
        assert record.num_tokens == sampled
        thought = next(c for c in record.contexts if c.original)
        assert (
            thought.tokens == record.thought_tokens == len(tokenizer(thought.thought)["input_ids"])
        )
    assert data.batch["choice_mask"].sum() == num_forced[False]


@both
def test_thought_of_a_forced_level_is_scored_and_credited(history, forced, tokenizer, policy):
    data, model = forced[history], AutoModelForCausalLM.from_pretrained(policy)
    assert max(Reference(model, tokenizer, history).differences(data)) < 1e-5
    credit = data.batch["thinking_level_entropies"]
    for row, record in steps_of(data):
        if record.level_forced:
            of_turn = data.batch["step_ids"][row] == record.step
            credited = data.batch["responses"][row][of_turn & (credit[row] != 0)].tolist()
            assert tokenizer.decode(credited) == next(
                c.thought for c in record.contexts if c.original
            )
            assert {c.level for c in record.contexts} == {1, 2, 3, 4}


@both
def test_forced_tokens_have_no_advantage_and_no_gradient(history, forced, tokenizer, policy):
    config, data = thinking_config(history), forced[history]
    last = data.batch["response_mask"].cumsum(-1).argmax(-1)
    rewards = torch.zeros(data.batch["response_mask"].shape)
    trajectory = factorize_keys(data.non_tensor_batch["traj_uid"])
    rewards[torch.arange(len(data)), last] = trajectory % 2 * 1.0
    data.batch["token_level_rewards"] = rewards
    data = compute_advantage(data, config)
    rows = [(row, record) for row, record in steps_of(data) if record.level_forced]
    for row, record in rows:
        assert (
            data.batch["advantages"][row][prefix_range(data, row, record, tokenizer)] == 0
        ).all()

    def update(advantage: float):
        """Return the weights after an update in which forced tokens carry this advantage."""
        for row, record in rows:
            data.batch["advantages"][row][prefix_range(data, row, record, tokenizer)] = advantage
        worker = ActorWorker(
            policy_config(policy, ppo_micro_batch_size_per_gpu=4), device="cpu", seed=3
        )
        worker.init_model()
        worker.update_actor(data)
        return {name: torch.as_tensor(value) for name, value in worker.export_weights()}

    plain_weights, changed_weights = update(0.0), update(100.0)
    assert all(plain_weights[name].equal(changed_weights[name]) for name in plain_weights)


def test_forced_levels_do_not_count_in_level_metrics(tokenizer, scorer):
    config = thinking_config(epsilon_levels=1.0)
    data = collect(tokenizer, scorer, config, forcing_script(), groups=3)
    metrics = data.meta_info["metrics"]
    assert metrics["rlvcr/level_forced_share"] == 1.0
    assert [metrics[f"rlvcr/level_share_{level}"] for level in (1, 2, 3, 4)] == [0.0] * 4
    levels = Counter(record.level for _, record in steps_of(data))
    assert set(levels) == {1, 2, 3, 4}
    get_rlvcr_settings(config.algorithm).collapse_patience = 1
    data = collect(tokenizer, scorer, config, forcing_script(), groups=3)
    assert data.meta_info["metrics"]["rlvcr/levels_unseen"] == 4.0


def test_levels_are_drawn_uniformly_and_repeatably():
    codec = SimpleNamespace(prefix_ids={level: [level] for level in (1, 2, 3, 4)})

    def draw(seed, epsilon=0.2):
        settings = SimpleNamespace(seed=seed, level_rule=LevelRule.from_uniform_share(epsilon))
        context: Any = SimpleNamespace(settings=settings, codec=codec)
        generators = [
            TrajectoryGenerator(context, RolloutSpec(i, {}, "u", f"u/{i}", 0)) for i in range(400)
        ]
        return [
            tuple(generator._get_forced_level_ids(step, None))
            for generator in generators
            for step in range(10)
        ]

    drawn = draw(1)
    counts = Counter(drawn)
    assert 0.17 < 1 - counts[()] / len(drawn) < 0.23
    assert all(150 < counts[(level,)] < 250 for level in (1, 2, 3, 4))
    assert drawn == draw(1) and drawn != draw(2)
    assert set(draw(1, 0.0)) == {()} and () not in draw(1, 1.0)


@both
def test_turn_with_a_forced_level_keeps_its_length_limit(history, tokenizer, scorer):
    """The engine is asked for fewer tokens, and no row exceeds its maximum length."""
    config = thinking_config(history, epsilon_levels=1.0)
    long = thinking_script(lambda _level, _step, start: thought_of(4, 0, start) * 3)

    def script(request, prompt):
        if request.stop == ("</think>", "<action>"):
            return long(request, prompt)
        return "I think " * 40

    data = collect(tokenizer, scorer, config, script)
    length = len(LevelCodec(tokenizer).prefix_ids[1])
    limit = config.env.max_turn_tokens
    assert limit is not None
    assert all(record.num_tokens == limit - length for _, record in steps_of(data))
    assert data.batch["responses"].shape[1] <= limit
    assert all(
        len(real_tokens(data, row)) <= data.batch["input_ids"].shape[1] for row in range(len(data))
    )


def test_validation_forces_no_level(tokenizer):
    config = thinking_config(epsilon_levels=1.0)
    config.actor_rollout_ref.rollout.val_kwargs.do_sample = True
    from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings

    _, envs, _ = make_world(tokenizer, config)
    validation = RolloutSettings.from_config(config, envs.package, is_train=False)
    training = RolloutSettings.from_config(
        config, envs.package, is_train=True, samples_alternatives=True
    )
    assert validation.level_rule == FREE_RULE and not validation.level_rule.can_force_level
    assert (
        training.level_rule == LevelRule((0.25, 0.25, 0.25, 0.25))
        and training.level_rule.can_force_level
    )
