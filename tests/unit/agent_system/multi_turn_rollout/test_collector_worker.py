"""The collector worker: the arguments of pool and engine, and the result of a call."""

import asyncio
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agent_system.environments.env_registry import read_env_settings
from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout import collector_worker
from agent_system.multi_turn_rollout.agent_trajectory_generator import UserAgentTrajectoryGenerator
from agent_system.multi_turn_rollout.collector_worker import CollectedTrajectories, CollectorWorker
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory, make_rollout_specs
from rlvcr.settings import RLVCRSettings
from tests.helpers.number_line_world import make_config, walking_policy
from tests.helpers.refusals import mentions
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.utils.sampling import StopReason


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


class World:
    """One worker in this process, with its own event loop."""

    def __init__(self, tokenizer, script=None, **options: Any) -> None:
        self.config = make_config(n=2)
        self.engine = ScriptedEngine(tokenizer, script or walking_policy())
        self.runner = asyncio.Runner()
        self.worker = CollectorWorker(self.config.env, tokenizer, [self.engine], **options)
        self.settings = RolloutSettings.from_config(
            self.config, collector_worker.get_package("number_line"), is_train=True
        )
        self.specs = make_rollout_specs(make_envs(self.config)[0].gen_batch(1, 3))

    def generate(self, specs=None) -> CollectedTrajectories:
        return self.runner.run(self.worker.collect(specs or self.specs, self.settings))

    def close(self) -> None:
        self.runner.run(self.worker.close())
        self.runner.close()


@pytest.fixture
def world(tokenizer):
    new_world = World(tokenizer, name="collector-7")
    yield new_world
    new_world.close()


def trajectory(index: int) -> Trajectory:
    return Trajectory(RolloutSpec(index, {}, "u", f"u/{index}", 0))


def test_add_joins_trajectories_and_times():
    first = CollectedTrajectories([trajectory(0)], 1.0, 0.25, 2)
    first.add(CollectedTrajectories([trajectory(1), trajectory(2)], 3.0, 0.5, 5))
    assert [t.spec.index for t in first.trajectories] == [0, 1, 2]
    assert (first.rollout_s, first.thoughts_s, first.env_restarts) == (4.0, 0.75, 7)
    assert CollectedTrajectories([], 0.0, 0.0).env_restarts == 0


def test_pool_gets_settings_sizes_and_deadlines(tokenizer, monkeypatch):
    calls = []
    monkeypatch.setattr(
        collector_worker, "EnvironmentPool", lambda *arguments: calls.append(arguments)
    )
    config = make_config(num_workers=3, envs_per_worker=5, reset_timeout_s=7.0, step_timeout_s=2.0)
    CollectorWorker(config.env, tokenizer, [ScriptedEngine(tokenizer, walking_policy())])
    assert calls == [("number_line", read_env_settings(config.env), 3, 5, 7.0, 2.0)]


def test_external_lib_is_imported(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "library_of_this_test.py").write_text("imported = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = ScriptedEngine(tokenizer, walking_policy())
    CollectorWorker(make_config().env, tokenizer, [engine], external_lib="library_of_this_test")
    assert sys.modules.pop("library_of_this_test").imported
    with pytest.raises(ModuleNotFoundError, check=mentions("no_such_library")):
        CollectorWorker(make_config().env, tokenizer, [engine], external_lib="no_such_library")


def test_requests_name_the_collector(world):
    world.generate()
    assert {request.client for request in world.engine.requests} == {"collector-7"}


def test_template_arguments_reach_the_chat_template(tokenizer, monkeypatch):
    calls = []
    bridge = collector_worker.ChatBridge
    monkeypatch.setattr(
        collector_worker, "ChatBridge", lambda t, kwargs: calls.append(kwargs) or bridge(t, kwargs)
    )
    engine = ScriptedEngine(tokenizer, walking_policy())
    arguments = {"enable_thinking": False}
    CollectorWorker(make_config().env, tokenizer, [engine], template_kwargs=arguments)
    assert calls == [arguments]


def test_trajectories_are_in_the_order_of_their_specs(world):
    specs = [world.specs[index] for index in (4, 0, 5, 2)]
    result = world.generate(specs)
    assert [t.spec for t in result.trajectories] == specs
    assert result.env_restarts == 0


def test_pool_is_started_once(world, monkeypatch):
    started = []
    start = world.worker._pool.start

    async def start_counted() -> None:
        started.append(True)
        await asyncio.sleep(0.02)
        await start()

    monkeypatch.setattr(world.worker._pool, "start", start_counted)

    async def collect_twice() -> list[CollectedTrajectories]:
        calls = (world.worker.collect(world.specs[:2], world.settings) for _ in range(2))
        return await asyncio.gather(*calls)

    results = world.runner.run(collect_twice())
    world.generate()
    assert started == [True]
    assert [len(result.trajectories) for result in results] == [2, 2]


def test_unused_worker_does_not_close_its_pool(tokenizer, monkeypatch):
    new_world = World(tokenizer)
    closed = []

    async def close() -> None:
        closed.append("pool")

    monkeypatch.setattr(new_world.worker._pool, "close", close)
    new_world.close()
    assert closed == []


def test_used_worker_closes_its_pool(world, monkeypatch):
    world.generate()
    closed = []
    close = world.worker._pool.close

    async def close_recorded() -> None:
        closed.append("pool")
        await close()

    monkeypatch.setattr(world.worker._pool, "close", close_recorded)
    world.runner.run(world.worker.close())
    assert closed == ["pool"]


def test_times_are_those_of_the_call(world):
    start = time.perf_counter()
    result = world.generate()
    elapsed_s = time.perf_counter() - start
    assert 0 < result.rollout_s < elapsed_s
    assert 0 <= result.thoughts_s < elapsed_s
    assert result.rollout_s + result.thoughts_s <= elapsed_s


def test_env_restarts_are_those_of_the_call(world):
    world.worker._pool.counts["restarts"] = 5
    assert world.generate().env_restarts == 0
    generate_group = world.worker._generate_group

    async def generate_with_a_restart(context, specs):
        world.worker._pool.counts["restarts"] += 1
        return await generate_group(context, specs)

    world.worker._generate_group = generate_with_a_restart
    assert world.generate().env_restarts == 3, "one for each of three groups"


def test_collecting_no_specs_takes_no_time(world):
    result = world.runner.run(world.worker.collect([], world.settings))
    assert result.trajectories == [] and result.rollout_s == 0.0


def test_aborted_requests_abort_every_trajectory(tokenizer):
    new_world = World(tokenizer, script=lambda _request, _prompt: StopReason.ABORT)
    result = new_world.generate()
    assert {t.aborted for t in result.trajectories} == {"engine"}
    new_world.close()


class FakeGeneration:
    """Fake trajectories with given returns, and a record of the turns that get alternatives."""

    def __init__(self, monkeypatch, returns, failed=()) -> None:
        self.expanded: list[tuple[str, int]] = []
        monkeypatch.setattr(collector_worker, "TrajectoryGenerator", self.make_generator)
        monkeypatch.setattr(
            collector_worker, "sample_alternative_thoughts_of_group", self.record_trajectories
        )
        self.returns = returns
        self.failed = failed

    def make_generator(self, _context, spec):
        new_trajectory = trajectory(spec.index)
        new_trajectory.reward = self.returns[spec.index]
        new_trajectory.won = new_trajectory.reward == 1.0
        turns: Any = [SimpleNamespace(step=0), SimpleNamespace(step=1)]
        new_trajectory.turns = turns
        if spec.index in self.failed:
            new_trajectory.abort("env_dead", "gone")

        async def generate(_pool):
            return new_trajectory

        return SimpleNamespace(generate_trajectory=generate)

    async def record_trajectories(self, context, trajectories) -> None:
        assert context is not None
        self.expanded += [(t.spec.index, turn.step) for t in trajectories for turn in t.turns]


EVERY_TURN = [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("expand", "returns", "expanded"),
    [
        ("mixed_groups", (0.0, 1.0), EVERY_TURN),
        ("mixed_groups", (1.0, 1.0), []),
        # The generators have already sampled the alternatives.
        ("all", (0.0, 1.0), []),
        ("successes", (0.0, 1.0), EVERY_TURN[2:]),
        ("successes", (1.0, 1.0), EVERY_TURN),
    ],
)
def test_groups_get_alternatives_after_their_rollout(world, monkeypatch, expand, returns, expanded):
    generation = FakeGeneration(monkeypatch, returns)
    settings = SimpleNamespace(alternatives_settings=RLVCRSettings(expand=expand))
    specs = [RolloutSpec(index, {}, "u", f"u/{index}", 0) for index in (0, 1)]
    group = world.runner.run(
        world.worker._generate_group(SimpleNamespace(settings=settings), specs)
    )
    assert generation.expanded == expanded
    assert [t.spec.index for t in group] == [0, 1]


@pytest.mark.parametrize(("on_abort", "expanded"), [("drop_group", []), ("keep_rest", EVERY_TURN)])
def test_only_trained_groups_get_alternatives(world, monkeypatch, on_abort, expanded):
    generation = FakeGeneration(monkeypatch, (0.0, 1.0, 0.5), failed=(2,))
    world.config.env.on_abort = on_abort
    settings = SimpleNamespace(alternatives_settings=RLVCRSettings(expand="mixed_groups"))
    specs = [RolloutSpec(index, {}, "u", f"u/{index}", 0) for index in (0, 1, 2)]
    world.runner.run(world.worker._generate_group(SimpleNamespace(settings=settings), specs))
    assert generation.expanded == expanded


def test_no_turn_gets_alternatives_if_they_are_off(world, monkeypatch):
    generation = FakeGeneration(monkeypatch, (0.0, 1.0))
    settings = SimpleNamespace(alternatives_settings=None)
    specs = [RolloutSpec(index, {}, "u", f"u/{index}", 0) for index in (0, 1)]
    world.runner.run(world.worker._generate_group(SimpleNamespace(settings=settings), specs))
    assert generation.expanded == []


def test_default_collector_name_is_the_first(tokenizer):
    new_world = World(tokenizer)
    new_world.generate()
    assert {request.client for request in new_world.engine.requests} == {"collector-0"}
    new_world.close()


@pytest.mark.parametrize("levels", [True, False])
def test_context_has_codec_and_sampler_if_levels_are_on(world, levels):
    alternatives = RLVCRSettings(alternatives="one", max_alternative_tokens=64) if levels else None
    settings = replace(world.settings, requests_levels=levels, alternatives_settings=alternatives)
    context = world.worker._make_context(settings)
    assert (context.codec is not None) == levels == (context.alternative_sampler is not None)
    if context.alternative_sampler is not None:
        assert context.alternative_sampler.settings == alternatives
        assert context.alternative_sampler._encode == world.worker._bridge.encode_text
    # Levels without alternative thoughts.
    plain = world.worker._make_context(replace(world.settings, requests_levels=True))
    assert plain.alternative_sampler is None and plain.codec is not None


def test_finished_trajectories_are_counted_over_all_calls(world):
    def count_finished_episodes() -> int:
        return world.runner.run(world.worker.count_finished_episodes())

    assert count_finished_episodes() == 0
    world.generate(world.specs[:2])
    assert count_finished_episodes() == 2
    world.generate(world.specs[:3])
    assert count_finished_episodes() == 5


def test_env_restarts_of_partial_rollouts_are_those_of_the_call(world, monkeypatch):
    world.worker._pool.counts["restarts"] = 5
    take = world.worker._groups_in_flight.take_finished

    async def take_with_a_restart(keep):
        world.worker._pool.counts["restarts"] += 2
        return await take(keep)

    monkeypatch.setattr(world.worker._groups_in_flight, "take_finished", take_with_a_restart)
    result = world.runner.run(world.worker.collect_finished_groups(world.specs, world.settings, 0))
    assert result.env_restarts == 2 and len(result.trajectories) == len(world.specs)
    assert 0.0 < result.rollout_s < 60.0


def test_package_that_runs_an_agent_uses_the_endpoint(world, monkeypatch):
    context = world.worker._make_context(world.settings)
    package: Any = SimpleNamespace(package_for_task=lambda _: SimpleNamespace(runs_agent=True))
    monkeypatch.setattr(world.worker, "_package", package)
    generator: Any = world.worker._make_generator(context, world.specs[1])
    assert isinstance(generator, UserAgentTrajectoryGenerator)
    assert generator.context is context and generator.trajectory.spec is world.specs[1]
    assert generator._endpoint is world.worker._endpoint
