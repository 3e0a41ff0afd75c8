"""The collector worker: what it hands to pool and engine, and what it says of a call."""

import asyncio
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agent_system.environments.env_registry import env_settings
from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout import collector_worker
from agent_system.multi_turn_rollout.agent_trajectory_generator import AgentTrajectoryGenerator
from agent_system.multi_turn_rollout.collector_worker import CollectedTrajectories, CollectorWorker
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory, make_rollout_specs
from rlvcr.alternatives import AlternativeSettings
from tests.helpers.play import make_config, walking_policy
from tests.helpers.refusals import mentions
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.utils.sampling import StopReason


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


class World:
    """One worker in this process, with a loop of its own."""

    def __init__(self, tokenizer, script=None, **options: Any) -> None:
        self.config = make_config(n=2)
        self.engine = ScriptedEngine(tokenizer, script or walking_policy())
        self.runner = asyncio.Runner()
        self.worker = CollectorWorker(self.config.env, tokenizer, [self.engine], **options)
        self.settings = RolloutSettings.from_config(
            self.config, collector_worker.get_package("number_line"), is_train=True
        )
        self.jobs = make_rollout_specs(make_envs(self.config)[0].gen_batch(1, 3))

    def play(self, jobs=None) -> CollectedTrajectories:
        return self.runner.run(self.worker.collect(jobs or self.jobs, self.settings))

    def close(self) -> None:
        self.runner.run(self.worker.close())
        self.runner.close()


@pytest.fixture
def world(tokenizer):
    made = World(tokenizer, name="collector-7")
    yield made
    made.close()


def trajectory(index: int) -> Trajectory:
    return Trajectory(RolloutSpec(index, {}, "u", f"u/{index}", index, 0))


def test_what_was_played_afterwards_is_added():
    first = CollectedTrajectories([trajectory(0)], 1.0, 0.25, 2)
    first.add(CollectedTrajectories([trajectory(1), trajectory(2)], 3.0, 0.5, 5))
    assert [t.spec.index for t in first.trajectories] == [0, 1, 2]
    assert (first.rollout_s, first.thoughts_s, first.env_restarts) == (4.0, 0.75, 7)
    assert CollectedTrajectories([], 0.0, 0.0).env_restarts == 0


def test_the_pool_gets_settings_sizes_and_deadlines(tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr(collector_worker, "EnvironmentPool", lambda *words: asked.append(words))
    config = make_config(num_workers=3, envs_per_worker=5, reset_timeout_s=7.0, step_timeout_s=2.0)
    CollectorWorker(config.env, tokenizer, [ScriptedEngine(tokenizer, walking_policy())])
    assert asked == [("number_line", env_settings(config.env), 3, 5, 7.0, 2.0)]


def test_a_library_of_the_users_own_is_imported_first(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "library_of_this_test.py").write_text("imported = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = ScriptedEngine(tokenizer, walking_policy())
    CollectorWorker(make_config().env, tokenizer, [engine], external_lib="library_of_this_test")
    assert sys.modules.pop("library_of_this_test").imported
    with pytest.raises(ModuleNotFoundError, check=mentions("no_such_library")):
        CollectorWorker(make_config().env, tokenizer, [engine], external_lib="no_such_library")


def test_the_engine_knows_who_asks(world):
    world.play()
    assert {request.client for request in world.engine.requests} == {"collector-7"}


def test_template_arguments_reach_the_chat_template(tokenizer, monkeypatch):
    told = []
    bridge = collector_worker.ChatBridge
    monkeypatch.setattr(
        collector_worker, "ChatBridge", lambda t, kwargs: told.append(kwargs) or bridge(t, kwargs)
    )
    engine = ScriptedEngine(tokenizer, walking_policy())
    arguments = {"enable_thinking": False}
    CollectorWorker(make_config().env, tokenizer, [engine], template_kwargs=arguments)
    assert told == [arguments]


def test_trajectories_come_back_in_the_order_of_their_jobs(world):
    jobs = [world.jobs[place] for place in (4, 0, 5, 2)]
    played = world.play(jobs)
    assert [t.spec for t in played.trajectories] == jobs
    assert played.env_restarts == 0


def test_the_pool_is_started_once(world, monkeypatch):
    started = []
    start = world.worker._pool.start

    async def counted() -> None:
        started.append(True)
        await asyncio.sleep(0.02)
        await start()

    monkeypatch.setattr(world.worker._pool, "start", counted)

    async def twice() -> list[CollectedTrajectories]:
        calls = (world.worker.collect(world.jobs[:2], world.settings) for _ in range(2))
        return await asyncio.gather(*calls)

    both = world.runner.run(twice())
    world.play()
    assert started == [True]
    assert [len(played.trajectories) for played in both] == [2, 2]


def test_a_worker_that_never_played_closes_its_engine_and_no_pool(tokenizer, monkeypatch):
    made = World(tokenizer)
    closed = []

    async def close() -> None:
        closed.append("pool")

    monkeypatch.setattr(made.worker._pool, "close", close)
    made.close()
    assert closed == []


def test_a_worker_that_played_closes_its_pool(world, monkeypatch):
    world.play()
    closed = []
    close = world.worker._pool.close

    async def noted() -> None:
        closed.append("pool")
        await close()

    monkeypatch.setattr(world.worker._pool, "close", noted)
    world.runner.run(world.worker.close())
    assert closed == ["pool"]


def test_times_are_of_this_call(world):
    began = time.perf_counter()
    played = world.play()
    took = time.perf_counter() - began
    assert 0 < played.rollout_s < took
    assert 0 <= played.thoughts_s < took
    assert played.rollout_s + played.thoughts_s <= took


def test_restarts_are_those_of_this_call(world):
    world.worker._pool.counts["restarts"] = 5
    assert world.play().env_restarts == 0
    play_group = world.worker._generate_group

    async def with_a_restart(context, jobs):
        world.worker._pool.counts["restarts"] += 1
        return await play_group(context, jobs)

    world.worker._generate_group = with_a_restart
    assert world.play().env_restarts == 3, "one for each of three groups"


def test_nothing_to_play_takes_no_time(world):
    played = world.runner.run(world.worker.collect([], world.settings))
    assert played.trajectories == [] and played.rollout_s == 0.0


def test_a_play_that_fails_ends_the_call(tokenizer):
    made = World(tokenizer, script=lambda _request, _prompt: StopReason.ABORT)
    played = made.play()
    assert {t.aborted for t in played.trajectories} == {"engine"}
    made.close()


class Thinker:
    """Notes for whose turns other thoughts are asked."""

    def __init__(self, monkeypatch, returns, broken=()) -> None:
        self.expanded: list[tuple[str, int]] = []
        monkeypatch.setattr(collector_worker, "TrajectoryGenerator", self.player)
        monkeypatch.setattr(collector_worker, "generate_alternative_thinking_levels", self.expand)
        self.returns = returns
        self.broken = broken

    def player(self, _context, job):
        played = trajectory(job.index)
        played.reward = self.returns[job.index]
        turns: Any = [SimpleNamespace(step=0), SimpleNamespace(step=1)]
        played.turns = turns
        if job.index in self.broken:
            played.abort("env_dead", "gone")

        async def play(_pool):
            return played

        return SimpleNamespace(generate_trajectory=play)

    async def expand(self, context, played, turn) -> None:
        assert context is not None
        self.expanded.append((played.spec.index, turn.step))


EVERY_TURN = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("expand", "returns", "expanded"),
    [
        ("mixed_groups", (0.0, 1.0), EVERY_TURN),
        ("mixed_groups", (1.0, 1.0), []),
        # Every player has asked for its own thoughts already.
        ("all", (0.0, 1.0), []),
    ],
)
def test_thoughts_are_asked_for_where_returns_differ(world, monkeypatch, expand, returns, expanded):
    thinker = Thinker(monkeypatch, returns)
    settings = SimpleNamespace(alternatives=SimpleNamespace(expand=expand))
    jobs = [RolloutSpec(index, {}, "u", f"u/{index}", index, 0) for index in (0, 1)]
    group = world.runner.run(world.worker._generate_group(SimpleNamespace(settings=settings), jobs))
    assert thinker.expanded == expanded
    assert [t.spec.index for t in group] == [0, 1]


@pytest.mark.parametrize(("on_abort", "expanded"), [("drop_group", []), ("keep_rest", EVERY_TURN)])
def test_thoughts_are_asked_for_in_what_is_trained_on(world, monkeypatch, on_abort, expanded):
    thinker = Thinker(monkeypatch, (0.0, 1.0, 0.5), broken=(2,))
    world.config.env.on_abort = on_abort
    settings = SimpleNamespace(alternatives=SimpleNamespace(expand="mixed_groups"))
    jobs = [RolloutSpec(index, {}, "u", f"u/{index}", index, 0) for index in (0, 1, 2)]
    world.runner.run(world.worker._generate_group(SimpleNamespace(settings=settings), jobs))
    assert thinker.expanded == expanded


def test_without_alternatives_nothing_is_asked(world, monkeypatch):
    thinker = Thinker(monkeypatch, (0.0, 1.0))
    settings = SimpleNamespace(alternatives=None)
    jobs = [RolloutSpec(index, {}, "u", f"u/{index}", index, 0) for index in (0, 1)]
    world.runner.run(world.worker._generate_group(SimpleNamespace(settings=settings), jobs))
    assert thinker.expanded == []


def test_a_collector_without_a_name_is_the_first(tokenizer):
    made = World(tokenizer)
    made.play()
    assert {request.client for request in made.engine.requests} == {"collector-0"}
    made.close()


@pytest.mark.parametrize("levels", [True, False])
def test_plays_share_a_codec_and_who_thinks_where_levels_are_asked_for(world, levels):
    asked = AlternativeSettings(which="one") if levels else None
    settings = replace(world.settings, requests_levels=levels, alternatives=asked)
    context = world.worker._make_context(settings)
    assert (context.codec is not None) == levels == (context.alternatives is not None)
    if context.alternatives is not None:
        assert context.alternatives.settings == asked
        assert context.alternatives._encode == world.worker._bridge.encode_text
    # Levels without other thoughts.
    plain = world.worker._make_context(replace(world.settings, requests_levels=True))
    assert plain.alternatives is None and plain.codec is not None


def test_ended_plays_are_counted_over_all_calls(world):
    def over() -> int:
        return world.runner.run(world.worker.count_finished())

    assert over() == 0
    world.play(world.jobs[:2])
    assert over() == 2
    world.play(world.jobs[:3])
    assert over() == 5


def test_restarts_while_groups_are_carried_are_those_of_the_call(world, monkeypatch):
    world.worker._pool.counts["restarts"] = 5
    take = world.worker._in_flight.take_finished

    async def with_a_restart(keep):
        world.worker._pool.counts["restarts"] += 2
        return await take(keep)

    monkeypatch.setattr(world.worker._in_flight, "take_finished", with_a_restart)
    played = world.runner.run(world.worker.collect_ready(world.jobs, world.settings, 0))
    assert played.env_restarts == 2 and len(played.trajectories) == len(world.jobs)
    assert 0.0 < played.rollout_s < 60.0


def test_an_agent_of_the_users_own_plays_through_the_endpoint(world, monkeypatch):
    context = world.worker._make_context(world.settings)
    package: Any = SimpleNamespace(package_for_task=lambda _: SimpleNamespace(runs_agent=True))
    monkeypatch.setattr(world.worker, "_package", package)
    player: Any = world.worker._make_generator(context, world.jobs[1])
    assert isinstance(player, AgentTrajectoryGenerator)
    assert player.context is context and player.trajectory.spec is world.jobs[1]
    assert player._endpoint is world.worker._endpoint
