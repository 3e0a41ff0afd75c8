"""Weights go by vLLM's own ways into an engine spread over two workers: real processes, each
with its share; shared memory in the place of CUDA's, and gloo in the place of NCCL.
"""

import numpy as np
import pytest

from tests.helpers import vllm_process, vllm_shares
from tests.helpers.engine_cases import ask, load, reference_logprobs
from tests.helpers.tiny_model import make_tiny_policy

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its memory is pretended here")
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def call():
    with vllm_process.one_process() as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), tie=False, std=0.07)


@pytest.fixture(scope="module", params=["ipc", "nccl"])
def shares(request, call, directory):
    call(vllm_shares.start, str(directory), request.param)
    yield
    call(vllm_shares.stop)


def gaps(call, model):
    """|log-prob of the engine - of ``model``| on every token sampled."""
    found = []
    requests = ask(6, max_tokens=16)
    for request in requests:
        result = call(vllm_shares.serve, [request])[request.request_id]
        expected = reference_logprobs(model, request, result.token_ids).numpy()
        found.append(np.abs(np.array(result.logprobs) - expected))
    return np.concatenate(found)


@pytest.mark.usefixtures("shares")
def test_an_engine_in_shares_plays_with_the_weights_that_were_handed_over(call, directory):
    model = load(directory)
    assert gaps(call, model).max() < 1e-3
    # One piece for all weights, then many: none may be larger than the largest weight.
    for version, piece_bytes in enumerate((2**24, 1), start=1):
        weights = call(vllm_shares.hand_over, version, version, piece_bytes)
        assert gaps(call, model).mean() > 0.05, "too little changed to notice what was not renewed"
        model.load_state_dict(weights, strict=True)
        assert gaps(call, model).max() < 1e-3
    result = call(vllm_shares.serve, ask(1))["r0"]
    assert result.policy_version == 2


@pytest.mark.usefixtures("shares")
def test_a_share_that_did_not_arrive_ends_the_run(call):
    said = call(vllm_shares.refused, 3, 1)
    assert "can be read back differ from them" in said


def test_what_is_said_to_vllm_on_cuda_is_what_the_installed_one_takes(call):
    assert call(vllm_shares.accepted) == []
