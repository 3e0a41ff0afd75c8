"""Tests of the cost metrics of an update: operations per second, memory, traces."""

import gzip
import json

import pytest
import torch

from tests.helpers.policy_rows import actor_of, critic_config, random_rows
from tests.helpers.tiny_model import make_tiny_policy
from verl.models.flops import count_model_weights
from verl.records import PROFILE, ProfileRequest
from verl.workers.critic import CriticWorker
from verl.workers.rows import Rows
from verl.workers.update import memory_metrics, speed_metrics


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1)


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that pretends there is a GPU of a name."""

    def pretend(name):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 * 2**30)

    return pretend


def test_mfu_is_reported_for_known_gpus_in_bfloat16(gpu):
    slow = {"perf/tflops/actor": 49.45}
    work = (2 * 49.45e12, 2.0)
    assert speed_metrics("actor", *work, "bfloat16") == slow
    gpu("NVIDIA H100 80GB HBM3")
    assert speed_metrics("actor", *work, "bfloat16") == slow | {"perf/mfu/actor": 49.45 / 989.0}
    assert speed_metrics("actor", *work, "float32") == slow
    gpu("Something New")
    assert speed_metrics("actor", *work, "bfloat16") == slow


def test_memory_metrics_cover_host_and_device(gpu):
    (name,) = metrics = memory_metrics("actor")
    assert name == "perf/cpu_memory_used_gb" and 0.05 < metrics[name] < 1000
    gpu("NVIDIA H100 80GB HBM3")
    metrics = memory_metrics("actor")
    assert metrics["perf/max_memory_allocated_gb"] == 3.0
    assert metrics["perf/max_memory_reserved_gb"] == 5.0


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_update_counts_the_operations_of_its_rows(policy, role, epochs):
    data = random_rows(rows=4)
    if role == "actor":
        worker = actor_of(policy, ppo_epochs=epochs)
        output = worker.update_actor(data)
    else:
        worker = CriticWorker(critic_config(policy, ppo_epochs=epochs), device="cpu")
        worker.init_model()
        output = worker.update_critic(data)
    metrics = output.meta_info["metrics"]
    seconds = metrics[f"perf/update_{role}_seconds"]
    rows = Rows(data)
    work = rows.measure_forward_size(rows.pack_rows(range(4)), range(4))
    assert metrics[f"perf/update_{role}_tokens"] == epochs * work.tokens
    expected = epochs * count_model_weights(worker.train_engine.module).compute_update_flops(work)
    assert metrics[f"perf/tflops/{role}"] * seconds * 1e12 == pytest.approx(expected)
    assert f"perf/mfu/{role}" not in metrics
    # The critic is another process, so its metric has its own name.
    assert metrics[f"perf/cpu_memory_used_gb{'' if role == 'actor' else '/critic'}"] > 0
    assert ("perf/cpu_memory_used_gb" in metrics) == (role == "actor")


def test_requested_ranks_write_a_trace_of_an_update(policy, tmp_path):
    directory = tmp_path / "profile"
    worker = actor_of(policy)
    data = random_rows(rows=2)
    for ranks in ((), (1,)):
        data.meta_info[PROFILE] = ProfileRequest(str(directory), ranks, step=3)
        worker.update_actor(data)
    assert not directory.exists()
    data.meta_info[PROFILE] = ProfileRequest(str(directory), (1, 0), step=3)
    worker.update_actor(data)
    (file,) = directory.iterdir()
    assert file.name == "step3-update_actor-rank0.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert any("scaled_dot_product" in event.get("name", "") for event in events)
