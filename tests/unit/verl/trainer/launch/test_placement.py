"""Placement problems of a cluster follow from Ray's list of nodes. Some tests use Ray with
simulated GPUs."""

import pytest
import ray

from tests.helpers.number_line_world import make_config
from tests.helpers.refusals import mentions
from verl.config.derive import count_engines
from verl.config.settings import ConfigError
from verl.names import Device
from verl.single_controller.ray import RayResourcePool, init_ray
from verl.single_controller.ray.local import stop_ray
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
    return cfg.with_values(
        {
            "trainer.device": device,
            "actor_rollout_ref.rollout.num_workers": count_engines(cfg, device),
        }
    )


def placement_problems(cfg, *nodes, groups=3, cpus=1.0):
    return list(find_placement_problems(cfg, nodes, groups, cpus))


def test_auto_device_uses_the_gpus_of_the_cluster():
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
def test_fitting_placement_has_no_problem(cfg):
    assert placement_problems(cfg, HEAD, GPU_NODE) == []


@pytest.mark.parametrize(
    ("cfg", "nodes", "key", "why"),
    [
        (config("cuda"), [HEAD], "trainer.device='cuda'", "0 GPUs, 4 CPUs"),
        (config(ranks=8), [HEAD, GPU_NODE], "trainer.n_gpus_per_node=8", "0"),
        (config(ranks=4, nnodes=2), [HEAD, GPU_NODE], "trainer.nnodes=2", "1"),
        (config(ranks=3, nnodes=2), [GPU_NODE, GPU_NODE], "", ""),
        # four ranks need 12 CPUs, and the node has 11
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
def test_misfit_is_refused_with_the_available_resources(cfg, nodes, key, why):
    reported = placement_problems(cfg, *nodes)
    if not key:
        assert reported == []
        return
    (message,) = reported
    assert message.startswith(f"{key}: ") and why in message and "; fix: " in message


def test_gpu_features_are_refused_on_a_cluster_without_gpus():
    cfg = config()
    cfg.actor_rollout_ref.rollout.weight_transfer = "ipc"
    cfg.actor_rollout_ref.model.attn_implementation = "flex"
    assert placement_problems(cfg, GPU_NODE) == []
    attention, transfer = placement_problems(cfg, ClusterNode("no GPU", cpus=32.0, gpus=0.0))
    assert attention.startswith("actor_rollout_ref.model.attn_implementation='flex': ")
    assert transfer.startswith("actor_rollout_ref.rollout.weight_transfer='ipc': ")


def config_with_engine_gpus(nodes, gpus, **options):
    cfg = config(engines=None, **options)
    cfg.actor_rollout_ref.rollout.nnodes = nodes
    cfg.actor_rollout_ref.rollout.n_gpus_per_node = gpus
    return cfg


SMALL = ClusterNode("small", cpus=32.0, gpus=2.0)


@pytest.mark.parametrize(
    ("cfg", "nodes", "key", "why"),
    [
        (config_with_engine_gpus(1, 2, ranks=2), [GPU_NODE], "", "both on one node"),
        (
            config_with_engine_gpus(1, 4, ranks=2),
            [GPU_NODE, SMALL],
            "",
            "the larger pool goes to the larger node",
        ),
        (config_with_engine_gpus(1, 2, ranks=4), [SMALL, GPU_NODE], "", "in any order of nodes"),
        (config_with_engine_gpus(2, 2, ranks=4), [SMALL, GPU_NODE], "rollout.nnodes=2", "1"),
        (
            config_with_engine_gpus(1, 3, ranks=2),
            [GPU_NODE],
            "trainer.nnodes=1",
            "big has 4",
        ),
        (
            config_with_engine_gpus(1, 2, ranks=3),
            [GPU_NODE],
            "rollout.nnodes=1",
            "big",
        ),
        (
            config_with_engine_gpus(1, 5, ranks=3),
            [GPU_NODE],
            "rollout.n_gpus_per_node=5",
            "big has 4",
        ),
        (config_with_engine_gpus(1, None, ranks=2), [SMALL], "rollout.nnodes=1", "0"),
        # 2 x 2 CPUs for the ranks of two groups, and one for each engine
        (config_with_engine_gpus(1, 2, ranks=2), [ClusterNode("thin", 6.0, 4.0)], "", ""),
        (
            config_with_engine_gpus(1, 2, ranks=2),
            [ClusterNode("thin", 5.0, 4.0)],
            "rollout.nnodes=1",
            "2 CPUs",
        ),
        # each on a separate node, although both fit on the larger one
        (config_with_engine_gpus(2, 2, ranks=2), [ClusterNode("wide", 32.0, 6.0), SMALL], "", ""),
    ],
)
def test_separate_engine_gpus_need_capacity_in_addition_to_ranks(cfg, nodes, key, why):
    reported = placement_problems(cfg, *nodes)
    if not key:
        assert reported == [], why
        return
    (message,) = reported
    assert key in message.split(": ")[0] and why in message


def test_fractions_of_cpus_are_added_up():
    assert (
        placement_problems(config("cpu", ranks=4), ClusterNode("small", 1.2, 0.0), cpus=0.1) == []
    )
    assert (
        placement_problems(config("cpu", ranks=4), ClusterNode("small", 1.1, 0.0), cpus=0.1) != []
    )


def test_only_live_nodes_are_listed():
    described = [
        {"Alive": True, "NodeManagerHostname": "a", "Resources": {"CPU": 2.0, "GPU": 1.0}},
        {"Alive": False, "NodeManagerHostname": "b", "Resources": {"CPU": 2.0}},
        {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {}},
    ]
    assert list_live_nodes(described) == [
        ClusterNode("a", 2.0, 1.0),
        ClusterNode("10.0.0.1", 0.0, 0.0),
    ]


def test_unset_engine_count_is_one_per_gpu_or_per_node():
    cfg = config(ranks=4, nnodes=2, engines=None)
    assert count_engines(cfg, "cuda") == 8
    assert count_engines(cfg, "cpu") == 2
    assert count_engines(config(ranks=4, engines=3), "cuda") == 3


class RecordingPool(RayResourcePool):
    """Pool of two nodes with four devices each. It records the requested devices."""

    def __init__(self):
        super().__init__([4, 4])
        self.requested: list[int] = []

    def shared_actor_options(self, device):
        self.requested.append(device)
        return {}

    def query_device_ids(self):
        return [f"{node}:{device}" for node in "ab" for device in range(4)]


class RecordingWorkerClass:
    """Replaces the class of remote rollout workers, and records their arguments."""

    def __init__(self):
        self.created: list[dict] = []

    def options(self, **options):
        assert options == {"max_concurrency": 64}
        return self

    def remote(self, _config, _path, **arguments):
        self.created.append(arguments)


@pytest.fixture
def start(monkeypatch):
    """Return a function that starts the engines of a config, and returns their devices and
    arguments."""

    def run(cfg, device="cuda"):
        remote = RecordingWorkerClass()
        monkeypatch.setattr(launch.ray, "remote", lambda _cls: remote)
        pool = RecordingPool()
        pools = ResourcePoolManager(
            {},
            {Role.Rollout: "pool"},
            use_gpu=device == "cuda",
            resource_pool_dict={"pool": pool},
        )
        launch.start_rollout_workers(plan_of(cfg, device), pools)
        return pool.requested, remote.created

    return run


@pytest.mark.parametrize(
    ("engines", "devices"), [(2, [0, 4]), (3, [0, 2, 5]), (None, [0, 1, 2, 3, 4, 5, 6, 7])]
)
def test_engines_are_distributed_over_devices_and_nodes(start, engines, devices):
    requested, created = start(config("cuda", ranks=4, nnodes=2, engines=engines))
    assert requested == devices
    seeds = [arguments["seed"] for arguments in created]
    assert seeds == list(range(len(devices))), "every engine has a different seed"
    assert all(arguments["devices"] == [] for arguments in created), "Ray assigns the devices"


@pytest.mark.parametrize(
    ("engines", "parallel", "first"),
    [(None, 2, [0, 2, 4, 6]), (None, 4, [0, 4]), (3, 2, [0, 2, 4]), (2, 2, [0, 4]), (1, 4, [0])],
)
def test_engine_gets_adjacent_devices_of_one_node(start, engines, parallel, first):
    requested, created = start(
        config("cuda", ranks=4, nnodes=2, engines=engines, parallel=parallel)
    )
    assert requested == first
    all_devices = RecordingPool().query_device_ids()
    assert [arguments["devices"] for arguments in created] == [
        all_devices[device : device + parallel] for device in first
    ]
    assert all(len({name[0] for name in arguments["devices"]}) == 1 for arguments in created)


def test_separate_engines_get_gpus_without_training_ranks(monkeypatch):
    """Simulated GPUs: two engines with two each, and two ranks of two groups."""

    class DeviceReporter:
        """Replaces the rollout worker. Returns the GPU assigned by Ray, and all devices to use."""

        def __init__(self, *_: object, devices: list[str], **__: object) -> None:
            self.devices = devices

        def report(self) -> tuple[str, list[str]]:
            (assigned,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
            return assigned, self.devices

    init_ray(num_cpus=16, num_gpus=6)
    try:
        cfg = config_with_engine_gpus(1, 4, ranks=2, parallel=2)
        pools = launch.create_pools(cfg, "cuda", [Role.Actor, Role.Critic])
        assert not pools.is_pool_shared(Role.Actor, Role.Rollout) and pools.is_pool_shared(
            Role.Actor, Role.Critic
        )
        pools.reserve_pools()
        training_pool = pools.get_resource_pool(Role.Actor)
        engine_pool = pools.get_resource_pool(Role.Rollout)
        assert training_pool.actor_resources() == {"num_cpus": 1.0, "num_gpus": 0.5}
        assert engine_pool.actor_resources() == {"num_cpus": 1.0, "num_gpus": 1.0}
        engine_devices = set(engine_pool.query_device_ids())
        assert len(engine_devices) == 4 and not engine_devices & set(
            training_pool.query_device_ids()
        )
        monkeypatch.setattr(launch, "RolloutWorker", DeviceReporter)
        engines = launch.start_rollout_workers(plan_of(cfg), pools)
        reports = ray.get([engine.report.remote() for engine in engines], timeout=120)
        assert [devices[0] for _, devices in reports] == [assigned for assigned, _ in reports]
        assert {device for _, devices in reports for device in devices} == engine_devices
        assert all(len(devices) == 2 for _, devices in reports)
        for engine in engines:
            ray.kill(engine)
        pools.shutdown()
    finally:
        stop_ray()


def test_device_ids_of_a_pool_match_those_of_shared_actors():
    """Simulated GPUs: the first half is in use, so device numbers and slots differ."""
    init_ray(num_cpus=8, num_gpus=4)
    try:
        used = RayResourcePool([2], use_gpu=True, name_prefix="used")
        pool = RayResourcePool([2], use_gpu=True, max_colocate_count=3, cpus_per_worker=0.5)
        assert not set(used.query_device_ids()) & set(pool.query_device_ids())
        device_ids = pool.query_device_ids()
        remote_gpu_ids = ray.remote(lambda: ray.get_runtime_context().get_accelerator_ids()["GPU"])
        for slot, device in enumerate(device_ids):
            actor = remote_gpu_ids.options(**pool.shared_actor_options(slot)).remote()
            assert ray.get(actor, timeout=60) == [device]
        assert len(set(device_ids)) == 2
    finally:
        stop_ray()


def test_driver_without_gpu_uses_the_gpus_that_ray_reports():
    """PyTorch sees no GPU here, as on the head node of most clusters."""
    init_ray(num_cpus=8, num_gpus=2)
    try:
        cfg = config(ranks=2, engines=None)
        for is_joined, device, engines in ((True, "cuda", 2), (False, "cpu", 1)):
            plan = launch.resolve_device_settings(RunPlan(cfg), is_cluster_joined=is_joined)
            assert plan.config.trainer.device == device
            assert plan.config.actor_rollout_ref.rollout.num_workers == engines
        assert cfg.trainer.device == "auto"
        assert cfg.actor_rollout_ref.rollout.num_workers is None
        with pytest.raises(ConfigError, check=mentions("n_gpus_per_node=3", 0, 2)):
            launch.resolve_device_settings(RunPlan(config(ranks=3)), is_cluster_joined=True)
    finally:
        stop_ray()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_workers_on_cpu_see_no_gpu(start, device, engine):
    """Ray 2.60 leaves CUDA_VISIBLE_DEVICES unchanged for actors without GPUs."""
    cfg = config(device, ranks=4, nnodes=2, engines=2)
    cfg.actor_rollout_ref.rollout.name = engine
    hides_gpus = device == "cpu"
    (spec,) = launch.build_worker_specs(plan_of(cfg, device)).values()
    assert spec.env_vars.get("CUDA_VISIBLE_DEVICES") == ("" if hides_gpus else None)
    _, created = start(cfg, device)
    # The CUDA build of vLLM does not run without a GPU.
    expected = "" if hides_gpus and engine == "hf" else None
    assert [arguments["env"].get("CUDA_VISIBLE_DEVICES") for arguments in created] == [expected] * 2


@pytest.mark.parametrize("key", ["use_kl_loss", "use_kl_in_reward"])
def test_reference_shares_the_processes_of_the_actor(key):
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
