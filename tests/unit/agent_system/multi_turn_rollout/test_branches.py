"""Branches of trajectories: the replayed turns and the forced level.

The policy walks to the target and thinks at level 2.
"""

import re
from dataclasses import replace

import pytest

from agent_system.multi_turn_rollout.audit_rollouts import make_branch_spec
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from rlvcr.levels import LevelCodec
from tests.helpers.number_line_world import make_world, walk
from tests.helpers.thinking_trajectories import thinking_config
from tests.helpers.tiny_model import make_tiny_tokenizer

both = pytest.mark.parametrize("history", ["append", "window"])


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def script(_request, prompt):
    if re.search(r"<level>\d</level><think>$", prompt) is None:
        return f"<level>2</level><think>near</think><action>{walk(prompt)}</action>"
    return f"forced</think><action>{walk(prompt)}</action>"


class World:
    """One batch of trajectories, and a method that generates more."""

    def __init__(self, tokenizer, history):
        self.config = thinking_config(history, n=1)
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
    assert [replayed.num_forced_tokens for replayed in branch.turns[:3]] == [0, 0, len(prefix)]
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
    new_world = World(tokenizer, "append")
    yield new_world
    new_world.collector.close()
