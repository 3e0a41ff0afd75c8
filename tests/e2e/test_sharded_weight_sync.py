"""Tests of weight sync by vLLM's transfer backends into an engine of two worker processes.

Each worker holds a shard. Shared memory replaces CUDA memory, and gloo replaces NCCL.
"""

import numpy as np
import pytest

from tests.helpers import vllm_process, vllm_shares
from tests.helpers.engine_cases import ask, load, reference_logprobs
from tests.helpers.tiny_model import make_tiny_policy

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="uses a fake of CUDA memory")
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def call():
    with vllm_process.one_process() as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), tie=False, std=0.07)


@pytest.fixture(scope="module", params=["ipc", "nccl"])
def sharded_engine(request, call, directory):
    call(vllm_shares.start, str(directory), request.param)
    yield
    call(vllm_shares.stop)


def measure_gaps(call, model):
    """Return |log-prob of the engine - log-prob of ``model``| on every sampled token."""
    gaps = []
    requests = ask(6, max_tokens=16)
    for request in requests:
        result = call(vllm_shares.serve, [request])[request.request_id]
        expected = reference_logprobs(model, request, result.token_ids).numpy()
        gaps.append(np.abs(np.array(result.logprobs) - expected))
    return np.concatenate(gaps)


@pytest.mark.usefixtures("sharded_engine")
def test_sharded_engine_samples_from_the_synced_weights(call, directory):
    model = load(directory)
    assert measure_gaps(call, model).max() < 1e-3
    # The first piece size holds all weights; with the second, each weight is a piece.
    for version, piece_bytes in enumerate((2**24, 1), start=1):
        weights = call(vllm_shares.change_and_sync, version, version, piece_bytes)
        assert measure_gaps(call, model).mean() > 0.05, (
            "the change is too small to detect old weights"
        )
        model.load_state_dict(weights, strict=True)
        assert measure_gaps(call, model).max() < 1e-3
    result = call(vllm_shares.serve, ask(1))["r0"]
    assert result.policy_version == 2


@pytest.mark.usefixtures("sharded_engine")
def test_shard_that_did_not_arrive_ends_the_run(call):
    message = call(vllm_shares.sync_with_zeros, 3, 1)
    assert "model." in message


def test_installed_vllm_accepts_the_cuda_calls(call):
    assert call(vllm_shares.list_rejected_calls) == []
