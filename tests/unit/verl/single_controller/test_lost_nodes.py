"""Errors of workers say which nodes are gone, as soon as Ray knows."""

import pytest
from ray.exceptions import ActorUnavailableError

from verl.single_controller.base.worker_group import WorkerDiedError
from verl.single_controller.ray import nodes

HEAD = {"NodeID": "a" * 56, "NodeManagerHostname": "head", "Alive": True}
OTHER = {"NodeID": "b" * 56, "NodeManagerHostname": "other", "Alive": True}
GONE = {**OTHER, "Alive": False}


@pytest.fixture
def clusters(monkeypatch):
    """``clusters(first, second)``: what Ray says at every look, the last one from there on; returns
    the looks.
    """
    looks: list[int] = []
    said: list[list[dict]] = []
    monkeypatch.setattr(nodes.time, "sleep", lambda _: None)

    def look():
        looks.append(1)
        return said[min(len(looks), len(said)) - 1]

    monkeypatch.setattr(nodes.ray, "nodes", look)

    def set_up(*answers):
        said.extend(answers)
        return looks

    return set_up


@pytest.mark.parametrize(
    "error", [WorkerDiedError("rank 0 is gone"), ActorUnavailableError("?", None)]
)
def test_a_node_that_is_given_up_a_moment_later_is_named(clusters, error):
    looks = clusters([HEAD, OTHER], [HEAD, OTHER], [HEAD, OTHER], [HEAD, GONE])
    with pytest.raises(type(error)) as caught, nodes.add_lost_nodes_to_errors():
        raise error
    assert caught.value.__notes__ == ["the node other (bbbbbbbb) of the cluster is gone"]
    assert len(looks) == 4


def test_a_run_of_one_node_does_not_wait(clusters):
    looks = clusters([HEAD])
    with pytest.raises(WorkerDiedError) as caught, nodes.add_lost_nodes_to_errors():
        raise WorkerDiedError("rank 0 is gone")
    assert len(looks) == 2 and not hasattr(caught.value, "__notes__")


def test_where_no_node_is_lost_none_is_named(clusters):
    clusters([HEAD, OTHER])
    assert nodes.find_lost_nodes(0.01) == []


def test_other_errors_are_none_of_its_business(clusters):
    looks = clusters([HEAD, OTHER], [HEAD, GONE])
    with pytest.raises(KeyboardInterrupt), nodes.add_lost_nodes_to_errors():
        raise KeyboardInterrupt
    assert len(looks) == 1


def test_a_node_that_was_gone_before_is_neither_named_nor_hides_another(clusters):
    before = {**GONE, "NodeID": "c" * 56, "NodeManagerHostname": "yesterday"}
    clusters([HEAD, OTHER, before], [HEAD, OTHER, before], [HEAD, GONE, before])
    with pytest.raises(WorkerDiedError) as caught, nodes.add_lost_nodes_to_errors():
        assert not nodes.is_lost(before) and nodes.is_lost(GONE)
        raise WorkerDiedError("rank 0 is gone")
    assert caught.value.__notes__ == ["the node other (bbbbbbbb) of the cluster is gone"]
