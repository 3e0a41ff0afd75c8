"""Collector workers as Ray actors: the same plays as in this process, whole groups dealt to two of
them.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout import collector_group
from agent_system.multi_turn_rollout.collector_group import CollectorGroup, choose_node
from agent_system.multi_turn_rollout.collector_worker import CollectedTrajectories
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from tests.helpers.play import Group, make_config, make_world, walking_policy
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.single_controller.base import WorkerDiedError
from verl.single_controller.ray import init_ray


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    facts = init_ray(num_cpus=2)
    yield
    if facts["started"]:
        ray.shutdown()


def rows(data) -> list:
    columns = zip(data.non_tensor_batch["traj_uid"], data.non_tensor_batch["steps"], strict=True)
    return [
        (traj, steps, ids)
        for (traj, steps), ids in zip(columns, data.batch["input_ids"].tolist(), strict=True)
    ]


def test_ray_collectors_play_what_one_in_this_process_plays():
    tokenizer = make_tiny_tokenizer()
    config = make_config(levels=True, n=2, num_collectors=2)
    group, envs, _ = make_world(tokenizer, config)
    batch = envs.gen_batch(1, 3)
    here, there = TrajectoryCollector(config, tokenizer), TrajectoryCollector(config, tokenizer)
    engine: Any = (
        ray.remote(ScriptedEngine)
        .options(num_cpus=0)
        .remote(tokenizer, walking_policy(levels=True))
    )
    try:
        expected = here.multi_turn_loop(batch, group, envs)
        found = there.multi_turn_loop(batch, Group([engine]), envs)
        again = there.multi_turn_loop(
            make_envs(config)[1].panel_batch()[:4], Group([engine]), envs, is_train=False
        )
        workers = there.start_collectors([engine])
        assert workers._count_finished() == len(expected) + 4
    finally:
        here.close()
        there.close()
    assert rows(found) == rows(expected)
    assert len(again) == 4 and again.non_tensor_batch["won"].all()


@pytest.mark.parametrize("validating", [False, True])
def test_plays_of_a_lost_collector_are_played_by_another(validating):
    """Lost before a batch, or before a validation, while what is carried over is played. The rows
    are those of a collector in this process that is not lost.
    """
    tokenizer = make_tiny_tokenizer()
    config = make_config(levels=True, n=2, num_collectors=2)
    config.env.rollout.carry_over = 1
    _, envs, _ = make_world(tokenizer, config)
    remote: Any = ray.remote(ScriptedEngine).options(num_cpus=0)
    remote = remote.remote(tokenizer, walking_policy(levels=True))
    local = ScriptedEngine(tokenizer, walking_policy(levels=True))
    played = []
    for engine in (local, remote):
        collector = TrajectoryCollector(config, tokenizer)
        lose = engine is remote
        try:
            first = collector.multi_turn_loop(envs.gen_batch(1, 3), Group([engine]), envs)
            if lose:
                # With what it had begun and not handed out.
                ray.kill(collector.start_collectors([engine])._remote_workers[0])
            if validating:
                panel = make_envs(config)[1].panel_batch()[:4]
                val = collector.multi_turn_loop(panel, Group([engine]), envs, is_train=False)
                assert len(val) == 4
            second = collector.multi_turn_loop(envs.gen_batch(2, 3), Group([engine]), envs)
        finally:
            collector.close()
        assert first.meta_info["metrics"]["rollout/collectors_lost"] == 0
        assert second.meta_info["metrics"]["rollout/collectors_lost"] == (lose and not validating)
        assert len(first) == len(second) == 6
        played.append(rows(first) + rows(second))
    asked, forgotten = ray.get(remote.told.remote())
    assert len(set(asked)) == len(asked), "what comes late would answer another request"
    # A collector that closes with requests in flight aborts them under its own name.
    assert forgotten[0] == "collector-0"
    assert sorted(played[0], key=str) == sorted(played[1], key=str)


def plays_of(ref: str) -> CollectedTrajectories:
    """What stands for the plays behind ``ref``."""
    return CollectedTrajectories([], rollout_s=float(ref[0]), thoughts_s=float(len(ref)))


@pytest.fixture
def watched(monkeypatch):
    """What two collectors return, one at the second look and one at the third, and what progress
    hears; ``errors`` are what references raise: ``0`` is the first to collector 0, ``0+`` the next.
    """

    def watch(**errors: Exception) -> tuple[list[CollectedTrajectories], list[int], list[int]]:
        # Plays of earlier calls, 10 of them, are over as well.
        over = iter([10, 11, 13, 13, 13, 13])
        heard: list[int] = []
        started: list[int] = []
        looks = iter([False])

        def wait(refs: list[str], num_returns: int, timeout: float) -> Any:
            assert num_returns == len(refs) and timeout > 0
            return (refs[:1], refs[1:]) if next(looks, True) else ([], refs)

        def get(ref: str, timeout_s: float, label: str) -> CollectedTrajectories:
            assert timeout_s > 0 and label == f"collector-{ref[0]}"
            if ref in errors:
                raise errors[ref]
            return plays_of(ref)

        def ask(number: int) -> str:
            return f"{number}{'+' * started.count(number)}"

        monkeypatch.setattr(collector_group, "ray_get", get)
        monkeypatch.setattr(collector_group, "ray", SimpleNamespace(wait=wait))
        monkeypatch.setattr(CollectorGroup, "_count_finished", lambda self: next(over))
        monkeypatch.setattr(
            CollectorGroup, "_replace_worker", lambda self, number: started.append(number)
        )
        progress: Any = SimpleNamespace(set_done=heard.append)
        group = object.__new__(CollectorGroup)
        return CollectorGroup._wait_for_parts(group, ask, [0, 1], 60.0, progress), heard, started

    return watch


def test_progress_hears_of_the_plays_that_are_over(watched):
    assert watched() == ([plays_of("0"), plays_of("1")], [1, 3], [])


def test_a_worker_that_failed_is_told_while_the_others_play(watched):
    with pytest.raises(RuntimeError, match="broke"):
        watched(**{"0": RuntimeError("broke")})


def test_a_collector_that_is_gone_is_asked_again_in_another_process(watched, caplog):
    parts, _, started = watched(**{"0": WorkerDiedError("the node is gone")})
    assert [part.lost_collectors for part in parts] == [1, 0] and started == [0]
    assert [part.thoughts_s for part in parts] == [2.0, 1.0], "the answer of the second one"
    assert "collector-0" in caplog.text


def test_what_kills_every_collector_ends_the_run(watched):
    gone = WorkerDiedError("out of memory")
    with pytest.raises(WorkerDiedError, match="out of memory"):
        watched(**{"0": gone, "0+": gone, "0++": gone})


def test_collectors_are_dealt_to_the_nodes_that_are_alive():
    nodes = [
        {"NodeID": "head", "Alive": True, "Resources": {}},
        {"NodeID": "b", "Alive": True, "Resources": {"CPU": 8.0}},
        {"NodeID": "gone", "Alive": False, "Resources": {"CPU": 64.0}},
        {"NodeID": "a", "Alive": True, "Resources": {"CPU": 8.0}},
    ]
    assert [choose_node(number, nodes) for number in range(5)] == ["a", "b", "head", "a", "b"]
    # In place of one that was lost on b, which may only look alive.
    assert [choose_node(number, nodes, "b") for number in range(3)] == ["a", "head", "a"]
    assert choose_node(4, nodes[2:], "a") == "a", "there is no other"
