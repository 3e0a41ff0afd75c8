"""Tests of LoRA adapters in the vLLM engine on CPU: sync, verification and several adapters."""

import pytest
import torch

from tests.helpers import vllm_adapters, vllm_process
from tests.helpers.adapter_run import save_random_adapter
from tests.helpers.engine_cases import load
from tests.helpers.tiny_model import make_tiny_policy

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the CPU engine")
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def call():
    with vllm_process.one_process() as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=TIMEOUT_S)


def test_adapters_in_vllm(call, tmp_path):
    """One test, because the start of the engine takes most of its time."""
    policy = make_tiny_policy(tmp_path / "policy", std=0.07)
    adapters = {"judge": tmp_path / "judge", "other": tmp_path / "other"}
    merged = {"base": str(policy)}
    for rank, (name, directory) in enumerate(adapters.items(), start=3):
        model = save_random_adapter(policy, directory, rank=rank)
        merged[name] = str(tmp_path / f"{name}-merged")
        model.save_pretrained(merged[name])
    paths = {name: str(path) for name, path in adapters.items()}
    settings = call(vllm_adapters.start, str(policy), paths)
    # One slot more than adapters: see ``make_lora_arguments``.
    assert settings == {"max_loras": 4, "max_lora_rank": 8}

    base_bytes = sum(weight.nbytes for weight in load(policy).parameters())
    first = call(vllm_adapters.sync, 0, False)["perf/weight_sync_bytes"]
    for version in (1, 2):
        sent = call(vllm_adapters.sync, version, True)["perf/weight_sync_bytes"]
        assert first == base_bytes + sent < 2 * base_bytes
        # All slots are in use, and requests for the base model use none.
        target = str(tmp_path / f"policy-{version}")
        gaps = call(vllm_adapters.measure_gaps, merged, target)
        assert set(gaps) == {"policy", "base", "judge", "other"}
        assert max(gaps.values()) < 1e-5, gaps
        assert call(vllm_adapters.measure_gaps, {"base": str(policy)}, "")["base"] < 1e-5
    stale = call(vllm_adapters.measure_gaps, {"policy": str(tmp_path / "policy-1")}, "")
    assert stale["policy"] > 1e-3, "the updates are too small to detect an old adapter"

    assert "lora_" in call(vllm_adapters.sync_lost_adapter, 3, "zeroed")
    message = call(vllm_adapters.sync_lost_adapter, 4, "unadapted")
    assert "q_proj" in message and "lora_sync=merged" in message
    call(vllm_adapters.sync, 5, True)
    gaps = call(vllm_adapters.measure_gaps, merged, str(tmp_path / "policy-5"))
    assert max(gaps.values()) < 1e-5, gaps
    assert "nobody" in call(vllm_adapters.refusal, "nobody")
    call(vllm_adapters.stop)
