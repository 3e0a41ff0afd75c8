"""Errors of workers name the nodes that Ray has lost."""

import pytest
from ray.exceptions import ActorUnavailableError

from verl.single_controller.base.worker_group import WorkerDiedError
from verl.single_controller.ray import nodes

HEAD = {"NodeID": "a" * 56, "NodeManagerHostname": "head", "Alive": True}
OTHER = {"NodeID": "b" * 56, "NodeManagerHostname": "other", "Alive": True}
GONE = {**OTHER, "Alive": False}


@pytest.fixture
def clusters(monkeypatch):
    """Return a function that sets the successive answers of ``ray.nodes``, the last one repeated.
    It returns the list of calls."""
    calls: list[int] = []
    node_lists: list[list[dict]] = []
    monkeypatch.setattr(nodes.time, "sleep", lambda _: None)

    def list_nodes():
        calls.append(1)
        return node_lists[min(len(calls), len(node_lists)) - 1]

    monkeypatch.setattr(nodes.ray, "nodes", list_nodes)

    def set_answers(*answers):
        node_lists.extend(answers)
        return calls

    return set_answers


@pytest.mark.parametrize(
    "error", [WorkerDiedError("rank 0 is gone"), ActorUnavailableError("?", None)]
)
def test_node_lost_shortly_after_the_error_is_named(clusters, error):
    calls = clusters([HEAD, OTHER], [HEAD, OTHER], [HEAD, OTHER], [HEAD, GONE])
    with pytest.raises(type(error)) as caught, nodes.add_lost_nodes_to_errors():
        raise error
    (note,) = caught.value.__notes__
    assert "other (bbbbbbbb)" in note
    assert len(calls) == 4


def test_single_node_run_does_not_wait(clusters):
    calls = clusters([HEAD])
    with pytest.raises(WorkerDiedError) as caught, nodes.add_lost_nodes_to_errors():
        raise WorkerDiedError("rank 0 is gone")
    assert len(calls) == 2 and not hasattr(caught.value, "__notes__")


def test_no_node_is_named_when_none_is_lost(clusters, monkeypatch):
    clusters([HEAD, OTHER])
    monkeypatch.setattr(nodes, "DETECTION_TIMEOUT_S", 0.01)
    assert nodes.find_lost_nodes() == []


def test_other_errors_do_not_query_nodes(clusters):
    calls = clusters([HEAD, OTHER], [HEAD, GONE])
    with pytest.raises(KeyboardInterrupt), nodes.add_lost_nodes_to_errors():
        raise KeyboardInterrupt
    assert len(calls) == 1


def test_node_lost_before_is_not_named_and_hides_no_other(clusters):
    lost_before = {**GONE, "NodeID": "c" * 56, "NodeManagerHostname": "yesterday"}
    clusters([HEAD, OTHER, lost_before], [HEAD, OTHER, lost_before], [HEAD, GONE, lost_before])
    with pytest.raises(WorkerDiedError) as caught, nodes.add_lost_nodes_to_errors():
        assert not nodes.is_lost(lost_before) and nodes.is_lost(GONE)
        raise WorkerDiedError("rank 0 is gone")
    (note,) = caught.value.__notes__
    assert "other (bbbbbbbb)" in note
