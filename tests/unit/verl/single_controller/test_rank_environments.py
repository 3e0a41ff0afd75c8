"""Tests of the environment variables of ranks, with which they find each other."""

import socket

import psutil

from verl.single_controller.ray.host import find_network_interface
from verl.single_controller.ray.worker_group import make_rank_environments


def make_location(node, interface=""):
    return {"node_id": node, "ip": "", "interface": interface, "pid": 1}


def test_ranks_of_several_nodes_use_the_interface_of_the_node_address():
    placement = [make_location("a", "eth0"), make_location("a", "eth0"), make_location("b", "ib0")]
    environments = make_rank_environments(placement, "10.0.0.1", 29500)
    assert [e["GLOO_SOCKET_IFNAME"] for e in environments] == ["eth0", "eth0", "ib0"]
    assert [e["LOCAL_RANK"] for e in environments] == ["0", "1", "0"]
    # NCCL ignores loopback interfaces itself.
    assert not any("NCCL_SOCKET_IFNAME" in e for e in environments)


def test_without_an_interface_gloo_chooses():
    (environment,) = make_rank_environments([make_location("a")], "10.0.0.1", 29500)
    assert "GLOO_SOCKET_IFNAME" not in environment


def test_ranks_of_one_machine_use_the_loopback_interface():
    placement = [make_location("a", "eth0")]
    (environment,) = make_rank_environments(placement, "127.0.0.1", 29500)
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"]
    assert environment["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_interface_has_the_address():
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                assert find_network_interface(address.address) == name
    assert find_network_interface("203.0.113.7") == ""
