"""Requests to the engine for a turn and for a thought: seeds, limits, routes."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout.engine_client import EngineAbortedError, PolicySampler
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import RolloutSpec
from tests.helpers.number_line_world import Group, make_config
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.utils.sampling import SamplingResult, StopReason
from verl.utils.seeds import derive_seed

SETTINGS = RolloutSettings(
    history="append",
    history_length=0,
    max_steps=4,
    max_turn_tokens=9,
    max_prompt_length=64,
    max_response_length=64,
    requests_levels=False,
    temperature=0.7,
    top_p=0.9,
    top_k=5,
    stop=("</action>",),
    seed=11,
)
SPEC = RolloutSpec(3, {"task_id": "t", "data_source": "d"}, "group", "group/1", 0)


class Recorder:
    """Record the requests, and abort them if ``aborts``."""

    def __init__(self, aborts=False):
        self.requests = []
        self.aborts = aborts

    async def sample(self, prompt_ids, **request):
        self.requests.append((list(prompt_ids), request))
        if self.aborts:
            raise EngineAbortedError("aborted")
        return SamplingResult("r", [1, 2], [-0.1, -0.2], StopReason.STOP, 3)

    async def close(self):
        pass


def sampler_of(engine, **changes):
    return PolicySampler(engine, replace(SETTINGS, **changes))


def test_turn_is_sampled_with_the_settings():
    engine = Recorder()
    result = asyncio.run(sampler_of(engine).sample_turn([4, 5], SPEC, 0, 9))
    assert (result.token_ids, result.logprobs, result.policy_version) == ([1, 2], [-0.1, -0.2], 3)
    expected = {
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ("</action>",),
        "routing_key": 3,
        "seed": derive_seed(11, "turn", "group/1", 0),
        "model": "policy",
    }
    assert engine.requests == [([4, 5], expected)]


def seeds_of(*specs, turns=2, seed=11):
    engine = Recorder()
    sampler = sampler_of(engine, seed=seed)

    async def sample_turns():
        for spec in specs:
            for number in range(turns):
                await sampler.sample_turn([1], spec, number, 9)

    asyncio.run(sample_turns())
    return [request["seed"] for _, request in engine.requests]


def test_every_turn_of_every_member_has_its_own_seed():
    second_member = replace(SPEC, traj_uid="group/2")
    seeds = seeds_of(SPEC, second_member, turns=3)
    assert len(set(seeds)) == 6
    assert seeds_of(SPEC, second_member, turns=3) == seeds
    assert seeds_of(replace(SPEC, index=9, uid="elsewhere"), second_member, turns=3) == seeds
    assert not set(seeds_of(SPEC, second_member, turns=3, seed=12)) & set(seeds)


def test_thought_is_sampled_with_its_own_limits_and_seed():
    engine = Recorder()
    result = asyncio.run(sampler_of(engine).sample_thought([4], 20, ("</think>",), 5, 99))
    assert result is not None and result.token_ids == [1, 2]
    expected = {
        "max_tokens": 20,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ("</think>",),
        "routing_key": 5,
        "seed": 99,
    }
    assert engine.requests == [([4], expected)]


def test_aborted_thought_is_none_and_aborted_turn_raises():
    sampler = sampler_of(Recorder(aborts=True))
    assert asyncio.run(sampler.sample_thought([4], 20, (), 5, 99)) is None
    with pytest.raises(EngineAbortedError):
        asyncio.run(sampler.sample_turn([4], SPEC, 0, 9))


def sampled_moves(request, prompt):
    """Return a move that depends only on the request's seed, as with a real engine."""
    move = np.random.default_rng(request.seed).choice(["left", "right", "stay"])
    return f"<action>{move}</action>"


@pytest.mark.parametrize("history", ["append", "window"])
def test_members_of_a_group_sample_differently_and_repeatably(history):
    """Exploration needs this: with one seed per group all members would act alike."""
    tokenizer = make_tiny_tokenizer()
    config = make_config(history=history, n=8, max_steps=5, kwargs={"size": 9, "max_steps": 50})
    envs = make_envs(config)[0]
    envs.replace_tasks(
        [task for task in envs.task_list if abs(task["start"] - task["target"]) >= 5]
    )

    def list_states():
        collector = TrajectoryCollector(config, tokenizer)
        engines = Group([ScriptedEngine(tokenizer, sampled_moves)])
        try:
            data = collector.multi_turn_loop(envs.gen_batch(1, 2), engines, envs)
        finally:
            collector.close()
        columns = data.non_tensor_batch
        states_by_group: dict[str, dict[str, list[str]]] = {}
        rows = zip(columns["uid"], columns["traj_uid"], columns["anchor_obs"], strict=True)
        for uid, traj_uid, states in rows:
            states_by_group.setdefault(uid, {}).setdefault(traj_uid, []).extend(states)
        return states_by_group

    groups = list_states()
    for members in groups.values():
        assert len(members) == 8
        assert len({tuple(states) for states in members.values()}) > 4
    assert list_states() == groups
