"""Collector workers as Ray actors: same trajectories as in this process, whole groups per
worker.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from agent_system.environments.manager import make_envs
from agent_system.multi_turn_rollout import collector_group
from agent_system.multi_turn_rollout.collector_group import CollectorGroup, choose_node
from agent_system.multi_turn_rollout.collector_worker import CollectedTrajectories
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from agent_system.multi_turn_rollout.stored_trajectories import StoredTurnRecords
from tests.helpers.number_line_world import Group, make_config, make_world, walking_policy
from tests.helpers.refusals import list_logged, mentions
from tests.helpers.scripted_engine import ScriptedEngine
from tests.helpers.thinking_trajectories import thinking_config, thinking_script
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.columns import is_deeply_equal
from verl.protocol import DataProto, object_array
from verl.record.journal import Journal
from verl.record.run_dir import RunDirectory
from verl.records import ScoreResult
from verl.single_controller.base import WorkerDiedError
from verl.single_controller.ray import init_ray
from verl.single_controller.ray.local import stop_ray


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    facts = init_ray(num_cpus=2)
    yield
    if facts["started"]:
        stop_ray()  # unlike ray.shutdown, it leaves no hanging worker


def rows(data) -> list:
    columns = zip(data.non_tensor_batch["traj_uid"], data.non_tensor_batch["steps"], strict=True)
    return [
        (traj, steps, ids)
        for (traj, steps), ids in zip(columns, data.batch["input_ids"].tolist(), strict=True)
    ]


def add_computed_columns(data) -> None:
    """Add the columns that a training step adds, and that the rollout log has."""
    generator = torch.Generator().manual_seed(0)
    for key in ("advantages", "entropys", "old_log_probs"):
        data.batch[key] = torch.randn(data.batch["responses"].shape, generator=generator)
    data.reorder(list(range(len(data)))[::-1])


def write_log(data, config, tokenizer, path: Path, encode_rows=None) -> list[bytes]:
    """Return the rollout and the token file that a journal writes for ``data``."""
    with RunDirectory(path).open({}) as run:
        journal = Journal(run, config, tokenizer, encode_rows)
        journal.log_rollouts(1, data)
        journal.flush()
        return [run.rollout_path(1).read_bytes(), run.token_path(1).read_bytes()]


def test_ray_collectors_give_the_rows_and_the_log_of_a_local_collector(tmp_path, caplog):
    tokenizer = make_tiny_tokenizer()
    config = make_config(levels=True, n=2, num_collectors=2)
    group, envs, _ = make_world(tokenizer, config)
    batch = envs.gen_batch(1, 3)
    local, remote = TrajectoryCollector(config, tokenizer), TrajectoryCollector(config, tokenizer)
    engine: Any = (
        ray.remote(ScriptedEngine)
        .options(num_cpus=0)
        .remote(tokenizer, walking_policy(levels=True))
    )
    try:
        expected = local.multi_turn_loop(batch, group, envs)
        actual = remote.multi_turn_loop(batch, Group([engine]), envs)
        validation = remote.multi_turn_loop(
            make_envs(config)[1].panel_batch()[:4], Group([engine]), envs, is_train=False
        )
        workers = remote.start_collectors([engine])
        assert workers._count_finished_episodes() == len(expected) + 4
        assert all(isinstance(row, StoredTurnRecords) for row in actual.non_tensor_batch["steps"])
        for data in (expected, actual):
            add_computed_columns(data)
        log = write_log(expected, config, tokenizer, tmp_path / "local")
        path = tmp_path / "remote"
        assert write_log(actual, config, tokenizer, path, remote.encode_rows) == log
        assert not list_logged(caplog, StoredTurnRecords.__module__)
        # The texts outlive the collector, whose lines the driver writes.
        ray.kill(workers._remote_workers[0])
        path = tmp_path / "after a death"
        assert write_log(actual, config, tokenizer, path, remote.encode_rows) == log
        assert list_logged(caplog, StoredTurnRecords.__module__)
    finally:
        local.close()
        remote.close()
    assert rows(actual) == rows(expected)
    assert set(actual.keys()) == set(expected.keys())
    for key, tensor in expected.batch.items():
        assert actual.batch[key].equal(tensor), key
    for key in set(expected.non_tensor_batch) - {"steps"}:
        assert is_deeply_equal(actual.non_tensor_batch[key], expected.non_tensor_batch[key]), key
    assert len(validation) == 4 and validation.non_tensor_batch["won"].all()


def score_requests(data) -> Any:
    """Return scores that depend on turn and level, as training workers do for score requests."""
    columns = {
        f"{name}_scores": object_array(
            [
                [
                    ScoreResult(r.step, r.label, -r.label, 0.2 * r.label + r.step, 0.4, 0.3, 2)
                    for r in row
                ]
                for row in data.non_tensor_batch[f"{name if name == 'span' else 'branche'}s"]
            ]
        )
        for name in ("span", "branch")
    }
    zeros = torch.zeros(data.batch["responses"].shape)
    return DataProto.from_dict({"old_log_probs": zeros, "entropys": zeros.clone()}, columns)


@pytest.mark.parametrize("history", ["append", "window"])
def test_thinking_advantages_of_ray_collectors(history, tmp_path):
    tokenizer = make_tiny_tokenizer()
    config = thinking_config(history)
    config.env.num_collectors = 2
    _, envs, _ = make_world(tokenizer, config)
    local = ScriptedEngine(tokenizer, thinking_script())
    remote: Any = ray.remote(ScriptedEngine).options(num_cpus=0)
    remote = remote.remote(tokenizer, thinking_script())
    batches, logs = [], []
    for name, engine in (("local", local), ("remote", remote)):
        collector = TrajectoryCollector(config, tokenizer)
        try:
            group = Group([engine], score_requests)
            data = collector.multi_turn_loop(envs.gen_batch(1, 3), group, envs)
            data.batch["advantages"] = data.batch["thinking_level_entropies"]
            path = tmp_path / name
            logs.append(write_log(data, config, tokenizer, path, collector.encode_rows))
        finally:
            collector.close()
        batches.append(data)
    expected, actual = batches
    assert expected.batch["thinking_level_entropies"].abs().sum() > 0
    assert set(actual.keys()) == set(expected.keys())
    for key, tensor in expected.batch.items():
        assert actual.batch[key].equal(tensor), key
    assert rows(actual) == rows(expected) and logs[0] == logs[1]
    assert b'"contexts":[{"level":1' in logs[0][0]
    times = ("rollout/active_ratio", "rollout/env_wait_s", "rollout/engine_wait_s")
    metrics = [
        {key: value for key, value in data.meta_info["metrics"].items() if key not in times}
        for data in batches
    ]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("validating", [False, True])
def test_trajectories_of_a_lost_collector_are_generated_again(validating):
    """The collector is lost before a batch or a validation, with partial rollouts in flight. The
    rows are those of a local collector that is not lost.
    """
    tokenizer = make_tiny_tokenizer()
    config = make_config(levels=True, n=2, num_collectors=2)
    config.env.rollout.carry_over = 1
    _, envs, _ = make_world(tokenizer, config)
    remote: Any = ray.remote(ScriptedEngine).options(num_cpus=0)
    remote = remote.remote(tokenizer, walking_policy(levels=True))
    local = ScriptedEngine(tokenizer, walking_policy(levels=True))
    rows_by_engine = []
    for engine in (local, remote):
        collector = TrajectoryCollector(config, tokenizer)
        loses_collector = engine is remote
        try:
            first = collector.multi_turn_loop(envs.gen_batch(1, 3), Group([engine]), envs)
            if loses_collector:
                # Its groups in flight are lost with it.
                ray.kill(collector.start_collectors([engine])._remote_workers[0])
            if validating:
                validation_batch = make_envs(config)[1].panel_batch()[:4]
                val = collector.multi_turn_loop(
                    validation_batch, Group([engine]), envs, is_train=False
                )
                assert len(val) == 4
            second = collector.multi_turn_loop(envs.gen_batch(2, 3), Group([engine]), envs)
        finally:
            collector.close()
        assert first.meta_info["metrics"]["rollout/collectors_lost"] == 0
        assert second.meta_info["metrics"]["rollout/collectors_lost"] == (
            loses_collector and not validating
        )
        assert len(first) == len(second) == 6
        rows_by_engine.append(rows(first) + rows(second))
    request_ids, aborted_clients = ray.get(remote.list_requests_and_aborts.remote())
    assert len(set(request_ids)) == len(request_ids), "a late result would answer another request"
    # A collector that closes with requests in flight aborts them under its own name.
    assert aborted_clients[0] == "collector-0"
    assert sorted(rows_by_engine[0], key=str) == sorted(rows_by_engine[1], key=str)


def fake_result(ref: str) -> CollectedTrajectories:
    """Return a stand-in for the trajectories of ``ref``."""
    return CollectedTrajectories([], rollout_s=float(ref[0]), thoughts_s=float(len(ref)))


@pytest.fixture
def wait_for_parts(monkeypatch):
    """Return ``run(**errors)``, which waits for two collectors: one is ready at the second look,
    the other at the third.

    It returns the results, the progress calls and the replaced workers. ``errors`` maps references
    to exceptions: ``0`` is the first call to collector 0, ``0+`` the next. ``texts`` is raised when
    the whole trajectories of a collector are requested for the first time.
    """

    def run(**errors: Exception) -> tuple[list[CollectedTrajectories], list[int], list[int]]:
        # The count includes 10 trajectories of earlier calls.
        finished = iter([10, 11, 13, 13, 13, 13])
        progress_calls: list[int] = []
        replaced: list[int] = []
        ready_at_first = iter([False])

        def wait(refs: list[str], num_returns: int, timeout: float) -> Any:
            assert num_returns == len(refs) and timeout > 0
            return (refs[:1], refs[1:]) if next(ready_at_first, True) else ([], refs)

        def get(ref: str, timeout_s: float, label: str) -> CollectedTrajectories:
            assert timeout_s > 0 and label == f"collector-{ref[0]}"
            if ref in errors:
                raise errors[ref]
            return fake_result(ref)

        def make_ref(number: int) -> str:
            return f"{number}{'+' * replaced.count(number)}"

        def wait_for_texts(self: CollectorGroup, number: int, name: str) -> None:
            if "texts" in errors:
                raise errors.pop("texts")

        monkeypatch.setattr(collector_group, "ray_get", get)
        monkeypatch.setattr(CollectorGroup, "_wait_for_stored_trajectories", wait_for_texts)
        monkeypatch.setattr(collector_group, "ray", SimpleNamespace(wait=wait))
        monkeypatch.setattr(CollectorGroup, "_count_finished_episodes", lambda self: next(finished))
        monkeypatch.setattr(
            CollectorGroup, "_replace_worker", lambda self, number: replaced.append(number)
        )
        progress: Any = SimpleNamespace(set_done=progress_calls.append)
        group = object.__new__(CollectorGroup)
        return (
            CollectorGroup._wait_for_results(group, make_ref, [0, 1], 60.0, progress),
            progress_calls,
            replaced,
        )

    return run


def test_progress_counts_the_finished_trajectories(wait_for_parts):
    assert wait_for_parts() == ([fake_result("0"), fake_result("1")], [1, 3], [])


def test_failure_of_a_worker_is_raised_at_once(wait_for_parts):
    with pytest.raises(RuntimeError, match="broke"):
        wait_for_parts(**{"0": RuntimeError("broke")})


def test_lost_collector_is_replaced_and_called_again(wait_for_parts, caplog):
    parts, _, replaced = wait_for_parts(**{"0": WorkerDiedError("the node is gone")})
    assert [part.lost_collectors for part in parts] == [1, 0] and replaced == [0]
    assert [part.thoughts_s for part in parts] == [2.0, 1.0], "the result of the replacement"
    assert "collector-0" in caplog.text


def test_node_lost_before_the_texts_arrived_is_a_lost_collector(wait_for_parts):
    parts, _, replaced = wait_for_parts(texts=WorkerDiedError("the node is gone"))
    assert [part.lost_collectors for part in parts] == [1, 0] and replaced == [0]
    assert [part.thoughts_s for part in parts] == [2.0, 1.0], "the result of the replacement"


@ray.remote
def make_text(size: int) -> str:
    return "x" * size


@pytest.mark.parametrize("size", [10, 10**6])
def test_stored_trajectories_are_read_only_if_they_may_be_lost(size, monkeypatch):
    group = object.__new__(CollectorGroup)
    group._stored_refs = {0: make_text.remote(size)}
    group._node_ids = {0: ray.get_runtime_context().get_node_id()}
    labels = []
    monkeypatch.setattr(collector_group, "ray_get", lambda ref, s, label: labels.append(label))
    group._wait_for_stored_trajectories(0, "collector-0")
    assert labels == ["trajectories of collector-0"] * (size < 100)
    group._node_ids = {0: "a lost node"}
    group._wait_for_stored_trajectories(0, "collector-0")
    assert labels[-1:] == ["trajectories of collector-0"]


def test_repeated_loss_of_a_collector_ends_the_run(wait_for_parts):
    error = WorkerDiedError("out of memory")
    with pytest.raises(WorkerDiedError, match="out of memory"):
        wait_for_parts(**{"0": error, "0+": error, "0++": error})


def test_collectors_are_assigned_to_live_nodes():
    nodes = [
        {"NodeID": "head", "Alive": True, "Resources": {}},
        {"NodeID": "b", "Alive": True, "Resources": {"CPU": 8.0}},
        {"NodeID": "gone", "Alive": False, "Resources": {"CPU": 64.0}},
        {"NodeID": "a", "Alive": True, "Resources": {"CPU": 8.0}},
    ]
    assert [choose_node(number, nodes) for number in range(5)] == ["a", "b", "head", "a", "b"]
    # The lost collector ran on b, which may be dead although it is listed as alive.
    assert [choose_node(number, nodes, "b") for number in range(3)] == ["a", "head", "a"]
    assert choose_node(4, nodes[2:], "a") == "a", "it is the only live node"
    dead_nodes = [{**node, "Alive": False} for node in nodes]
    with pytest.raises(WorkerDiedError, check=mentions("collector-4")):
        choose_node(4, dead_nodes, "a")
