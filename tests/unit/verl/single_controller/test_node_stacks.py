"""Stacks are collected by one task per node. The text also names nodes that fail or are late."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from verl.single_controller.ray import nodes
from verl.utils.stacks import RemoteStacks

A, B, C, DEAD, HERE = (letter * 56 for letter in "abcde")  # node ids as in Ray


class FakeRay:
    """Ray with ``answers``: node to the answer of its task, or None for no answer."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.requests: list[tuple[str, Path]] = []

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: HERE)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": node, "NodeManagerHostname": f"host-{node[0]}", "Alive": node != DEAD}
            for node in (HERE, *self.answers)
        ]

    def remote(self, **_: object) -> Any:
        def options(scheduling_strategy: Any) -> Any:
            def collect(folder: Path) -> str:
                assert not scheduling_strategy.soft
                self.requests.append((scheduling_strategy.node_id, folder))
                return scheduling_strategy.node_id

            return SimpleNamespace(remote=collect)

        return lambda _function: SimpleNamespace(options=options)

    def wait(self, refs: list[str], num_returns: int, timeout: float) -> tuple[list, list]:
        assert num_returns == len(refs) and timeout > 0
        late = [ref for ref in refs if self.answers[ref] is None]
        return [ref for ref in refs if ref not in late], late

    def get(self, ref: str, timeout: float) -> str:
        answer = self.answers[ref]
        if isinstance(answer, Exception):
            raise answer
        return answer


def collect_stacks(
    monkeypatch, answers: dict[str, Any], folder: Path
) -> tuple[RemoteStacks, FakeRay]:
    fake = FakeRay(answers)
    monkeypatch.setattr(nodes, "ray", fake)
    return nodes.collect_stacks_of_other_nodes(folder), fake


def test_every_other_live_node_is_queried(monkeypatch, tmp_path):
    answers = {A: "stacks of a\n", B: RayError("no"), C: None, DEAD: "no request"}
    collected, fake = collect_stacks(monkeypatch, answers, tmp_path)
    text = collected.stacks
    assert fake.requests == [(node, tmp_path) for node in (A, B, C)]
    assert "== node host-a (aaaaaaaa)\nstacks of a\n" in text
    failed = text.partition("== node host-b (bbbbbbbb)\n")[2].partition("== ")[0]
    late = text.partition("== node host-c (cccccccc)\n")[2].partition("== ")[0]
    assert "RayError: no\n" in failed and f"{nodes.STACKS_TIMEOUT_S:g} s" in late
    dead, silent = collected.silent_nodes
    assert "host-d (dddddddd)" in dead and "host-c (cccccccc)" in silent


@pytest.mark.parametrize("initialised", [True, False])
def test_without_other_nodes_the_result_is_empty(monkeypatch, tmp_path, initialised):
    monkeypatch.setattr(FakeRay, "is_initialized", lambda _: initialised)
    assert collect_stacks(monkeypatch, {}, tmp_path)[0] == RemoteStacks()
