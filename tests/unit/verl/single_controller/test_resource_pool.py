"""On which nodes the ranks of a run are to be, from what Ray says of the cluster; without a Ray."""

from typing import Any

import pytest

from verl.single_controller.ray import RayResourcePool, resource_pool


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


@pytest.fixture
def pool(monkeypatch) -> Any:
    """A pool in a cluster with a small node, a large one, one with a GPU and one that is gone; a
    placement group is the name of the node that it is on.
    """
    nodes = [
        node("small", CPU=1.0),
        node("large", CPU=3.0),
        node("gpu", CPU=0.5, GPU=2.0),
        node("gone", alive=False, CPU=64.0, GPU=8.0),
        node("bare"),
    ]
    monkeypatch.setattr(resource_pool.ray, "nodes", lambda: nodes)
    others: dict[str, dict[str, Any]] = {}

    def table(group: str | None = None) -> dict[str, Any]:
        return others if group is None else {"bundles_to_node_id": {0: group}}

    monkeypatch.setattr(resource_pool, "placement_group_table", table)
    pool: Any = RayResourcePool([1, 1])
    pool.others = others
    return pool


def test_ranks_go_to_a_node_that_holds_none_of_them_yet(pool):
    assert pool._find_unused_node({"CPU": 0.1}, 10) == "large"
    pool._groups = ["large"]
    assert pool._find_unused_node({"CPU": 0.1}, 10) == "small", "all of it, rounding aside"
    pool._groups = ["large", "small"]
    assert pool._find_unused_node({"CPU": 0.1}, 10) is None, "then they share one"


def test_a_node_has_room_for_all_that_a_rank_asks_for(pool):
    assert pool._find_unused_node({"CPU": 0.25, "GPU": 1.0}, 2) == "gpu"
    assert pool._find_unused_node({"CPU": 0.25, "GPU": 1.0}, 3) is None
    assert pool._find_unused_node({"CPU": 4.0}, 1) is None


def test_what_other_pools_hold_is_no_room(pool):
    def reserved(state: str, bundle: dict[str, float], *places: str) -> dict[str, Any]:
        return {
            "state": state,
            "bundles": dict.fromkeys(range(len(places)), bundle),
            "bundles_to_node_id": dict(enumerate(places)),
        }

    pool.others["engines"] = reserved("CREATED", {"CPU": 1.5}, "large", "large")
    assert pool._find_unused_node({"CPU": 0.1}, 10) == "small"
    pool.others["engines"] = reserved("REMOVED", {"CPU": 1.5}, "large", "large")
    assert pool._find_unused_node({"CPU": 0.1}, 10) == "large"
    pool.others["engines"] = reserved("CREATED", {"CPU": 0.1}, "large")
    assert pool._find_unused_node({"CPU": 0.1}, 10) == "small", (
        "where nobody is, though it has less room"
    )
    assert pool._find_unused_node({"CPU": 0.2}, 10) == "large"
    pool.others["engines"] = reserved("CREATED", {"CPU": 0.1, "GPU": 1.0}, "gpu")
    assert pool._find_unused_node({"CPU": 0.1, "GPU": 1.0}, 2) is None
    assert pool._find_unused_node({"CPU": 0.1, "GPU": 1.0}, 1) == "gpu"
