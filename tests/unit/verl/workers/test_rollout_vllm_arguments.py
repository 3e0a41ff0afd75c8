"""Tests of the vLLM engine's arguments and of its calls to vLLM. They need no vLLM."""

import os
from typing import Any

import pytest
import torch

from tests.helpers.engine_cases import rollout_section
from tests.helpers.refusals import mentions
from verl.config.schema.actor_rollout_ref import ActorRolloutRefConfig
from verl.workers.rollout import EngineError, engine_registry, vllm
from verl.workers.rollout.engine_registry import start_engine
from verl.workers.rollout.vllm import VLLMEngine, engine_arguments
from verl.workers.rollout.weight_receipt import finish_recording, start_recording


def make_arguments(on_cpu=True, **engine_kwargs):
    section = rollout_section(engine_kwargs=engine_kwargs)
    return engine_arguments("policy", section, seed=1, trust_remote_code=False, on_cpu=on_cpu)


def test_engine_kwargs_override_other_arguments():
    assert make_arguments()["max_num_seqs"] == 16
    assert (
        make_arguments(max_num_seqs=3, swap_space=4).items()
        >= {"max_num_seqs": 3, "swap_space": 4}.items()
    )


def test_hf_overrides_are_added_to_the_float32_head():
    assert make_arguments()["hf_overrides"] == {"head_dtype": "float32"}
    added = make_arguments(hf_overrides={"rope_theta": 1e6})["hf_overrides"]
    assert added == {"head_dtype": "float32", "rope_theta": 1e6}
    assert make_arguments(hf_overrides={"head_dtype": "model"})["hf_overrides"] == {
        "head_dtype": "model"
    }


def test_only_a_device_engine_gets_device_arguments():
    assert "gpu_memory_utilization" in make_arguments(on_cpu=False)
    assert (
        not {"gpu_memory_utilization", "tensor_parallel_size"} & make_arguments(on_cpu=True).keys()
    )


def make_gpu_arguments(**changes):
    section = rollout_section(kv_cache_gb=None, **changes)
    return engine_arguments("policy", section, seed=1, trust_remote_code=False, on_cpu=False)


@pytest.mark.parametrize("enforce_eager", [None, True, False])
def test_enforce_eager_default_depends_on_the_device(enforce_eager):
    section = rollout_section(enforce_eager=enforce_eager)
    on_cpu, on_device = (
        engine_arguments("policy", section, 1, False, is_cpu) for is_cpu in (True, False)
    )
    assert on_cpu["enforce_eager"] is (enforce_eager is not False)
    assert on_device["enforce_eager"] is (enforce_eager is True)


def test_given_cache_size_is_used_on_cpu_and_gpu():
    assert make_arguments(on_cpu=True)["kv_cache_memory_bytes"] == int(0.1 * 2**30)
    assert make_arguments(on_cpu=False)["kv_cache_memory_bytes"] == int(0.1 * 2**30)
    assert "kv_cache_memory_bytes" not in make_gpu_arguments()
    unset = rollout_section(kv_cache_gb=None)
    assert engine_arguments("p", unset, 1, False, on_cpu=True)["kv_cache_memory_bytes"] == 2**30


def test_engine_on_several_devices_uses_processes():
    assert make_gpu_arguments()["tensor_parallel_size"] == 1
    assert "distributed_executor_backend" not in make_gpu_arguments()
    several = make_gpu_arguments(tensor_model_parallel_size=4)
    assert several["tensor_parallel_size"] == 4
    assert several["distributed_executor_backend"] == "mp"


def test_processes_of_an_engine_are_not_forked(monkeypatch):
    """``torch.cuda.is_available`` initialises CUDA, which a forked process then cannot use."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "0")
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    monkeypatch.setenv(name, "fork")
    assert not vllm._prepare_vllm_import(num_threads=None, allow_compile=True)
    assert os.environ[name] == "fork", "a value that the user set is kept"
    monkeypatch.delenv(name)
    vllm._prepare_vllm_import(num_threads=None, allow_compile=True)
    assert os.environ[name] == "spawn"


def test_sleep_mode_is_on_if_others_need_the_gpu():
    assert make_gpu_arguments(free_cache_engine=True)["enable_sleep_mode"]
    assert not make_gpu_arguments(free_cache_engine=False)["enable_sleep_mode"]
    assert not make_gpu_arguments(free_cache_engine=True, nnodes=1)["enable_sleep_mode"]


def test_weight_transfer_backend_is_passed_to_vllm():
    for transfer in ("ipc", "nccl"):
        assert make_gpu_arguments(weight_transfer=transfer)["weight_transfer_config"] == {
            "backend": transfer
        }
    for transfer in ("store", "auto"):
        assert "weight_transfer_config" not in make_gpu_arguments(weight_transfer=transfer)


# ---------------------------------------------------------------- calls to vLLM


class FakeLLMEngine:
    """Records the calls to an ``LLMEngine``. ``receipts`` are what its workers report as
    received.
    """

    def __init__(self, *receipts: dict[str, int]) -> None:
        self.calls: list[tuple] = []
        self.receipts = list(receipts)
        self.resets_prefixes = True

    def collective_rpc(self, method: Any, kwargs: dict | None = None) -> list:
        self.calls.append((method, kwargs) if kwargs else (method,))
        return self.receipts

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str] | None) -> None:
        self.calls.append(("wake", tags))

    def reset_prefix_cache(self) -> bool:
        self.calls.append(("reset prefixes",))
        return self.resets_prefixes


def make_engine(llm_engine: FakeLLMEngine, can_sleep: bool = True) -> VLLMEngine:
    engine: Any = VLLMEngine.__new__(VLLMEngine)
    engine._engine = llm_engine
    engine._internal_ids = {}
    engine._can_sleep = can_sleep
    engine.policy_version = 0
    return engine


def test_update_is_recorded_and_ends_with_reset_prefixes():
    llm_engine = FakeLLMEngine({"w": 1}, {"w": 1})
    engine = make_engine(llm_engine)
    engine.connect({"packed": True})
    engine.begin_update()
    engine.receive({"names": ["w"]})
    assert engine.policy_version == 0
    assert engine.finish_update(4) == {"w": 1}
    assert engine.policy_version == 4
    assert llm_engine.calls == [
        ("init_weight_transfer_engine", {"init_info": {"packed": True}}),
        (start_recording,),
        ("start_weight_update",),
        ("update_weights", {"update_info": {"names": ["w"]}}),
        ("finish_weight_update",),
        (finish_recording,),
        ("reset prefixes",),
    ]


def test_devices_with_different_weights_are_refused():
    engine = make_engine(FakeLLMEngine({"w": 1}, {"w": 2}))
    with pytest.raises(EngineError, check=mentions("device 1")):
        engine.finish_update(4)
    assert engine.policy_version == 0


def test_prefixes_that_are_not_reset_are_an_error():
    llm_engine = FakeLLMEngine({"w": 1})
    llm_engine.resets_prefixes = False
    with pytest.raises(EngineError):
        make_engine(llm_engine).finish_update(4)


def test_no_update_begins_while_requests_run():
    llm_engine = FakeLLMEngine()
    engine: Any = make_engine(llm_engine)
    engine._internal_ids = {"a": "b"}
    with pytest.raises(EngineError, check=mentions(1)):
        engine.begin_update()
    assert llm_engine.calls == []


def test_sleep_has_levels_and_wake_has_parts():
    llm_engine = FakeLLMEngine()
    engine = make_engine(llm_engine)
    engine.sleep()
    engine.wake()
    engine.sleep(2)
    engine.wake("weights")
    engine.wake("kv_cache")
    assert llm_engine.calls == [
        ("sleep", 1),
        ("wake", None),
        ("sleep", 2),
        ("wake", ["weights"]),
        ("wake", ["kv_cache"]),
    ]
    never_sleeping = FakeLLMEngine()
    make_engine(never_sleeping, can_sleep=False).sleep(2)
    make_engine(never_sleeping, can_sleep=False).wake("weights")
    assert never_sleeping.calls == []


def test_devices_are_visible_before_the_engine_is_made(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    visible_devices: list[str] = []

    def make(*_args: object, **_more: object) -> str:
        visible_devices.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return "engine"

    monkeypatch.setattr(engine_registry, "import_engine_class", lambda _name: make)
    config = ActorRolloutRefConfig()
    assert start_engine(config, str(tmp_path), 0, 1, ["5", "7"]) == "engine"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    start_engine(config, str(tmp_path), 0, 1, [])
    assert visible_devices == ["5,7", "5"], "an engine on one device keeps the setting of Ray"
