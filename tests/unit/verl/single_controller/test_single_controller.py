"""Worker groups on a local Ray: dispatch, padding, errors, deadlines, death, colocation, process
groups."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch

from tests.helpers.refusals import mentions, suggests
from verl.protocol import DataProto
from verl.single_controller.base import (
    Dispatch,
    Execute,
    GroupFuture,
    Worker,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
    register,
)
from verl.single_controller.base.decorator import (
    MethodRegistration,
    collect_registered_methods,
    plan_calls,
)
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    init_ray,
)
from verl.single_controller.ray.local import PRIVATE_DIRECTORY, find_ray_token_path, stop_ray
from verl.trainer.ppo.metrics import reduce_metrics


class Echo(Worker):
    def __init__(self, factor: int = 2, bias: int = 0):
        self.factor, self.bias, self.seen = factor, bias, []
        self.lock: asyncio.Lock | None = None
        self.waited = 0

    @register(Dispatch.ONE_TO_ALL)
    def describe(self, note=None):
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "ECHO_VARIABLE",
        )
        return {**{name: os.environ.get(name) for name in names}, "note": note, "pid": os.getpid()}

    @register(Dispatch.DP_COMPUTE_PROTO)
    def scale(self, data: DataProto, extra: int = 0) -> DataProto:
        data.batch["x"].mul_(self.factor).add_(
            extra
        )  # in place: received tensors belong to the worker
        rows = np.full(len(data), self.rank)
        padding = np.full(len(data), data.meta_info["padding_rows"])
        meta = {"metrics": {"rank": self.rank}, "temperature": data.meta_info.get("temperature")}
        return DataProto.from_dict(
            {"y": data.batch["x"] + self.bias}, {"rank": rows, "padding": padding}, meta
        )

    @register(Dispatch.DP_COMPUTE_PROTO)
    def half(self, data: DataProto) -> DataProto:
        return data[: len(data) // 2]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def only_metrics(self, data: DataProto) -> DataProto:
        names = ("rank", "rank_max", "rank_sum")
        metrics = {"rows": len(data), **dict.fromkeys(names, self.rank)}
        return DataProto(meta_info={"metrics": metrics})

    @register(Dispatch.DP_COMPUTE_PROTO)
    async def scaled_later(self, data: DataProto) -> DataProto:
        await asyncio.sleep(0)
        return DataProto.from_dict({"y": data.batch["x"] * 2})

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def wait_for_lock(self, seconds: float) -> tuple[int, int]:
        self.lock = self.lock or asyncio.Lock()
        async with self.lock:
            await asyncio.sleep(seconds)
            self.waited += 1
        return self.rank, self.waited

    @register(Dispatch.ONE_TO_ALL)
    async def fail_later(self):
        raise ValueError("cannot do that later")

    @register(Dispatch.ONE_TO_ALL)
    async def hang_later(self):
        await asyncio.sleep(1)

    async def unregistered_later(self):
        return self.unregistered()

    @register(Dispatch.ALL_TO_ALL)
    def add(self, a, b):
        return a + b

    @register(Dispatch.DP_COMPUTE)
    def negate(self, a):
        return -a

    @register(Dispatch.RANK_ZERO)
    def who(self):
        return self.rank

    @register(Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def who_too(self):
        return self.rank

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def slow(self, seconds):
        time.sleep(seconds)
        return self.rank

    @register(Dispatch.ONE_TO_ALL)
    def hang(self):
        if self.rank == 1:
            time.sleep(1)

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, rank):
        if self.rank == rank:
            raise ValueError("cannot do that")
        time.sleep(1)

    @register(Dispatch.ONE_TO_ALL)
    def die_on(self, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(30)

    @register(Dispatch.ONE_TO_ALL)
    def total(self, value):
        tensor = torch.tensor([float(value + self.rank)])
        torch.distributed.all_reduce(tensor)
        return tensor.item()

    @register(Dispatch.ONE_TO_ALL)
    def sum_after_death_of(self, rank):
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.total(0)

    def unregistered(self):
        return "hidden"


class Broken(Worker):
    def __init__(self):
        raise RuntimeError("no such model")


@pytest.fixture(scope="module")
def sockets_before():
    """Return the sockets on which the test process already listens."""
    return frozenset((psutil.Process().pid, port) for _, port in sockets(psutil.Process()))


@pytest.fixture(scope="module")
def cluster(sockets_before):
    facts = init_ray(num_cpus=4, object_store_gb=0.2)
    yield facts
    stop_ray()


@pytest.fixture(scope="module")
def pool(cluster):
    pool = RayResourcePool([2], max_colocate_count=2, cpus_per_worker=0.5)
    yield pool
    pool.shutdown()


@pytest.fixture(scope="module")
def group(pool):
    spec = RayClassWithInitArgs(Echo, 2, bias=100, env_vars={"ECHO_VARIABLE": "set"})
    group = RayWorkerGroup(pool, spec, call_timeout_s=30)
    yield group
    group.shutdown()


@pytest.fixture
def group_to_kill(pool):
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Echo), call_timeout_s=30)
    yield group
    group.kill()


def make_table(rows: int) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(rows)}, {"uid": list(range(rows))}, {"temperature": 0.5}
    )


def listening_addresses(before: frozenset = frozenset()) -> dict[int, set[str]]:
    """Return process id → IPs on which this process and its descendants listen, without those in
    ``before``."""
    addresses = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        addresses[process.pid] = {
            ip for ip, port in sockets(process) if (process.pid, port) not in before
        }
    return addresses


def sockets(process: psutil.Process) -> list[tuple[str, int]]:
    connections = process.net_connections("inet")
    return [(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]


def only_loopback(addresses: dict[int, set[str]]) -> bool:
    return set().union(*addresses.values()) <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_ray_listens_on_loopback_with_a_private_token(cluster, group, sockets_before):
    import ray  # after init_ray, whose settings it reads

    assert cluster["started"] and cluster["num_cpus"] == 4
    assert cluster["address"].startswith("127.0.0.1:")
    assert ray.cluster_resources()["object_store_memory"] == pytest.approx(0.2e9)
    token = find_ray_token_path()
    assert token is not None and stat.S_IMODE(token.stat().st_mode) == 0o600
    assert stat.S_IMODE(PRIVATE_DIRECTORY.stat().st_mode) == 0o700
    addresses = listening_addresses(sockets_before)
    assert all(
        addresses[worker["pid"]] for worker in group.rank_locations
    )  # the workers are included
    assert only_loopback(addresses)


def test_init_ray_does_not_change_a_running_ray(cluster):
    assert init_ray() == {**cluster, "started": False}
    with pytest.raises(ValueError, check=mentions("num_cpu")):
        init_ray(num_cpu=3)


def test_ranks_get_their_environment_variables(group):
    first, second = group.describe(note=[1])
    assert [first["RANK"], second["RANK"]] == ["0", "1"]
    assert [first["LOCAL_RANK"], second["LOCAL_RANK"]] == ["0", "1"]
    assert first["WORLD_SIZE"] == second["WORLD_SIZE"] == second["LOCAL_WORLD_SIZE"] == "2"
    assert first["MASTER_ADDR"] == "127.0.0.1" and first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["ECHO_VARIABLE"] == "set" and first["note"] == [1]
    assert first["pid"] != second["pid"]


@pytest.mark.parametrize("rows", [4, 5, 1])
def test_tables_are_split_in_order_and_padding_is_removed(group, rows):
    data = make_table(rows)
    out = group.scale(data, extra=1)
    assert out.batch["y"].tolist() == [2 * x + 101 for x in range(rows)]
    assert out.non_tensor_batch["rank"].tolist() == [
        0 if x < (rows + 1) // 2 else 1 for x in range(rows)
    ]
    assert out.meta_info == {"metrics": {"rank": [0, 1]}, "temperature": 0.5}
    assert data.batch["x"].tolist() == list(range(rows)) and data.meta_info == {"temperature": 0.5}


def test_results_without_rows_join_the_metrics_of_all_ranks(group):
    answer = group.only_metrics(make_table(3)).meta_info["metrics"]
    assert answer == {"rows": [2, 2], "rank": [0, 1], "rank_max": [0, 1], "rank_sum": [0, 1]}
    assert reduce_metrics(answer) == {"rows": 2.0, "rank": 0.5, "rank_max": 1.0, "rank_sum": 1.0}
    assert group.only_metrics(DataProto(meta_info={"a": 1})).meta_info["metrics"]["rows"] == [0, 0]


def test_coroutine_methods_are_awaited_on_one_loop(group):
    assert group.scaled_later(make_table(3)).batch["y"].tolist() == [0, 2, 4]
    waiting = group.wait_for_lock(0.01)  # not blocking: a future
    assert waiting.get() == [(0, 1), (1, 1)]
    assert group.wait_for_lock(0.0).get() == [(0, 2), (1, 2)]  # the lock of the first call
    assert group.execute_all("unregistered_later") == ["hidden", "hidden"]
    with pytest.raises(ValueError, match="cannot do that later"):
        group.fail_later()
    with pytest.raises(WorkerTimeoutError, check=mentions("hang_later")):
        group.submit("hang_later").get(timeout_s=0.3)


def test_indistinguishable_padding_is_an_error(group):
    assert len(group.half(make_table(4))) == 2
    with pytest.raises(ValueError):
        group.half(make_table(5))


def test_lists_are_sent_one_entry_per_rank(group):
    assert group.add([1, 2], [10, 20]) == [11, 22]
    assert group.add(1, 10) == [11, 11]
    assert group.negate([3, 4]) == [-3, -4]
    with pytest.raises(ValueError, check=mentions(2)):
        group.negate([1, 2, 3])
    with pytest.raises(ValueError, check=mentions("DataProto")):
        group.scale(3)


def test_rank_zero_methods_run_on_rank_zero_only(group):
    assert group.who() == 0 and group.who_too() == 0
    assert group.execute_rank_zero("unregistered") == "hidden"
    assert group.execute_all("unregistered") == ["hidden", "hidden"]


def test_large_arguments_arrive_complete_on_every_rank(group):
    big = np.arange(300_000, dtype=np.float32)
    assert [float(note["note"].sum()) for note in group.describe(note=big)] == [
        float(big.sum())
    ] * 2


def test_futures_can_be_arguments_of_other_calls(group):
    future = group.slow(0.5)
    assert isinstance(future, GroupFuture) and future.get() == [0, 1]
    scaled = group.submit("scale", make_table(2))
    assert group.submit("describe", note=scaled).get()[1]["note"].batch["y"].tolist() == [100, 102]


def test_unknown_methods_name_the_nearest(group):
    with pytest.raises(AttributeError, check=suggests("scale")):
        group.scael(make_table(2))
    with pytest.raises(AttributeError, check=mentions("unregistered")):
        group.submit("unregistered")


def test_process_group_sums_over_ranks(group, sockets_before):
    group.init_process_group(backend="gloo", timeout_s=30)
    group.init_process_group(backend="gloo", timeout_s=30)  # the group exists already
    assert group.total(1) == [3.0, 3.0]
    assert only_loopback(
        listening_addresses(sockets_before)
    )  # including the rendezvous and the collectives
    with pytest.raises(RuntimeError, check=mentions("nccl")):
        group.init_process_group(backend="nccl", timeout_s=30)


def test_exception_keeps_its_type_and_names_the_rank(group):
    with pytest.raises(ValueError, match="cannot do that") as caught:
        group.fail_on(1)
    assert any("Echo[rank 1].fail_on" in note for note in caught.value.__notes__)


def test_timeout_names_the_late_rank(group):
    with pytest.raises(WorkerTimeoutError, check=mentions("0.3 s", "Echo[rank 1].hang")) as caught:
        group.submit("hang").get(timeout_s=0.3)
    assert isinstance(caught.value, TimeoutError)
    with pytest.raises(WorkerTimeoutError, check=mentions("slow")):
        group.slow(1).get(timeout_s=0.2)


def test_death_is_reported_before_the_other_ranks_answer(group_to_kill):
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, check=mentions("Echo[rank 1].die_on")):
        group_to_kill.die_on(1)
    assert time.monotonic() - started < 25  # rank 0 sleeps for 30 s


def test_death_in_a_collective_is_reported_as_the_cause(group_to_kill):
    group_to_kill.init_process_group(backend="gloo", timeout_s=20)
    with pytest.raises(WorkerDiedError, check=mentions("rank 0")):
        group_to_kill.sum_after_death_of(0)
    with pytest.raises(WorkerDiedError, check=mentions("rank 0")):  # also in later calls
        group_to_kill.describe()
    group_to_kill.kill()
    group_to_kill.shutdown()
    with pytest.raises(WorkerError):
        group_to_kill.who()


def test_failed_constructor_releases_the_resources(pool):
    for _ in range(2):  # together with `group`, more than the pool holds at once
        with pytest.raises(RuntimeError, match="no such model") as caught:
            RayWorkerGroup(pool, RayClassWithInitArgs(Broken), start_timeout_s=30)
        assert any("Broken.__init__" in note for note in caught.value.__notes__)


def test_colocated_roles_share_processes_but_not_state(pool):
    import ray

    roles = {
        "two": RayClassWithInitArgs(Echo, 2),
        "three": RayClassWithInitArgs(ray.remote(Echo), 3),
    }
    group = RayWorkerGroup(pool, create_colocated_worker_cls(roles), call_timeout_s=30)
    groups = group.spawn(roles)
    assert groups["two"].scale(make_table(3)).batch["y"].tolist() == [0, 2, 4]
    assert groups["three"].scale(make_table(3)).batch["y"].tolist() == [0, 3, 6]
    assert [d["pid"] for d in groups["two"].describe()] == [
        d["pid"] for d in groups["three"].describe()
    ]
    with pytest.raises(KeyError, check=mentions("four")):
        group.spawn(["four"])
    with pytest.raises(WorkerError, check=mentions("spawn")):
        group.execute_all("describe")
    group.shutdown()
    with pytest.raises(WorkerError):
        groups["two"].who()


def test_shared_actor_is_placed_on_the_device_of_a_rank(pool, monkeypatch):
    assert pool.shared_actor_options(1)["scheduling_strategy"] == "SPREAD", (
        "there is no device to share"
    )
    monkeypatch.setattr(pool, "_use_gpu", True)
    options = pool.shared_actor_options(1)
    assert options["num_gpus"] == 0.5 and options["num_cpus"] == 0.5
    assert options["scheduling_strategy"].placement_group_bundle_index == 1


def test_second_driver_joins_the_cluster_by_its_address(cluster):
    code = (
        "import ray\n"
        "from verl.single_controller.ray import init_ray\n"
        f"facts = init_ray(address={cluster['address']!r})\n"
        "assert not facts['started'] and facts['num_cpus'] == 4, facts\n"
        "assert ray.get(ray.remote(lambda: 7).remote(), timeout=60) == 7\n"
        "ray.shutdown()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_worker_that_outlives_ray_is_killed():
    code = (
        "import os, psutil, ray\n"
        "from verl.single_controller.ray import local\n"
        "from verl.utils.processes import wait_and_kill\n"
        "local.init_ray(num_cpus=1, object_store_gb=0.2)\n"
        "pid = ray.get(ray.remote(lambda: os.getpid()).remote(), timeout=60)\n"
        "local.STOP_TIMEOUT_S = 0.5\n"
        "worker = psutil.Process(pid)\n"
        "ray.shutdown = lambda: None\n"  # as if no process of Ray reacted
        "local.stop_ray()\n"
        "assert wait_and_kill([worker], 20) == []\n"
        "os._exit(0)\n"  # Ray's exit handlers would wait for its control server
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.usefixtures("cluster")
def test_pool_that_cannot_be_granted_lists_free_resources():
    with pytest.raises(WorkerTimeoutError, check=mentions("'greedy'", 64, "'CPU'")):
        RayResourcePool([64], name_prefix="greedy", timeout_s=0.5).reserve_slots()
    with pytest.raises(ValueError, check=mentions(1)):
        RayResourcePool([0])


def test_registrations_are_inherited_and_impossible_ones_refused():
    class Louder(Echo):
        def who(self):
            return 7

    assert collect_registered_methods(Louder)["who"].dispatch_mode is Dispatch.RANK_ZERO
    with pytest.raises(ValueError, check=mentions("rank 0")):
        register(Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)


def test_shards_say_which_rows_are_padding():
    calls, _ = plan_calls(MethodRegistration(Dispatch.DP_COMPUTE_PROTO), 4, (make_table(5),), {})
    assert [args[0].meta_info["padding_rows"] for args, _ in calls] == [0, 0, 1, 2]
    assert [args[0].batch["x"].tolist() for args, _ in calls] == [[0, 1], [2, 3], [4, 0], [1, 2]]
