"""Nodes are asked for stacks, each by a task of its own; one that fails or is late has a line."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from verl.single_controller.ray import stacks


class FakeRay:
    """``nodes``: name -> what its task answers, None where it never does."""

    def __init__(self, nodes: dict[str, Any]) -> None:
        self.answers = nodes
        self.asked: list[tuple[str, Path]] = []

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "here")

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "NodeManagerHostname": f"host-{name}", "Alive": name != "dead"}
            for name in ("here", *self.answers)
        ]

    def remote(self, **_: object) -> Any:
        def options(scheduling_strategy: Any) -> Any:
            def asked(folder: Path) -> str:
                assert not scheduling_strategy.soft
                self.asked.append((scheduling_strategy.node_id, folder))
                return scheduling_strategy.node_id

            return SimpleNamespace(remote=asked)

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


def told(monkeypatch, nodes: dict[str, Any], folder: Path) -> tuple[str, FakeRay]:
    fake = FakeRay(nodes)
    monkeypatch.setattr(stacks, "ray", fake)
    return stacks.stacks_of_other_nodes(folder), fake


def test_every_other_node_that_is_alive_is_asked(monkeypatch, tmp_path):
    nodes = {"a": "stacks of a\n", "b": RayError("no"), "c": None, "dead": "never asked"}
    text, fake = told(monkeypatch, nodes, tmp_path)
    assert fake.asked == [(name, tmp_path) for name in ("a", "b", "c")]
    assert "== node host-a (a)\nstacks of a\n" in text
    assert "== node host-b (b)\nit could not be asked: RayError: no\n" in text
    assert "== node host-c (c)\nit did not answer within" in text


@pytest.mark.parametrize("initialised", [True, False])
def test_without_other_nodes_there_is_nothing_to_tell(monkeypatch, tmp_path, initialised):
    monkeypatch.setattr(FakeRay, "is_initialized", lambda _: initialised)
    assert told(monkeypatch, {}, tmp_path)[0] == ""
