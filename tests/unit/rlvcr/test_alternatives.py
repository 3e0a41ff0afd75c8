"""Alternative thoughts: the other levels from the same prefix, cut, counted and drawn."""

import asyncio
from collections import Counter

import pytest

from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from rlvcr.alternatives import THOUGHT_STOPS, AlternativeThoughtSampler
from rlvcr.levels import LevelCodec
from rlvcr.settings import RLVCRSettings, get_rlvcr_settings
from tests.helpers.number_line_world import make_config, make_world, walking_policy
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.utils.sampling import SamplingResult, StopReason
from verl.utils.seeds import derive_seed

TURN = "<level>{level}</level><think>{thought}</think><action>go to desk 1</action>"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture(scope="module")
def codec(tokenizer):
    return LevelCodec(tokenizer)


class Engine:
    """Answer ``sample`` with prepared texts per level, and keep the requests."""

    def __init__(self, tokenizer, answers: dict, reason=StopReason.STOP) -> None:
        self.tokenizer, self.answers, self.reason = tokenizer, answers, reason
        self.requests, self.seeds = [], []

    async def sample(self, prompt_ids, max_tokens, stop, routing_key, seed):
        self.requests.append((prompt_ids, max_tokens, stop, routing_key))
        self.seeds.append(seed)
        level = int(self.tokenizer.decode(prompt_ids).rpartition("<level>")[2][0])
        answer = self.answers.get(level, "a thought</think>")
        if answer is None:
            return None
        ids = self.tokenizer(answer, add_special_tokens=False)["input_ids"]
        return SamplingResult("r", ids, [-1.0] * len(ids), self.reason, 0)


def make_settings(**keys):
    return RLVCRSettings(**{"max_alternative_tokens": 64, **keys})


def sample_thoughts(
    tokenizer,
    codec,
    level=3,
    answers=None,
    settings=None,
    levels=None,
    reason=StopReason.STOP,
    form=TURN,
    max_turn_tokens=64,
    seed=0,
):
    engine = Engine(tokenizer, answers or {}, reason)
    sampler = AlternativeThoughtSampler(
        settings or make_settings(),
        codec,
        engine.sample,
        lambda t: tokenizer(t)["input_ids"],
        max_turn_tokens,
        seed,
    )
    turn = form.format(level=level, thought="well")
    parsed = codec.parse_turn(tokenizer(turn, add_special_tokens=False)["input_ids"])
    levels = sampler.choose_levels(parsed, "t", 0) if levels is None else levels
    return asyncio.run(
        sampler.sample_thoughts([5, 6, 7], parsed, levels, "t", 0, routing_key=4)
    ), engine


def test_every_thought_is_sampled_with_its_own_seed(tokenizer, codec):
    (_, engine), (_, repeated), (_, other_seed) = (
        sample_thoughts(tokenizer, codec, seed=seed) for seed in (0, 0, 1)
    )
    assert engine.seeds == repeated.seeds and len({*engine.seeds, *other_seed.seeds}) == 4


def test_draws_depend_on_seed_trajectory_turn_and_level(tokenizer, codec):
    """The seeds are derived from names, so the run's seed gives the same turns, levels and
    thoughts.
    """
    settings = make_settings(alternatives="one", step_fraction=0.5)
    seed = derive_seed(3, "thought", "t", 0, 4)
    _, engine = sample_thoughts(tokenizer, codec, level=3, settings=settings, levels=[4], seed=3)
    assert engine.seeds == [seed]
    expected = []
    for number in range(20):
        traj_uid = f"t{number}"
        step = number % 7
        is_drawn = derive_seed(3, "alternatives", traj_uid, step) < 2**62
        draw_key = ("alternative level", traj_uid, step)
        level = min((1, 3, 4), key=lambda level: derive_seed(3, *draw_key, level))
        expected.append((level,) if is_drawn else ())
    assert draw_levels(codec, tokenizer, settings, count=20, seed=3) == expected


def test_thought_is_limited_by_its_setting_and_by_the_turn(tokenizer, codec):
    for settings, max_tokens in ((make_settings(max_alternative_tokens=30), 30), (None, 40)):
        _, engine = sample_thoughts(tokenizer, codec, settings=settings, max_turn_tokens=40)
        assert {request[1] for request in engine.requests} == {max_tokens}


def test_other_levels_are_sampled_after_the_same_prompt(tokenizer, codec):
    alternatives, engine = sample_thoughts(tokenizer, codec, level=3)
    assert [thought.level for thought in alternatives.thoughts] == [1, 2, 4]
    assert [request[0] for request in engine.requests] == [
        [5, 6, 7] + codec.prefix_ids[level] for level in (2, 4)
    ]
    assert {request[1:] for request in engine.requests} == {(64, THOUGHT_STOPS, 4)}
    assert THOUGHT_STOPS == ("</think>", "<action>")
    texts = [tokenizer.decode(thought.token_ids) for thought in alternatives.thoughts]
    assert texts == [
        "<level>1</level><think></think><action>",
        "<level>2</level><think>a thought</think><action>",
        "<level>4</level><think>a thought</think><action>",
    ]
    assert not alternatives.dropped and alternatives.sampled_tokens == sum(
        len(tokenizer("a thought</think>")["input_ids"]) for _ in engine.requests
    )


def test_other_levels_are_sampled_in_the_format_of_the_turn(tokenizer, codec):
    form = "<level>{level}</level>\n<think>{thought}</think> <action>go to desk 1</action>"
    alternatives, engine = sample_thoughts(tokenizer, codec, level=3, form=form)
    prefixes = [tokenizer.decode(prompt[3:]) for prompt, *_ in engine.requests]
    assert prefixes == ["<level>2</level>\n<think>", "<level>4</level>\n<think>"]
    assert [tokenizer.decode(thought.token_ids) for thought in alternatives.thoughts] == [
        "<level>1</level>\n<think></think> <action>",
        "<level>2</level>\n<think>a thought</think> <action>",
        "<level>4</level>\n<think>a thought</think> <action>",
    ]


def test_thought_is_cut_at_the_first_action(tokenizer, codec):
    alternatives, _ = sample_thoughts(
        tokenizer, codec, answers={2: "hm<action>take mug</action>", 4: "</think>"}
    )
    assert [(t.level, t.thought) for t in alternatives.thoughts] == [(1, ""), (2, "hm"), (4, "")]
    assert (
        tokenizer.decode(alternatives.thoughts[1].token_ids)
        == "<level>2</level><think>hm</think><action>"
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
def test_failed_thought_is_dropped_and_counted(tokenizer, codec, answers, reason, dropped):
    alternatives, _ = sample_thoughts(tokenizer, codec, answers=answers, reason=reason)
    assert alternatives.dropped == Counter(dropped)
    assert len(alternatives.thoughts) == 3 - alternatives.dropped.total()


def test_original_level_and_level_one_are_not_sampled(tokenizer, codec):
    alternatives, engine = sample_thoughts(tokenizer, codec, level=1)
    assert [thought.level for thought in alternatives.thoughts] == [2, 3, 4] and len(
        engine.requests
    ) == 3
    alternatives, engine = sample_thoughts(tokenizer, codec, levels=[1])
    assert [thought.level for thought in alternatives.thoughts] == [1] and engine.requests == []


def draw_levels(codec, tokenizer, settings, text=None, count=400, seed=0):
    parsed = codec.parse_turn(tokenizer(text or TURN.format(level=2, thought="x"))["input_ids"])
    engine = Engine(tokenizer, {})
    sampler = AlternativeThoughtSampler(
        settings, codec, engine.sample, lambda t: tokenizer(t)["input_ids"], 64, seed
    )
    levels = [tuple(sampler.choose_levels(parsed, f"t{n}", n % 7)) for n in range(count)]
    assert engine.requests == []
    return levels


def test_one_alternative_is_drawn_uniformly_and_repeatably(tokenizer, codec):
    drawn = draw_levels(codec, tokenizer, make_settings(alternatives="one"), seed=3)
    counts = Counter(drawn)
    assert set(counts) == {(1,), (3,), (4,)} and min(counts.values()) > 90
    assert drawn == draw_levels(codec, tokenizer, make_settings(alternatives="one"), seed=3)
    assert drawn != draw_levels(codec, tokenizer, make_settings(alternatives="one"), seed=4)


def test_turns_with_equal_keys_choose_one_level(tokenizer, codec):
    """Turns with one key choose the same level, unless it is that of their thought."""
    settings = make_settings(alternatives="one")
    chosen = {
        level: draw_levels(codec, tokenizer, settings, TURN.format(level=level, thought="x"))
        for level in (2, 3)
    }
    for first, second in zip(chosen[2], chosen[3], strict=True):
        assert first == second or first == (3,) or second == (2,)
    assert {(1,), (4,)} == set(chosen[2]) & set(chosen[3])


def test_step_fraction_draws_turns(tokenizer, codec):
    expanded = [
        levels
        for levels in draw_levels(codec, tokenizer, make_settings(step_fraction=0.25))
        if levels
    ]
    assert 60 < len(expanded) < 140 and set(expanded) == {(1, 3, 4)}
    assert not any(draw_levels(codec, tokenizer, make_settings(step_fraction=0.0)))


@pytest.mark.parametrize(
    "text", ["look", "<think>x</think><action>go</action>", "<level>2</level><think>x"]
)
def test_turn_that_cannot_be_scored_gets_no_alternatives(tokenizer, codec, text):
    assert not any(draw_levels(codec, tokenizer, make_settings(), text, count=5))


def test_prompt_holds_the_action_only_if_action_blind_is_false(tokenizer, codec):
    _, blind = sample_thoughts(tokenizer, codec, levels=[2])
    alternatives, not_blind = sample_thoughts(
        tokenizer, codec, levels=[2], settings=make_settings(action_blind=False)
    )
    assert "go to desk 1" not in tokenizer.decode(blind.requests[0][0])
    assert "go to desk 1" in tokenizer.decode(not_blind.requests[0][0])
    assert "go to desk" not in tokenizer.decode(alternatives.thoughts[0].token_ids), (
        "the scored context never holds the action"
    )


def rlvcr_config(**rlvcr):
    config = make_config(levels=True, n=2)
    get_rlvcr_settings(config.algorithm).enable = True
    for key, value in rlvcr.items():
        setattr(get_rlvcr_settings(config.algorithm), key, value)
    return config


def collect(tokenizer, config, script=None, groups=2):
    group, envs, (engine,) = make_world(tokenizer, config, script)
    collector = TrajectoryCollector(config, tokenizer)
    try:
        settings = RolloutSettings.from_config(
            config, envs.package, is_train=True, samples_alternatives=True
        )
        return collector._generate_batch(
            envs.gen_batch(1, groups), group, settings
        ).trajectories, engine
    finally:
        collector.close()


def test_thoughts_are_sampled_while_the_environment_steps(tokenizer):
    trajectories, engine = collect(tokenizer, rlvcr_config(), groups=1)
    prompts = [engine.tokenizer.decode(request.prompt_ids) for request in engine.requests]
    kinds = ["thought" if prompt.endswith("<think>") else "turn" for prompt in prompts]
    last_turn = max(i for i, kind in enumerate(kinds) if kind == "turn")
    assert kinds.index("thought") < last_turn, "alternatives do not wait for the end of the episode"
    for trajectory in trajectories:
        for turn in trajectory.turns:
            assert turn.alternatives is not None and turn.parsed is not None
            levels = {thought.level for thought in turn.alternatives.thoughts} | {turn.parsed.level}
            assert levels == {1, 2, 3, 4}
            prompt = trajectory.ledgers[turn.ledger].token_ids[: turn.start]
            request_prefixes = [
                r.prompt_ids[: len(prompt)]
                for r in engine.requests
                if len(r.prompt_ids) > len(prompt)
            ]
            assert prompt in request_prefixes


@pytest.mark.parametrize("mixed", [True, False])
def test_mixed_groups_get_alternatives(tokenizer, mixed):
    walking_script, turn_prompts = walking_policy(levels=True), []

    def script(request, prompt):
        if prompt.endswith("<think>"):
            return walking_script(request, prompt)
        turn_prompts.append(prompt)
        is_failure = mixed and len(turn_prompts) == 1
        return "look " * 40 if is_failure else walking_script(request, prompt)

    trajectories, _ = collect(tokenizer, rlvcr_config(expand="mixed_groups"), script, groups=1)
    expanded = [turn for t in trajectories for turn in t.turns if turn.alternatives is not None]
    assert bool(expanded) == mixed
    if mixed:
        parsed_turns = [turn.parsed for t in trajectories for turn in t.turns]
        readable = [
            parsed for parsed in parsed_turns if parsed is not None and parsed.failure is None
        ]
        assert len(expanded) == len(readable)
