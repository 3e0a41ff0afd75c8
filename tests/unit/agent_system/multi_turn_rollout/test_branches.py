"""Branches of plays: what they repeat, where they force a level, what is made of their returns.

The policy walks to the target and thinks at level 2. Made to think at level 1 it walks away from
the target for the rest of the play, at level 3 it walks on, at level 4 it stays for a turn.
"""

import re
from dataclasses import replace

import pytest

from agent_system.multi_turn_rollout import branches
from agent_system.multi_turn_rollout.branches import execute_alternatives, make_branch_spec
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory
from rlvcr.levels import LevelCodec
from rlvcr.research.executed import choose_executed_level
from tests.helpers.play import make_world, walk
from tests.helpers.thinking_plays import thinking_config
from tests.helpers.tiny_model import make_tiny_tokenizer

both = pytest.mark.parametrize("history", ["append", "window"])
AWAY = {"left": "right", "right": "left"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def script(_request, prompt):
    # Levels that were said: those of the instructions stand before other thoughts.
    said = re.findall(r"<level>(\d)(?:$|</level><think>(?:near|forced|$))", prompt)
    move = AWAY[walk(prompt)] if "1" in said else walk(prompt)
    forced = re.search(r"<level>\d(</level><think>)?$", prompt)
    if forced is None:
        return f"<level>2</level><think>near</think><action>{move}</action>"
    opened = "" if forced[1] else "</level><think>"
    return f"{opened}forced</think><action>{'stay' if said[-1] == '4' else move}</action>"


class World:
    """One batch of plays, and the means to play more jobs."""

    def __init__(self, tokenizer, history, **rlvcr):
        self.config = thinking_config(history, n=1, **rlvcr)
        self.config.env.max_steps = 12
        self.config.env.history_length = 12
        self.group, self.envs, self.engines = make_world(tokenizer, self.config, script)
        self.collector = TrajectoryCollector(self.config, tokenizer)
        self.settings = RolloutSettings.from_config(
            self.config, self.collector.package, is_train=True
        )
        self.played = self.collector._generate_batch(
            self.envs.gen_batch(1, 3), self.group, self.settings
        ).trajectories

    def play(self, jobs):
        return self.collector._generate_specs(jobs, self.group, self.settings)


@pytest.fixture
def world(tokenizer, request):
    made = World(tokenizer, request.param)
    yield made
    made.collector.close()


both_worlds = pytest.mark.parametrize("world", ["append", "window"], indirect=True)


@both_worlds
def test_a_branch_sees_what_the_play_saw_and_begins_with_the_level(world, tokenizer):
    whole = world.played[0]
    turn = whole.turns[2]
    asked_before = len(world.engines[0].requests)
    (branch,) = world.play([replace(make_branch_spec(whole, turn, 3), index=0)]).trajectories
    first = world.engines[0].requests[asked_before]
    prompt = whole.ledgers[turn.ledger].token_ids[: turn.start]
    prefix = LevelCodec(tokenizer).prefix_ids[3]
    assert first.prompt_ids == prompt + prefix
    assert first.max_tokens == world.settings.max_turn_tokens - len(prefix)
    assert [played.action for played in branch.turns[:2]] == [t.action for t in whole.turns[:2]]
    assert [played.num_forced for played in branch.turns[:3]] == [0, 0, len(prefix)]
    assert branch.turns[2].parsed.level == 3
    assert (branch.aborted, branch.start_state) == (None, whole.start_state)


@both_worlds
def test_what_is_repeated_is_not_sampled(world):
    whole = world.played[0]
    before = len(world.engines[0].requests)
    branch = world.play(
        [replace(make_branch_spec(whole, whole.turns[1], 3), index=0)]
    ).trajectories[0]
    assert len(world.engines[0].requests) - before == len(branch.turns) - 1
    repeated = branch.turns[0]
    ids = branch.ledgers[repeated.ledger].token_ids[repeated.start : repeated.end]
    own = whole.turns[0]
    assert ids == whole.ledgers[own.ledger].token_ids[own.start : own.end]


@both_worlds
@pytest.mark.parametrize(("step", "other"), [(0, 0), (2, 0), (2, 1), (2, 2)])
def test_a_state_that_is_not_found_again_breaks_the_branch(world, step, other):
    whole = world.played[0]
    job = make_branch_spec(whole, whole.turns[step], 3)
    # The state in which the level is forced is one of them.
    assert len(job.expected_observations) == step + 1 == len(job.replay) + 1
    seen = [
        *job.expected_observations[:other],
        "You are elsewhere.",
        *job.expected_observations[other + 1 :],
    ]
    (branch,) = world.play([replace(job, index=0, expected_observations=tuple(seen))]).trajectories
    assert branch.aborted == "replay"
    assert f"turn {other}" in branch.abort_detail and "elsewhere" in branch.abort_detail
    assert len(branch.turns) == other


def test_a_branch_of_another_task_breaks_before_its_first_turn(world_append):
    one, two = world_append.played[:2]
    assert one.turns[0].observation != two.turns[0].observation
    job = replace(
        make_branch_spec(one, one.turns[0], 3),
        index=0,
        task=two.spec.task,
        env_seed=two.spec.env_seed,
    )
    (branch,) = world_append.play([job]).trajectories
    assert (branch.aborted, branch.turns) == ("replay", [])


def test_branches_of_a_step_have_names_and_draw_alike_at_every_level(world_append):
    whole = world_append.played[0]
    turn = whole.turns[1]
    one, two = make_branch_spec(whole, turn, 1), make_branch_spec(whole, turn, 2)
    assert one.traj_uid == two.traj_uid == f"{whole.spec.traj_uid}@1"
    assert make_branch_spec(whole, turn, 1, "#7").traj_uid == f"{whole.spec.traj_uid}@1#7"
    assert (one.uid, one.env_seed, one.task) == (
        whole.spec.uid,
        whole.spec.env_seed,
        whole.spec.task,
    )


@pytest.fixture
def world_append(tokenizer):
    made = World(tokenizer, "append", executed_share=1.0, cost_coef=0.0)
    yield made
    made.collector.close()


def test_the_difference_of_returns_is_noted_at_every_step(world_append):
    rlvcr = world_append.config.algorithm.rlvcr
    found = execute_alternatives(world_append.played, world_append.play, rlvcr, seed=5)
    expected = {1: 0.75, 3: 0.0, 4: 0.0}  # of a play that is won, unless it walks away
    tried = []
    for trajectory in world_append.played:
        assert trajectory.won
        for turn in trajectory.turns:
            level = choose_executed_level(turn.parsed, 1.0, 5, trajectory.spec.traj_uid, turn.step)
            assert level is not None
            tried.append(level)
            assert turn.executed_credit == pytest.approx(expected[level] * trajectory.reward), level
    assert set(tried) == {1, 3, 4}
    assert found["rlvcr/executed_dropped"] == 0.0
    assert found["rlvcr/executed_tokens"] > 0


def test_a_branch_differs_from_its_turn_by_the_level_digit_alone(world_append, tokenizer):
    asked_before = len(world_append.engines[0].requests)
    jobs = []

    def play(asked):
        jobs.extend(asked)
        return world_append.play(asked)

    execute_alternatives(world_append.played, play, world_append.config.algorithm.rlvcr, seed=5)
    of_play = {t.spec.traj_uid: t for t in world_append.played}
    codec = LevelCodec(tokenizer)
    prompts = [r.prompt_ids for r in world_append.engines[0].requests[asked_before:]]
    for job in jobs:
        uid, _, step = job.traj_uid.partition("@")
        turn = of_play[uid].turns[int(step)]
        ids = of_play[uid].ledgers[turn.ledger].token_ids
        digit = turn.start + turn.parsed.level_span[0]
        assert [*ids[:digit], codec.digit_ids[job.forced_level - 1]] in prompts


def test_a_branch_that_broke_says_nothing(world_append, monkeypatch):
    rlvcr = world_append.config.algorithm.rlvcr

    def broken(jobs):
        played = world_append.play(jobs)
        for trajectory in played.trajectories:
            trajectory.abort("env_dead", "gone")
        return played

    found = execute_alternatives(world_append.played, broken, rlvcr, seed=5)
    assert found["rlvcr/executed_dropped"] == 1.0
    assert {turn.executed_credit for t in world_append.played for turn in t.turns} == {None}


def test_a_share_of_nothing_plays_nothing(world_append):
    rlvcr = world_append.config.algorithm.rlvcr
    rlvcr.executed_share = 0.0

    def never(_jobs):
        raise AssertionError("nothing was to be played")

    assert execute_alternatives(world_append.played, never, rlvcr, seed=5) == {
        "rlvcr/executed_dropped": 0.0,
        "rlvcr/executed_tokens": 0.0,
    }


def test_a_play_that_never_came_to_the_step_has_no_value_there(world_append):
    rlvcr = world_append.config.algorithm.rlvcr
    short = Trajectory(RolloutSpec(0, {}, "u", "u/0", 0, 0))
    assert branches.priced_return_at(short, 0, rlvcr) is None
    whole = world_append.played[0]
    assert branches.priced_return_at(whole, 0, rlvcr) == whole.reward
    assert branches.priced_return_at(whole, len(whole.turns), rlvcr) is None
