"""What a cluster cannot hold is said by what Ray knows of its nodes, on a real Ray with pretended
GPUs too.
"""

import pytest
import ray

from tests.helpers.play import make_config
from verl.names import Device
from verl.single_controller.ray import RayResourcePool, init_ray
from verl.trainer.config.derive import engine_count
from verl.trainer.launch import ppo as launch
from verl.trainer.launch.placement import Node, device_of, nodes_of, placement_problems
from verl.trainer.ppo.resources import ResourcePoolManager, Role
from verl.utils.settings import ConfigError

GPU_NODE = Node("big", cpus=32.0, gpus=4.0)
HEAD = Node("head", cpus=4.0, gpus=0.0)


def config(device: Device = "auto", ranks=2, nnodes=1, engines: int | None = 1, parallel=1):
    cfg = make_config()
    cfg.trainer.device = device
    cfg.trainer.n_gpus_per_node = ranks
    cfg.trainer.nnodes = nnodes
    cfg.actor_rollout_ref.rollout.num_workers = engines
    cfg.actor_rollout_ref.rollout.tensor_model_parallel_size = parallel
    return cfg


def said(cfg, *nodes, groups=3, cpus=1.0):
    return list(placement_problems(cfg, nodes, groups, cpus))


def test_auto_takes_the_gpus_of_the_cluster_and_not_those_of_the_driver():
    assert device_of("auto", [HEAD, GPU_NODE]) == "cuda"
    assert device_of("auto", [HEAD]) == "cpu"
    assert device_of("cpu", [GPU_NODE]) == "cpu" and device_of("cuda", [HEAD]) == "cuda"


@pytest.mark.parametrize(
    "cfg",
    [
        config(),
        config(ranks=4, engines=4),
        config(device="cpu", ranks=8, engines=9, parallel=2),
        config(ranks=4, engines=None),
    ],
)
def test_what_fits_is_let_through(cfg):
    assert said(cfg, HEAD, GPU_NODE) == []


@pytest.mark.parametrize(
    ("cfg", "nodes", "key", "why"),
    [
        (config("cuda"), [HEAD], "trainer.device='cuda'", "head has 0 GPUs, 4 CPUs"),
        (config(ranks=8), [HEAD, GPU_NODE], "trainer.n_gpus_per_node=8", "room for 0"),
        (config(ranks=4, nnodes=2), [HEAD, GPU_NODE], "trainer.nnodes=2", "room for 1"),
        (config(ranks=3, nnodes=2), [GPU_NODE, GPU_NODE], "", ""),
        # 12 CPUs for four ranks, of which the node has 11
        (config(ranks=4), [Node("thin", 11.0, 4.0)], "trainer.n_gpus_per_node=4", "12 CPUs"),
        (config(engines=3), [GPU_NODE], "actor_rollout_ref.rollout.num_workers=3", "2 or fewer"),
        (
            config(parallel=2),
            [GPU_NODE],
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "one process",
        ),
        (config("cpu", ranks=20), [HEAD], "trainer.n_gpus_per_node=20", "0 GPUs and 60 CPUs"),
    ],
)
def test_what_does_not_fit_is_said_with_what_there_is(cfg, nodes, key, why):
    found = said(cfg, *nodes)
    if not key:
        assert found == []
        return
    (message,) = found
    assert message.startswith(f"{key}: ") and why in message and "; fix: " in message


def test_shares_of_cpus_add_up():
    assert said(config("cpu", ranks=4), Node("small", 1.2, 0.0), cpus=0.1) == []
    assert said(config("cpu", ranks=4), Node("small", 1.1, 0.0), cpus=0.1) != []


def test_nodes_are_those_that_live():
    described = [
        {"Alive": True, "NodeManagerHostname": "a", "Resources": {"CPU": 2.0, "GPU": 1.0}},
        {"Alive": False, "NodeManagerHostname": "b", "Resources": {"CPU": 2.0}},
        {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {}},
    ]
    assert nodes_of(described) == [Node("a", 2.0, 1.0), Node("10.0.0.1", 0.0, 0.0)]


def test_engines_that_nobody_counted_are_one_per_gpu_or_one_per_node():
    cfg = config(ranks=4, nnodes=2, engines=None)
    assert engine_count(cfg, "cuda") == 8
    assert engine_count(cfg, "cpu") == 2
    assert engine_count(config(ranks=4, engines=3), "cuda") == 3


class Devices(RayResourcePool):
    """Two nodes of four, that note who is put where."""

    def __init__(self):
        super().__init__([4, 4])
        self.given: list[int] = []

    def guest_options(self, device):
        self.given.append(device)
        return {}


@pytest.mark.parametrize(
    ("engines", "devices"), [(2, [0, 4]), (3, [0, 2, 5]), (None, [0, 1, 2, 3, 4, 5, 6, 7])]
)
def test_engines_are_spread_over_the_devices_and_so_over_the_nodes(monkeypatch, engines, devices):
    made = []

    class Remote:
        def options(self, **options):
            assert options == {"max_concurrency": 64}
            return self

        def remote(self, _config, _path, **arguments):
            made.append(arguments["seed"])
            return len(made)

    monkeypatch.setattr(launch.ray, "remote", lambda _cls: Remote())
    pool = Devices()
    pools = ResourcePoolManager({}, {Role.Rollout: "pool"}, resource_pool_dict={"pool": pool})
    launch.start_rollout_workers(config("cuda", ranks=4, nnodes=2, engines=engines), pools)
    assert pool.given == devices
    assert made == list(range(len(devices))), "every engine samples with a seed of its own"


def test_on_a_ray_with_pretended_gpus_the_driver_takes_its_word_for_them():
    """PyTorch sees no GPU here, as on the head node of most clusters."""
    init_ray(num_cpus=8, num_gpus=2)
    try:
        cfg = config(ranks=2, engines=None)
        assert launch.choose_device(cfg, joined=True) == cfg.trainer.device == "cuda"
        assert cfg.actor_rollout_ref.rollout.num_workers == 2
        cfg = config(ranks=2, engines=None)
        assert launch.choose_device(cfg, joined=False) == "cpu"
        assert cfg.actor_rollout_ref.rollout.num_workers == 1
        with pytest.raises(ConfigError, match=r"n_gpus_per_node=3: .*room for 0: .* has 2 GPUs"):
            launch.choose_device(config(ranks=3), joined=True)
    finally:
        ray.shutdown()
