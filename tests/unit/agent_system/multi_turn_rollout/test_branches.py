"""Branches of trajectories: the replayed turns, the forced level and the differences of returns.

The policy walks to the target and thinks at level 2. After a forced level 1 it walks away from the
target for the rest of the episode, after level 3 it continues, at level 4 it stays for a turn.
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
from tests.helpers.number_line_world import make_world, walk
from tests.helpers.thinking_trajectories import thinking_config
from tests.helpers.tiny_model import make_tiny_tokenizer

both = pytest.mark.parametrize("history", ["append", "window"])
AWAY = {"left": "right", "right": "left"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def script(_request, prompt):
    # Levels of the turns only: those of the instructions stand before other thoughts.
    levels = re.findall(r"<level>(\d)(?:$|</level><think>(?:near|forced|$))", prompt)
    move = AWAY[walk(prompt)] if "1" in levels else walk(prompt)
    forced = re.search(r"<level>\d(</level><think>)?$", prompt)
    if forced is None:
        return f"<level>2</level><think>near</think><action>{move}</action>"
    opened = "" if forced[1] else "</level><think>"
    return f"{opened}forced</think><action>{'stay' if levels[-1] == '4' else move}</action>"


class World:
    """One batch of trajectories, and a method that generates more."""

    def __init__(self, tokenizer, history, **rlvcr):
        self.config = thinking_config(history, n=1, **rlvcr)
        self.config.env.max_steps = 12
        self.config.env.history_length = 12
        self.group, self.envs, self.engines = make_world(tokenizer, self.config, script)
        self.collector = TrajectoryCollector(self.config, tokenizer)
        self.settings = RolloutSettings.from_config(
            self.config, self.collector.package, is_train=True
        )
        self.trajectories = self.collector._generate_batch(
            self.envs.gen_batch(1, 3), self.group, self.settings
        ).trajectories

    def generate(self, specs):
        return self.collector._generate_specs(specs, self.group, self.settings)


@pytest.fixture
def world(tokenizer, request):
    new_world = World(tokenizer, request.param)
    yield new_world
    new_world.collector.close()


both_worlds = pytest.mark.parametrize("world", ["append", "window"], indirect=True)


@both_worlds
def test_branch_replays_turns_and_begins_with_the_level(world, tokenizer):
    whole = world.trajectories[0]
    turn = whole.turns[2]
    num_requests = len(world.engines[0].requests)
    (branch,) = world.generate([replace(make_branch_spec(whole, turn, 3), index=0)]).trajectories
    first = world.engines[0].requests[num_requests]
    prompt = whole.ledgers[turn.ledger].token_ids[: turn.start]
    prefix = LevelCodec(tokenizer).prefix_ids[3]
    assert first.prompt_ids == prompt + prefix
    assert first.max_tokens == world.settings.max_turn_tokens - len(prefix)
    assert [replayed.action for replayed in branch.turns[:2]] == [t.action for t in whole.turns[:2]]
    assert [replayed.num_forced for replayed in branch.turns[:3]] == [0, 0, len(prefix)]
    assert branch.turns[2].parsed.level == 3
    assert (branch.aborted, branch.start_state) == (None, whole.start_state)


@both_worlds
def test_replayed_turns_are_not_sampled(world):
    whole = world.trajectories[0]
    num_requests = len(world.engines[0].requests)
    branch = world.generate(
        [replace(make_branch_spec(whole, whole.turns[1], 3), index=0)]
    ).trajectories[0]
    assert len(world.engines[0].requests) - num_requests == len(branch.turns) - 1
    replayed = branch.turns[0]
    ids = branch.ledgers[replayed.ledger].token_ids[replayed.start : replayed.end]
    original = whole.turns[0]
    assert ids == whole.ledgers[original.ledger].token_ids[original.start : original.end]


@both_worlds
@pytest.mark.parametrize(("step", "changed"), [(0, 0), (2, 0), (2, 1), (2, 2)])
def test_branch_with_a_different_state_is_aborted(world, step, changed):
    whole = world.trajectories[0]
    spec = make_branch_spec(whole, whole.turns[step], 3)
    # The observations include the state in which the level is forced.
    assert len(spec.expected_observations) == step + 1 == len(spec.replayed_turns) + 1
    observations = [
        *spec.expected_observations[:changed],
        "You are elsewhere.",
        *spec.expected_observations[changed + 1 :],
    ]
    (branch,) = world.generate(
        [replace(spec, index=0, expected_observations=tuple(observations))]
    ).trajectories
    assert branch.aborted == "replay"
    assert f"turn {changed}" in branch.abort_detail and "elsewhere" in branch.abort_detail
    assert len(branch.turns) == changed


def test_branch_of_another_task_is_aborted_before_its_first_turn(world_append):
    one, two = world_append.trajectories[:2]
    assert one.turns[0].observation != two.turns[0].observation
    spec = replace(
        make_branch_spec(one, one.turns[0], 3),
        index=0,
        task=two.spec.task,
        env_seed=two.spec.env_seed,
    )
    (branch,) = world_append.generate([spec]).trajectories
    assert (branch.aborted, branch.turns) == ("replay", [])


def test_branches_of_a_turn_share_their_uid_and_seed(world_append):
    whole = world_append.trajectories[0]
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
    new_world = World(tokenizer, "append", executed_share=1.0, cost_coef=0.0)
    yield new_world
    new_world.collector.close()


def test_executed_credit_of_every_turn(world_append):
    rlvcr = world_append.config.algorithm.rlvcr
    metrics = execute_alternatives(world_append.trajectories, world_append.generate, rlvcr, seed=5)
    expected = {1: 0.75, 3: 0.0, 4: 0.0}  # only level 1, which walks away, loses the success
    levels = []
    for trajectory in world_append.trajectories:
        assert trajectory.won
        for turn in trajectory.turns:
            level = choose_executed_level(turn.parsed, 1.0, 5, trajectory.spec.traj_uid, turn.step)
            assert level is not None
            levels.append(level)
            assert turn.executed_credit == pytest.approx(expected[level] * trajectory.reward), level
    assert set(levels) == {1, 3, 4}
    assert metrics["rlvcr/executed_dropped"] == 0.0
    assert metrics["rlvcr/executed_tokens"] > 0


def test_branch_differs_from_its_turn_only_in_the_digit(world_append, tokenizer):
    num_requests = len(world_append.engines[0].requests)
    specs = []

    def generate(new_specs):
        specs.extend(new_specs)
        return world_append.generate(new_specs)

    execute_alternatives(
        world_append.trajectories, generate, world_append.config.algorithm.rlvcr, seed=5
    )
    by_uid = {t.spec.traj_uid: t for t in world_append.trajectories}
    codec = LevelCodec(tokenizer)
    prompts = [r.prompt_ids for r in world_append.engines[0].requests[num_requests:]]
    for spec in specs:
        uid, _, step = spec.traj_uid.partition("@")
        turn = by_uid[uid].turns[int(step)]
        ids = by_uid[uid].ledgers[turn.ledger].token_ids
        digit = turn.start + turn.parsed.level_span[0]
        assert [*ids[:digit], codec.digit_ids[spec.forced_level - 1]] in prompts


def test_failed_branch_gives_no_credit(world_append, monkeypatch):
    rlvcr = world_append.config.algorithm.rlvcr

    def generate_failed(specs):
        result = world_append.generate(specs)
        for trajectory in result.trajectories:
            trajectory.abort("env_dead", "gone")
        return result

    metrics = execute_alternatives(world_append.trajectories, generate_failed, rlvcr, seed=5)
    assert metrics["rlvcr/executed_dropped"] == 1.0
    assert {turn.executed_credit for t in world_append.trajectories for turn in t.turns} == {None}


def test_executed_share_of_zero_generates_nothing(world_append):
    rlvcr = world_append.config.algorithm.rlvcr
    rlvcr.executed_share = 0.0

    def generate(_specs):
        raise AssertionError("no branch was expected")

    assert execute_alternatives(world_append.trajectories, generate, rlvcr, seed=5) == {
        "rlvcr/executed_dropped": 0.0,
        "rlvcr/executed_tokens": 0.0,
    }


def test_turn_after_the_end_has_no_priced_return(world_append):
    rlvcr = world_append.config.algorithm.rlvcr
    short = Trajectory(RolloutSpec(0, {}, "u", "u/0", 0, 0))
    assert branches.priced_return_at(short, 0, rlvcr) is None
    whole = world_append.trajectories[0]
    assert branches.priced_return_at(whole, 0, rlvcr) == whole.reward
    assert branches.priced_return_at(whole, len(whole.turns), rlvcr) is None
