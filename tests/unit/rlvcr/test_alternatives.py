"""Alternatives: the other levels' thoughts from the same prefix, cut and counted; when they are
asked for.
"""

import asyncio
from collections import Counter

import pytest

from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from rlvcr.alternatives import THOUGHT_STOPS, AlternativeSampler, AlternativeSettings
from rlvcr.levels import LevelCodec
from rlvcr.settings import method_settings
from tests.helpers.play import make_config, make_world, walking_policy
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.utils.sampling import SamplingResult, StopReason
from verl.utils.seeds import derive_seed

STEP = "<level>{level}</level><think>{thought}</think><action>go to desk 1</action>"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture(scope="module")
def codec(tokenizer):
    return LevelCodec(tokenizer)


class Engine:
    """Answers ``sample`` with prepared texts per level; keeps what was asked."""

    def __init__(self, tokenizer, answers: dict, reason=StopReason.STOP) -> None:
        self.tokenizer, self.answers, self.reason = tokenizer, answers, reason
        self.asked, self.seeds = [], []

    async def sample(self, prompt_ids, max_tokens, stop, route, seed):
        self.asked.append((prompt_ids, max_tokens, stop, route))
        self.seeds.append(seed)
        level = int(self.tokenizer.decode(prompt_ids).rpartition("<level>")[2][0])
        answer = self.answers.get(level, "a thought</think>")
        if answer is None:
            return None
        ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return SamplingResult("r", ids, [-1.0] * len(ids), self.reason, 0)


def think(
    tokenizer,
    codec,
    level=3,
    answers=None,
    settings=None,
    levels=None,
    reason=StopReason.STOP,
    form=STEP,
):
    engine = Engine(tokenizer, answers or {}, reason)
    sampler = AlternativeSampler(
        settings or AlternativeSettings(), codec, engine.sample, lambda t: tokenizer(t)["input_ids"]
    )
    step = form.format(level=level, thought="well")
    parsed = codec.parse_turn(tokenizer(step, add_special_tokens=False)["input_ids"])
    levels = sampler.choose_levels(parsed, "t", 0) if levels is None else levels
    return asyncio.run(sampler.sample_thoughts([5, 6, 7], parsed, levels, "t", 0, route=4)), engine


def test_every_thought_is_drawn_with_a_seed_of_its_own(tokenizer, codec):
    (_, engine), (_, again), (_, other) = (
        think(tokenizer, codec, settings=AlternativeSettings(seed=seed)) for seed in (0, 0, 1)
    )
    assert engine.seeds == again.seeds and len({*engine.seeds, *other.seeds}) == 4


def test_draws_depend_on_seed_trajectory_step_and_level_alone(tokenizer, codec):
    """Seeds by name: whoever reads a run's seed draws the same steps, levels and thoughts."""
    settings = AlternativeSettings(which="one", step_fraction=0.5, seed=3)
    seed = derive_seed(3, "thought", "t", 0, 4)
    _, engine = think(tokenizer, codec, level=3, settings=settings, levels=[4])
    assert engine.seeds == [seed]
    expected = []
    for number in range(20):
        play = f"t{number}"
        step = number % 7
        drawn = derive_seed(3, "alternatives", play, step) < 2**62
        pick = derive_seed(3, "alternative level", play, step) % 3
        expected.append(((1, 3, 4)[pick],) if drawn else ())
    assert levels_for(codec, tokenizer, settings, count=20) == expected


def test_settings_of_thoughts_are_those_of_the_method():
    rlvcr = method_settings(make_config().algorithm)
    rlvcr.alternatives = "one"
    rlvcr.expand = "mixed_groups"
    rlvcr.step_fraction = 0.25
    rlvcr.action_blind = False
    rlvcr.max_alternative_tokens = 30
    found = AlternativeSettings.from_config(rlvcr, 5, 40)
    assert found == AlternativeSettings(
        which="one",
        expand="mixed_groups",
        step_fraction=0.25,
        max_tokens=30,
        action_blind=False,
        seed=5,
    )
    assert AlternativeSettings.from_config(rlvcr, 5, 20).max_tokens == 20


def test_the_other_levels_think_after_the_same_prompt(tokenizer, codec):
    found, engine = think(tokenizer, codec, level=3)
    assert [thought.level for thought in found.thoughts] == [1, 2, 4]
    assert [asked[0] for asked in engine.asked] == [
        [5, 6, 7] + codec.prefix_ids[level] for level in (2, 4)
    ]
    assert {asked[1:] for asked in engine.asked} == {(64, THOUGHT_STOPS, 4)}
    assert THOUGHT_STOPS == ("</think>", "<action>")
    texts = [tokenizer.decode(thought.token_ids) for thought in found.thoughts]
    assert texts == [
        "<level>1</level><think></think><action>",
        "<level>2</level><think>a thought</think><action>",
        "<level>4</level><think>a thought</think><action>",
    ]
    assert not found.dropped and found.sampled_tokens == sum(
        len(tokenizer("a thought</think>")["input_ids"]) for _ in engine.asked
    )


def test_the_other_levels_are_asked_and_written_in_the_form_of_the_step(tokenizer, codec):
    form = "<level>{level}</level>\n<think>{thought}</think> <action>go to desk 1</action>"
    found, engine = think(tokenizer, codec, level=3, form=form)
    asked = [tokenizer.decode(prompt[3:]) for prompt, *_ in engine.asked]
    assert asked == ["<level>2</level>\n<think>", "<level>4</level>\n<think>"]
    assert [tokenizer.decode(thought.token_ids) for thought in found.thoughts] == [
        "<level>1</level>\n<think></think> <action>",
        "<level>2</level>\n<think>a thought</think> <action>",
        "<level>4</level>\n<think>a thought</think> <action>",
    ]


def test_a_thought_is_cut_at_the_first_action(tokenizer, codec):
    found, _ = think(tokenizer, codec, answers={2: "hm<action>take mug</action>", 4: "</think>"})
    assert [(t.level, t.thought) for t in found.thoughts] == [(1, ""), (2, "hm"), (4, "")]
    assert (
        tokenizer.decode(found.thoughts[1].token_ids) == "<level>2</level><think>hm</think><action>"
    )


@pytest.mark.parametrize(
    ("answers", "reason", "dropped"),
    [
        ({2: "I see and see", 4: "and on"}, StopReason.LENGTH, {"length": 2}),
        ({2: "<level>1</level></think>"}, StopReason.STOP, {"format": 1}),
        ({2: "", 4: "no end"}, StopReason.STOP, {"format": 2}),
        ({4: None}, StopReason.STOP, {"engine": 1}),
        ({2: None, 4: None}, StopReason.STOP, {"engine": 2}),
    ],
)
def test_a_failed_thought_is_dropped_and_counted(tokenizer, codec, answers, reason, dropped):
    found, _ = think(tokenizer, codec, answers=answers, reason=reason)
    assert found.dropped == Counter(dropped)
    assert len(found.thoughts) == 3 - found.dropped.total()


def test_the_original_level_is_not_thought_again_and_level_one_needs_no_engine(tokenizer, codec):
    found, engine = think(tokenizer, codec, level=1)
    assert [thought.level for thought in found.thoughts] == [2, 3, 4] and len(engine.asked) == 3
    found, engine = think(tokenizer, codec, levels=[1])
    assert [thought.level for thought in found.thoughts] == [1] and engine.asked == []


def levels_for(codec, tokenizer, settings, text=None, count=400):
    parsed = codec.parse_turn(tokenizer(text or STEP.format(level=2, thought="x"))["input_ids"])
    engine = Engine(tokenizer, {})
    sampler = AlternativeSampler(
        settings, codec, engine.sample, lambda t: tokenizer(t)["input_ids"]
    )
    levels = [tuple(sampler.choose_levels(parsed, f"t{n}", n % 7)) for n in range(count)]
    assert engine.asked == []
    return levels


def test_one_alternative_is_drawn_uniformly_and_repeatably(tokenizer, codec):
    drawn = levels_for(codec, tokenizer, AlternativeSettings(which="one", seed=3))
    counts = Counter(drawn)
    assert set(counts) == {(1,), (3,), (4,)} and min(counts.values()) > 90
    assert drawn == levels_for(codec, tokenizer, AlternativeSettings(which="one", seed=3))
    assert drawn != levels_for(codec, tokenizer, AlternativeSettings(which="one", seed=4))


def test_step_fraction_draws_steps(tokenizer, codec):
    expanded = [
        levels
        for levels in levels_for(codec, tokenizer, AlternativeSettings(step_fraction=0.25))
        if levels
    ]
    assert 60 < len(expanded) < 140 and set(expanded) == {(1, 3, 4)}
    assert not any(levels_for(codec, tokenizer, AlternativeSettings(step_fraction=0.0)))


@pytest.mark.parametrize(
    "text", ["look", "<think>x</think><action>go</action>", "<level>2</level><think>x"]
)
def test_a_step_that_cannot_be_scored_gets_none(tokenizer, codec, text):
    assert not any(levels_for(codec, tokenizer, AlternativeSettings(), text, count=5))


def test_the_thought_is_told_the_action_only_where_asked_for(tokenizer, codec):
    _, blind = think(tokenizer, codec, levels=[2])
    told, telling = think(
        tokenizer, codec, levels=[2], settings=AlternativeSettings(action_blind=False)
    )
    assert "go to desk 1" not in tokenizer.decode(blind.asked[0][0])
    assert "go to desk 1" in tokenizer.decode(telling.asked[0][0])
    assert "go to desk" not in tokenizer.decode(told.thoughts[0].token_ids), (
        "the scored context never holds the hint"
    )


def rlvcr_config(**rlvcr):
    config = make_config(levels=True, n=2)
    method_settings(config.algorithm).enable = True
    for key, value in rlvcr.items():
        setattr(method_settings(config.algorithm), key, value)
    return config


def collect(tokenizer, config, script=None, groups=2):
    group, envs, (engine,) = make_world(tokenizer, config, script)
    collector = TrajectoryCollector(config, tokenizer)
    try:
        settings = RolloutSettings.from_config(config, envs.package, is_train=True, thinking=True)
        return collector._generate_batch(
            envs.gen_batch(1, groups), group, settings
        ).trajectories, engine
    finally:
        collector.close()


def test_thoughts_are_asked_for_while_the_environment_steps(tokenizer):
    trajectories, engine = collect(tokenizer, rlvcr_config(), groups=1)
    prompts = [engine.tokenizer.decode(request.prompt_ids) for request in engine.requests]
    kinds = ["thought" if prompt.endswith("<think>") else "turn" for prompt in prompts]
    last_turn = max(i for i, kind in enumerate(kinds) if kind == "turn")
    assert kinds.index("thought") < last_turn, "alternatives do not wait for the end of the play"
    for trajectory in trajectories:
        for turn in trajectory.turns:
            assert turn.alternatives is not None and turn.parsed is not None
            levels = {thought.level for thought in turn.alternatives.thoughts} | {turn.parsed.level}
            assert levels == {1, 2, 3, 4}
            prompt = trajectory.ledgers[turn.ledger].token_ids[: turn.start]
            asked = [
                r.prompt_ids[: len(prompt)]
                for r in engine.requests
                if len(r.prompt_ids) > len(prompt)
            ]
            assert prompt in asked


@pytest.mark.parametrize("mixed", [True, False])
def test_mixed_groups_only(tokenizer, mixed):
    walks, begun = walking_policy(levels=True), []

    def script(request, prompt):
        if prompt.endswith("<think>"):
            return walks(request, prompt)
        begun.append(prompt)
        lost = mixed and len(begun) == 1
        return "look " * 40 if lost else walks(request, prompt)

    trajectories, _ = collect(tokenizer, rlvcr_config(expand="mixed_groups"), script, groups=1)
    expanded = [turn for t in trajectories for turn in t.turns if turn.alternatives is not None]
    assert bool(expanded) == mixed
    if mixed:
        steps = [turn.parsed for t in trajectories for turn in t.turns]
        readable = [step for step in steps if step is not None and step.failure is None]
        assert len(expanded) == len(readable)


def test_without_any_setting_every_step_thinks_at_every_other_level():
    settings = AlternativeSettings()
    assert (settings.which, settings.expand, settings.step_fraction) == ("all", "all", 1.0)
    assert (settings.max_tokens, settings.action_blind, settings.seed) == (64, True, 0)
