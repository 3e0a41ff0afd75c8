"""Waits for many references at once, and the settings of cluster workers, without Ray."""

from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from tests.helpers.refusals import mentions
from verl.single_controller.base import WorkerDiedError, WorkerTimeoutError
from verl.single_controller.ray import calls, local
from verl.utils.processes import ARENAS_VARIABLE
from verl.utils.stacks import STACKS_DIR
from verl.utils.waits import list_awaited_labels


class FakeRay:
    """``ray.wait`` and ``ray.get`` over references that are numbers. At every wait with a timeout,
    the next entry of ``rounds`` becomes done."""

    def __init__(self, rounds: list[list[int]], errors: dict[int, Exception] | None = None) -> None:
        self.rounds = rounds
        self.errors = errors or {}
        self.done: set[int] = set()
        self.waits = 0
        self.references_checked = 0
        self.timeouts: list[float] = []
        self.awaited_names: list[list[str]] = []

    def wait(self, refs: list[int], num_returns: int, timeout: float) -> Any:
        self.waits += 1
        self.timeouts.append(timeout)
        self.awaited_names.append(list_awaited_labels())
        self.references_checked += len(refs)
        if not self.done & set(refs) and timeout and self.rounds:
            self.done |= set(self.rounds.pop(0))
        ready = [ref for ref in refs if ref in self.done][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: int, timeout: float) -> int:
        assert timeout > 0
        if ref in self.errors:
            raise self.errors[ref]
        return 10 * ref


def gather_with(monkeypatch, fake: FakeRay, count: int, timeout_s: float = 5.0) -> list[int]:
    monkeypatch.setattr(calls, "ray", fake)
    return calls.gather_results(
        list(range(count)), timeout_s, [f"rank {rank}" for rank in range(count)]
    )


def test_ranks_that_answer_together_are_collected_together(monkeypatch):
    """A call of Ray checks all pending references: one call for each answer is quadratic in the
    ranks."""
    fake = FakeRay([list(range(1000)), list(range(1000, 1024))])
    assert gather_with(monkeypatch, fake, 1024) == [10 * rank for rank in range(1024)]
    assert fake.waits == 4 and fake.references_checked < 3 * 1024


def test_answer_shortly_after_the_first_is_collected_with_it(monkeypatch):
    fake = FakeRay([[0], [1, 2]])
    assert gather_with(monkeypatch, fake, 3) == [0, 10, 20]
    assert fake.waits == 2 and 0 < fake.timeouts[1] < 0.1


def test_missing_answer_is_named(monkeypatch):
    with pytest.raises(WorkerTimeoutError, check=mentions("rank 2")):
        gather_with(monkeypatch, FakeRay([[0], [1]]), 3)


@pytest.mark.parametrize("rounds", [[[0, 1, 2]], [[0], [1, 2]], [[0], [], [1], [2]]])
def test_death_is_the_cause_whenever_it_is_reported(monkeypatch, rounds):
    """The other ranks of a collective fail before, together with or after the dead rank."""
    lost_connection = RayTaskError("all_reduce", "traceback", RuntimeError("closed by peer"))
    errors = {0: lost_connection, 1: lost_connection, 2: ActorDiedError()}
    with pytest.raises(WorkerDiedError, check=mentions("rank 2")):
        gather_with(monkeypatch, FakeRay(rounds, errors), 3)


def test_exception_is_raised_if_all_processes_live(monkeypatch):
    errors: dict[int, Exception] = {
        1: RayTaskError("fail_on", "traceback", ValueError("cannot do that"))
    }
    with pytest.raises(RayTaskError) as caught:
        gather_with(monkeypatch, FakeRay([[1], [0], [2]], errors), 3)
    (note,) = caught.value.__notes__
    assert "rank 1" in note


def test_watchdog_can_read_the_missing_ranks(monkeypatch):
    fake = FakeRay([[0], [2], [1]])
    gather_with(monkeypatch, fake, 3)
    assert fake.awaited_names[0] == ["rank 0", "rank 1", "rank 2"]
    assert fake.awaited_names[-1] == ["rank 1"]
    assert list_awaited_labels() == []


def test_workers_get_the_runtime_env_of_the_configuration(monkeypatch):
    import ray

    monkeypatch.delenv(ARENAS_VARIABLE, raising=False)
    init_options: dict[str, Any] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **options: init_options.update(options))
    monkeypatch.setattr(local, "_collect_ray_facts", lambda *_, **__: {})
    local.init_ray(address="head:1", runtime_env={"env_vars": {"HF_HOME": "/shared/hf"}})
    assert init_options["runtime_env"] == {"env_vars": {"HF_HOME": "/shared/hf"}}
    init_options.clear()
    local.init_ray(address="head:1", runtime_env={})
    assert "runtime_env" not in init_options


def test_cluster_workers_get_the_variables_of_the_driver(monkeypatch):
    import ray

    init_options: dict[str, Any] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **options: init_options.update(options))
    monkeypatch.setattr(local, "_collect_ray_facts", lambda *_, **__: {})
    monkeypatch.setenv(STACKS_DIR, "/shared/run/logs/stacks")
    monkeypatch.setenv(ARENAS_VARIABLE, "2")
    runtime_env = {"env_vars": {"HF_HOME": "/shared/hf"}}
    local.init_ray(address="head:1", runtime_env=runtime_env)
    assert init_options["runtime_env"]["env_vars"] == {
        STACKS_DIR: "/shared/run/logs/stacks",
        ARENAS_VARIABLE: "2",
        "HF_HOME": "/shared/hf",
    }
    assert runtime_env == {"env_vars": {"HF_HOME": "/shared/hf"}}
    init_options.clear()
    local.init_ray(address="local")
    assert "runtime_env" not in init_options
