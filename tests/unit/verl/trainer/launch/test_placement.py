"""What a cluster cannot hold is said by what Ray knows of its nodes, on a real Ray with pretended
GPUs too.
"""

import pytest
import ray

from tests.helpers.play import make_config
from tests.helpers.refusals import mentions
from verl.config.derive import engine_count
from verl.config.settings import ConfigError
from verl.names import Device
from verl.single_controller.ray import RayResourcePool, init_ray
from verl.trainer.launch import ppo as launch
from verl.trainer.launch.run_plan import (
    ClusterNode,
    RunPlan,
    choose_device,
    find_placement_problems,
    list_live_nodes,
)
from verl.trainer.ppo.resources import ResourcePoolManager, Role

GPU_NODE = ClusterNode("big", cpus=32.0, gpus=4.0)
HEAD = ClusterNode("head", cpus=4.0, gpus=0.0)


def config(device: Device = "auto", ranks=2, nnodes=1, engines: int | None = 1, parallel=1):
    cfg = make_config()
    cfg.trainer.device = device
    cfg.trainer.n_gpus_per_node = ranks
    cfg.trainer.nnodes = nnodes
    cfg.actor_rollout_ref.rollout.num_workers = engines
    cfg.actor_rollout_ref.rollout.tensor_model_parallel_size = parallel
    return cfg


def plan_of(cfg, device="cuda"):
    return RunPlan(cfg, device, engine_count(cfg, device))


def said(cfg, *nodes, groups=3, cpus=1.0):
    return list(find_placement_problems(cfg, nodes, groups, cpus))


def test_auto_takes_the_gpus_of_the_cluster_and_not_those_of_the_driver():
    assert choose_device("auto", [HEAD, GPU_NODE]) == "cuda"
    assert choose_device("auto", [HEAD]) == "cpu"
    assert choose_device("cpu", [GPU_NODE]) == "cpu" and choose_device("cuda", [HEAD]) == "cuda"


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
        (config("cuda"), [HEAD], "trainer.device='cuda'", "0 GPUs, 4 CPUs"),
        (config(ranks=8), [HEAD, GPU_NODE], "trainer.n_gpus_per_node=8", "0"),
        (config(ranks=4, nnodes=2), [HEAD, GPU_NODE], "trainer.nnodes=2", "1"),
        (config(ranks=3, nnodes=2), [GPU_NODE, GPU_NODE], "", ""),
        # 12 CPUs for four ranks, of which the node has 11
        (config(ranks=4), [ClusterNode("thin", 11.0, 4.0)], "trainer.n_gpus_per_node=4", "12 CPUs"),
        (config(engines=3), [GPU_NODE], "actor_rollout_ref.rollout.num_workers=3", "2"),
        (
            config(engines=2, parallel=2),
            [GPU_NODE],
            "actor_rollout_ref.rollout.num_workers=2",
            "2 devices",
        ),
        (config("cpu", ranks=20), [HEAD], "trainer.n_gpus_per_node=20", "60 CPUs"),
    ],
)
def test_what_does_not_fit_is_said_with_what_there_is(cfg, nodes, key, why):
    found = said(cfg, *nodes)
    if not key:
        assert found == []
        return
    (message,) = found
    assert message.startswith(f"{key}: ") and why in message and "; fix: " in message


def test_what_only_gpus_can_do_is_refused_where_a_cluster_has_none():
    cfg = config()
    cfg.actor_rollout_ref.rollout.weight_transfer = "ipc"
    cfg.actor_rollout_ref.model.attn_implementation = "flex"
    assert said(cfg, GPU_NODE) == []
    attention, transfer = said(cfg, ClusterNode("no GPU", cpus=32.0, gpus=0.0))
    assert attention.startswith("actor_rollout_ref.model.attn_implementation='flex': ")
    assert transfer.startswith("actor_rollout_ref.rollout.weight_transfer='ipc': ")


def with_own(nodes, gpus, **more):
    cfg = config(engines=None, **more)
    cfg.actor_rollout_ref.rollout.nnodes = nodes
    cfg.actor_rollout_ref.rollout.n_gpus_per_node = gpus
    return cfg


SMALL = ClusterNode("small", cpus=32.0, gpus=2.0)


@pytest.mark.parametrize(
    ("cfg", "nodes", "key", "why"),
    [
        (with_own(1, 2, ranks=2), [GPU_NODE], "", "both on one"),
        (with_own(1, 4, ranks=2), [GPU_NODE, SMALL], "", "the larger pool goes to the larger node"),
        (with_own(1, 2, ranks=4), [SMALL, GPU_NODE], "", "whichever that is"),
        (with_own(2, 2, ranks=4), [SMALL, GPU_NODE], "rollout.nnodes=2", "1"),
        (
            with_own(1, 3, ranks=2),
            [GPU_NODE],
            "trainer.nnodes=1",
            "only 0 fit in addition to the engines: big has 4",
        ),
        (
            with_own(1, 2, ranks=3),
            [GPU_NODE],
            "rollout.nnodes=1",
            "big",
        ),
        (with_own(1, 5, ranks=3), [GPU_NODE], "rollout.n_gpus_per_node=5", "big has 4"),
        (with_own(1, None, ranks=2), [SMALL], "rollout.nnodes=1", "0"),
        # 2 x 2 CPUs for the ranks of two groups, and one for each engine
        (with_own(1, 2, ranks=2), [ClusterNode("thin", 6.0, 4.0)], "", ""),
        (with_own(1, 2, ranks=2), [ClusterNode("thin", 5.0, 4.0)], "rollout.nnodes=1", "2 CPUs"),
        # each on a node of its own, though both fit on the larger
        (with_own(2, 2, ranks=2), [ClusterNode("wide", 32.0, 6.0), SMALL], "", ""),
    ],
)
def test_engines_with_gpus_of_their_own_need_room_beside_the_ranks(cfg, nodes, key, why):
    found = said(cfg, *nodes)
    if not key:
        assert found == [], why
        return
    (message,) = found
    assert key in message.split(": ")[0] and why in message


def test_shares_of_cpus_add_up():
    assert said(config("cpu", ranks=4), ClusterNode("small", 1.2, 0.0), cpus=0.1) == []
    assert said(config("cpu", ranks=4), ClusterNode("small", 1.1, 0.0), cpus=0.1) != []


def test_nodes_are_those_that_live():
    described = [
        {"Alive": True, "NodeManagerHostname": "a", "Resources": {"CPU": 2.0, "GPU": 1.0}},
        {"Alive": False, "NodeManagerHostname": "b", "Resources": {"CPU": 2.0}},
        {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {}},
    ]
    assert list_live_nodes(described) == [
        ClusterNode("a", 2.0, 1.0),
        ClusterNode("10.0.0.1", 0.0, 0.0),
    ]


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

    def shared_actor_options(self, device):
        self.given.append(device)
        return {}

    def query_device_ids(self):
        return [f"{node}:{device}" for node in "ab" for device in range(4)]


class Started:
    """In the place of a remote rollout worker's class: notes what workers are made with."""

    def __init__(self):
        self.made: list[dict] = []

    def options(self, **options):
        assert options == {"max_concurrency": 64}
        return self

    def remote(self, _config, _path, **arguments):
        self.made.append(arguments)


@pytest.fixture
def start(monkeypatch):
    """Start the engines of a config; where they were put, and what they were made with."""

    def run(cfg):
        remote = Started()
        monkeypatch.setattr(launch.ray, "remote", lambda _cls: remote)
        pool = Devices()
        pools = ResourcePoolManager(
            {}, {Role.Rollout: "pool"}, use_gpu=True, resource_pool_dict={"pool": pool}
        )
        launch.start_rollout_workers(plan_of(cfg), pools)
        return pool.given, remote.made

    return run


@pytest.mark.parametrize(
    ("engines", "devices"), [(2, [0, 4]), (3, [0, 2, 5]), (None, [0, 1, 2, 3, 4, 5, 6, 7])]
)
def test_engines_are_spread_over_the_devices_and_so_over_the_nodes(start, engines, devices):
    given, made = start(config("cuda", ranks=4, nnodes=2, engines=engines))
    assert given == devices
    seeds = [arguments["seed"] for arguments in made]
    assert seeds == list(range(len(devices))), "every engine samples with a seed of its own"
    assert all(arguments["devices"] == [] for arguments in made), "Ray gives each its own"


@pytest.mark.parametrize(
    ("engines", "parallel", "first"),
    [(None, 2, [0, 2, 4, 6]), (None, 4, [0, 4]), (3, 2, [0, 2, 4]), (2, 2, [0, 4]), (1, 4, [0])],
)
def test_an_engine_gets_neighbouring_devices_of_one_node(start, engines, parallel, first):
    given, made = start(config("cuda", ranks=4, nnodes=2, engines=engines, parallel=parallel))
    assert given == first
    every = Devices().query_device_ids()
    assert [arguments["devices"] for arguments in made] == [
        every[device : device + parallel] for device in first
    ]
    assert all(len({name[0] for name in arguments["devices"]}) == 1 for arguments in made)


def test_engines_get_gpus_on_which_nothing_is_trained(monkeypatch):
    """With pretended GPUs: two engines of two each, and two ranks of two groups."""

    class Seen:
        """In the place of a rollout worker: the GPU that Ray gave it, and all that it is to use."""

        def __init__(self, *_: object, devices: list[str], **__: object) -> None:
            self.devices = devices

        def where(self) -> tuple[str, list[str]]:
            (own,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
            return own, self.devices

    init_ray(num_cpus=16, num_gpus=6)
    try:
        cfg = with_own(1, 4, ranks=2, parallel=2)
        pools = launch.create_pools(cfg, "cuda", [Role.Actor, Role.Critic])
        assert not pools.share_pool(Role.Actor, Role.Rollout) and pools.share_pool(
            Role.Actor, Role.Critic
        )
        pools.reserve_pools()
        trained = pools.get_resource_pool(Role.Actor)
        played = pools.get_resource_pool(Role.Rollout)
        assert trained.actor_resources() == {"num_cpus": 1.0, "num_gpus": 0.5}
        assert played.actor_resources() == {"num_cpus": 1.0, "num_gpus": 1.0}
        theirs = set(played.query_device_ids())
        assert len(theirs) == 4 and not theirs & set(trained.query_device_ids())
        monkeypatch.setattr(launch, "RolloutWorker", Seen)
        engines = launch.start_rollout_workers(plan_of(cfg), pools)
        found = ray.get([engine.where.remote() for engine in engines], timeout=120)
        assert [devices[0] for _, devices in found] == [own for own, _ in found]
        assert {device for _, devices in found for device in devices} == theirs
        assert all(len(devices) == 2 for _, devices in found)
        for engine in engines:
            ray.kill(engine)
        pools.shutdown()
    finally:
        ray.shutdown()


def test_the_devices_of_a_pool_are_those_that_ray_gives_to_its_guests():
    """With pretended GPUs: the first half is taken, so that numbers and slots differ."""
    init_ray(num_cpus=8, num_gpus=4)
    try:
        with (
            RayResourcePool([2], use_gpu=True, name_prefix="taken") as taken,
            RayResourcePool([2], use_gpu=True, max_colocate_count=3, cpus_per_worker=0.5) as pool,
        ):
            assert not set(taken.query_device_ids()) & set(pool.query_device_ids())
            found = pool.query_device_ids()
            own = ray.remote(lambda: ray.get_runtime_context().get_accelerator_ids()["GPU"])
            for slot, device in enumerate(found):
                guest = own.options(**pool.shared_actor_options(slot)).remote()
                assert ray.get(guest, timeout=60) == [device]
            assert len(set(found)) == 2
    finally:
        ray.shutdown()


def test_on_a_ray_with_pretended_gpus_the_driver_takes_its_word_for_them():
    """PyTorch sees no GPU here, as on the head node of most clusters."""
    init_ray(num_cpus=8, num_gpus=2)
    try:
        cfg = config(ranks=2, engines=None)
        plan = launch.choose_devices(cfg, joined=True)
        assert plan.device == plan.config.trainer.device == "cuda"
        assert plan.engines == plan.config.actor_rollout_ref.rollout.num_workers == 2
        plan = launch.choose_devices(cfg, joined=False)
        assert (plan.device, plan.engines) == ("cpu", 1)
        assert cfg.trainer.device == "auto"
        assert cfg.actor_rollout_ref.rollout.num_workers is None
        with pytest.raises(ConfigError, check=mentions("n_gpus_per_node=3", 0, 2)):
            launch.choose_devices(config(ranks=3), joined=True)
    finally:
        ray.shutdown()


@pytest.mark.parametrize("key", ["use_kl_loss", "use_kl_in_reward"])
def test_a_reference_lives_in_the_processes_of_the_actor(key):
    cfg = config()
    assert [
        spec.role_names for spec in launch.build_worker_specs(plan_of(cfg, "cpu")).values()
    ] == [["actor"]]
    section = cfg.algorithm if key == "use_kl_in_reward" else cfg.actor_rollout_ref.actor
    setattr(section, key, True)
    assert {
        role: spec.role_names
        for role, spec in launch.build_worker_specs(plan_of(cfg, "cpu")).items()
    } == {Role.Actor: ["actor", "ref"]}
