"""Waiting for many references at once, and what workers of a cluster find, without a Ray."""

from typing import Any

import pytest

from tests.helpers.refusals import mentions
from verl.single_controller.base import WorkerTimeoutError
from verl.single_controller.ray import calls, local
from verl.utils.stacks import STACKS_DIR
from verl.utils.waits import list_awaited


class FakeRay:
    """``ray.wait`` and ``ray.get`` over references that are numbers; ``rounds`` become done one
    after the other, a round at every wait for something.
    """

    def __init__(self, rounds: list[list[int]]) -> None:
        self.rounds = rounds
        self.done: set[int] = set()
        self.waits = 0
        self.looked_at = 0
        self.timeouts: list[float] = []
        self.heard: list[list[str]] = []

    def wait(self, refs: list[int], num_returns: int, timeout: float) -> Any:
        self.waits += 1
        self.timeouts.append(timeout)
        self.heard.append(list_awaited())
        self.looked_at += len(refs)
        if not self.done & set(refs) and timeout and self.rounds:
            self.done |= set(self.rounds.pop(0))
        ready = [ref for ref in refs if ref in self.done][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: int, timeout: float) -> int:
        assert timeout > 0
        return 10 * ref


def gather(monkeypatch, fake: FakeRay, count: int, timeout_s: float = 5.0) -> list[int]:
    monkeypatch.setattr(calls, "ray", fake)
    return calls.gather_results(
        list(range(count)), timeout_s, [f"rank {rank}" for rank in range(count)]
    )


def test_ranks_that_answer_together_are_looked_at_together(monkeypatch):
    """A call of Ray looks at all that is pending: one for each answer is quadratic in the ranks."""
    fake = FakeRay([list(range(1000)), list(range(1000, 1024))])
    assert gather(monkeypatch, fake, 1024) == [10 * rank for rank in range(1024)]
    assert fake.waits == 4 and fake.looked_at < 3 * 1024


def test_who_answers_a_moment_later_is_looked_at_with_the_first(monkeypatch):
    fake = FakeRay([[0], [1, 2]])
    assert gather(monkeypatch, fake, 3) == [0, 10, 20]
    assert fake.waits == 2 and 0 < fake.timeouts[1] < 0.1


def test_who_does_not_answer_is_named(monkeypatch):
    with pytest.raises(WorkerTimeoutError, check=mentions("rank 2")):
        gather(monkeypatch, FakeRay([[0], [1]]), 3)


def test_the_watchdog_can_read_who_has_not_answered(monkeypatch):
    fake = FakeRay([[0], [2], [1]])
    gather(monkeypatch, fake, 3)
    assert fake.heard[0] == ["rank 0", "rank 1", "rank 2"]
    assert fake.heard[-1] == ["rank 1"]
    assert list_awaited() == []


def test_workers_find_what_the_configuration_says(monkeypatch):
    import ray

    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **options: asked.update(options))
    monkeypatch.setattr(local, "_collect_facts", lambda *_, **__: {"loopback_only": True})
    local.init_ray({"address": "head:1", "runtime_env": {"env_vars": {"HF_HOME": "/shared/hf"}}})
    assert asked["runtime_env"] == {"env_vars": {"HF_HOME": "/shared/hf"}}
    asked.clear()
    local.init_ray({"address": "head:1", "runtime_env": {}})
    assert "runtime_env" not in asked


def test_workers_of_a_cluster_are_told_where_stacks_go(monkeypatch):
    import ray

    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address, **options: asked.update(options))
    monkeypatch.setattr(local, "_collect_facts", lambda *_, **__: {"loopback_only": True})
    monkeypatch.setenv(STACKS_DIR, "/shared/run/logs/stacks")
    given = {"env_vars": {"HF_HOME": "/shared/hf"}}
    local.init_ray({"address": "head:1", "runtime_env": given})
    assert asked["runtime_env"]["env_vars"] == {
        STACKS_DIR: "/shared/run/logs/stacks",
        "HF_HOME": "/shared/hf",
    }
    assert given == {"env_vars": {"HF_HOME": "/shared/hf"}}
    asked.clear()
    local.init_ray({"address": "local"})
    assert "runtime_env" not in asked
