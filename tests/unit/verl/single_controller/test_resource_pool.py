"""Choice of nodes for the ranks of a run from Ray's view of the cluster, without Ray."""

from typing import Any

import pytest

from verl.single_controller.ray import RayResourcePool, resource_pool


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": resources}


@pytest.fixture
def pool(monkeypatch) -> Any:
    """Return a pool in a cluster with a small node, a large one, one with a GPU and a dead one. A
    placement group is the name of its node."""
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


def test_ranks_prefer_a_node_without_ranks_of_the_pool(pool):
    assert pool._find_unused_node({"CPU": 0.1}, 10) == "large"
    pool._placement_groups = ["large"]
    assert pool._find_unused_node({"CPU": 0.1}, 10) == "small", "the whole node, up to rounding"
    pool._placement_groups = ["large", "small"]
    assert pool._find_unused_node({"CPU": 0.1}, 10) is None, "no unused node is left"


def test_node_needs_capacity_for_all_resources_of_a_rank(pool):
    assert pool._find_unused_node({"CPU": 0.25, "GPU": 1.0}, 2) == "gpu"
    assert pool._find_unused_node({"CPU": 0.25, "GPU": 1.0}, 3) is None
    assert pool._find_unused_node({"CPU": 4.0}, 1) is None


def test_resources_of_other_pools_are_not_available(pool):
    def reserved(state: str, bundle: dict[str, float], *node_names: str) -> dict[str, Any]:
        return {
            "state": state,
            "bundles": dict.fromkeys(range(len(node_names)), bundle),
            "bundles_to_node_id": dict(enumerate(node_names)),
        }

    pool.others["engines"] = reserved("CREATED", {"CPU": 1.5}, "large", "large")
    assert pool._find_unused_node({"CPU": 0.1}, 10) == "small"
    pool.others["engines"] = reserved("REMOVED", {"CPU": 1.5}, "large", "large")
    assert pool._find_unused_node({"CPU": 0.1}, 10) == "large"
    pool.others["engines"] = reserved("CREATED", {"CPU": 0.1}, "large")
    assert pool._find_unused_node({"CPU": 0.1}, 10) == "small", (
        "a node without ranks, though it has less capacity"
    )
    assert pool._find_unused_node({"CPU": 0.2}, 10) == "large"
    pool.others["engines"] = reserved("CREATED", {"CPU": 0.1, "GPU": 1.0}, "gpu")
    assert pool._find_unused_node({"CPU": 0.1, "GPU": 1.0}, 2) is None
    assert pool._find_unused_node({"CPU": 0.1, "GPU": 1.0}, 1) == "gpu"
