"""What the vLLM engine is started with. Needs no vLLM."""

from tests.helpers.engine_cases import rollout_section
from verl.workers.rollout.vllm import engine_arguments


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


def test_an_engine_that_fetches_weights_itself_is_told_how():
    assert on_gpu(weight_transfer="ipc")["weight_transfer_config"] == {"backend": "ipc"}
    for way in ("store", "auto"):
        assert "weight_transfer_config" not in on_gpu(weight_transfer=way)
