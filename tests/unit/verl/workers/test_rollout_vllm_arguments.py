"""What the vLLM engine is started with, and what it says to it. Needs no vLLM."""

import os
from typing import Any

import pytest

from tests.helpers.engine_cases import rollout_section
from tests.helpers.refusals import mentions
from verl.config.schema.actor import ActorRolloutRefConfig
from verl.workers.rollout import EngineError, engine_registry
from verl.workers.rollout.engine_registry import start_engine
from verl.workers.rollout.vllm import VLLMEngine, engine_arguments
from verl.workers.rollout.weight_receipt import finish_recording, start_recording


def arguments(on_cpu=True, **engine_kwargs):
    section = rollout_section(engine_kwargs=engine_kwargs)
    return engine_arguments("policy", section, seed=1, trust_remote_code=False, on_cpu=on_cpu)


def test_engine_kwargs_have_the_last_word():
    assert arguments()["max_num_seqs"] == 16
    assert (
        arguments(max_num_seqs=3, swap_space=4).items()
        >= {"max_num_seqs": 3, "swap_space": 4}.items()
    )


def test_hf_overrides_are_added_to_the_float32_head():
    assert arguments()["hf_overrides"] == {"head_dtype": "float32"}
    added = arguments(hf_overrides={"rope_theta": 1e6})["hf_overrides"]
    assert added == {"head_dtype": "float32", "rope_theta": 1e6}
    assert arguments(hf_overrides={"head_dtype": "model"})["hf_overrides"] == {
        "head_dtype": "model"
    }


def test_only_a_device_engine_is_given_shares_of_a_device():
    assert "gpu_memory_utilization" in arguments(on_cpu=False)
    assert not {"gpu_memory_utilization", "tensor_parallel_size"} & arguments(on_cpu=True).keys()


def on_gpu(**changes):
    section = rollout_section(kv_cache_gb=None, **changes)
    return engine_arguments("policy", section, seed=1, trust_remote_code=False, on_cpu=False)


@pytest.mark.parametrize("asked", [None, True, False])
def test_a_cpu_compiles_where_it_is_asked_and_a_device_where_it_is_not_forbidden(asked):
    section = rollout_section(enforce_eager=asked)
    on_cpu, on_device = (
        engine_arguments("policy", section, 1, False, here) for here in (True, False)
    )
    assert on_cpu["enforce_eager"] is (asked is not False)
    assert on_device["enforce_eager"] is (asked is True)


def test_a_cache_has_the_size_that_is_given_on_both():
    assert arguments(on_cpu=True)["kv_cache_memory_bytes"] == int(0.1 * 2**30)
    assert arguments(on_cpu=False)["kv_cache_memory_bytes"] == int(0.1 * 2**30)
    assert "kv_cache_memory_bytes" not in on_gpu()
    unset = rollout_section(kv_cache_gb=None)
    assert engine_arguments("p", unset, 1, False, on_cpu=True)["kv_cache_memory_bytes"] == 2**30


def test_an_engine_on_several_devices_has_processes_on_those_it_sees():
    assert on_gpu()["tensor_parallel_size"] == 1
    assert "distributed_executor_backend" not in on_gpu()
    several = on_gpu(tensor_model_parallel_size=4)
    assert several["tensor_parallel_size"] == 4
    assert several["distributed_executor_backend"] == "mp"


def test_an_engine_sleeps_where_others_need_its_gpu():
    assert on_gpu(free_cache_engine=True)["enable_sleep_mode"]
    assert not on_gpu(free_cache_engine=False)["enable_sleep_mode"]
    assert not on_gpu(free_cache_engine=True, nnodes=1)["enable_sleep_mode"]


def test_an_engine_that_fetches_weights_itself_is_told_how():
    for way in ("ipc", "nccl"):
        assert on_gpu(weight_transfer=way)["weight_transfer_config"] == {"backend": way}
    for way in ("store", "auto"):
        assert "weight_transfer_config" not in on_gpu(weight_transfer=way)


# ---------------------------------------------------------------- what is said to vLLM


class Paper:
    """``LLMEngine`` with two workers, which notes what it is asked; ``taken`` is what they took."""

    def __init__(self, *taken: dict[str, int]) -> None:
        self.asked: list[tuple] = []
        self.taken = list(taken)
        self.forgets = True

    def collective_rpc(self, method: Any, kwargs: dict | None = None) -> list:
        self.asked.append((method, kwargs) if kwargs else (method,))
        return self.taken

    def sleep(self, level: int) -> None:
        self.asked.append(("sleep", level))

    def wake_up(self, tags: list[str] | None) -> None:
        self.asked.append(("wake", tags))

    def reset_prefix_cache(self) -> bool:
        self.asked.append(("forget prefixes",))
        return self.forgets


def engine_on(paper: Paper, can_sleep: bool = True) -> VLLMEngine:
    engine: Any = VLLMEngine.__new__(VLLMEngine)
    engine._engine = paper
    engine._requests = {}
    engine._can_sleep = can_sleep
    engine.policy_version = 0
    return engine


def test_a_hand_over_is_watched_from_its_beginning_and_ends_with_old_prefixes_forgotten():
    paper = Paper({"w": 1}, {"w": 1})
    engine = engine_on(paper)
    engine.connect({"packed": True})
    engine.begin_update()
    engine.receive({"names": ["w"]})
    assert engine.policy_version == 0
    assert engine.finish_update(4) == {"w": 1}
    assert engine.policy_version == 4
    assert paper.asked == [
        ("init_weight_transfer_engine", {"init_info": {"packed": True}}),
        (start_recording,),
        ("start_weight_update",),
        ("update_weights", {"update_info": {"names": ["w"]}}),
        ("finish_weight_update",),
        (finish_recording,),
        ("forget prefixes",),
    ]


def test_devices_that_got_different_weights_are_no_engine():
    engine = engine_on(Paper({"w": 1}, {"w": 2}))
    with pytest.raises(EngineError, check=mentions("device 1")):
        engine.finish_update(4)
    assert engine.policy_version == 0


def test_prefixes_of_old_weights_that_stay_are_an_error():
    paper = Paper({"w": 1})
    paper.forgets = False
    with pytest.raises(EngineError):
        engine_on(paper).finish_update(4)


def test_no_hand_over_begins_while_requests_run():
    paper = Paper()
    engine: Any = engine_on(paper)
    engine._requests = {"a": "b"}
    with pytest.raises(EngineError, check=mentions(1)):
        engine.begin_update()
    assert paper.asked == []


def test_sleep_has_levels_and_waking_has_parts():
    paper = Paper()
    engine = engine_on(paper)
    engine.sleep()
    engine.wake()
    engine.sleep(2)
    engine.wake("weights")
    engine.wake("kv_cache")
    assert paper.asked == [
        ("sleep", 1),
        ("wake", None),
        ("sleep", 2),
        ("wake", ["weights"]),
        ("wake", ["kv_cache"]),
    ]
    awake = Paper()
    engine_on(awake, can_sleep=False).sleep(2)
    engine_on(awake, can_sleep=False).wake("weights")
    assert awake.asked == []


def test_an_engine_of_several_devices_sees_them_before_it_is_made(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    seen: list[str] = []

    def make(*_args: object, **_more: object) -> str:
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return "engine"

    monkeypatch.setattr(engine_registry, "import_engine_class", lambda _name: make)
    config = ActorRolloutRefConfig()
    assert start_engine(config, str(tmp_path), 0, 1, ["5", "7"]) == "engine"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    start_engine(config, str(tmp_path), 0, 1, [])
    assert seen == ["5,7", "5"], "what Ray gave is enough for one"
