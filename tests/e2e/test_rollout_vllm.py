"""Tests of the vLLM engine on CPU against transformers on the same tokens.

The tests change weights strongly before a sync, because a part of the engine that keeps old weights
raises no error.
"""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests.helpers import vllm_process as remote
from tests.helpers.engine_cases import (
    ask,
    assert_every_end_stops,
    load,
    make_base_policy,
    make_expert_policy,
    make_hybrid_policy,
    perturb,
    prompts,
    reference_logprobs,
)
from tests.helpers.tiny_model import make_tiny_policy
from verl.utils.sampling import SamplingRequest, StopReason

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests the CPU engine; CUDA has its own tests"
)
TIMEOUT_S = 240
END = 1  # <|im_end|> in the tiny tokenizer
CASES = {
    "float32-tied": partial(make_tiny_policy, tie=True, std=0.07),
    "float32-untied": partial(make_tiny_policy, tie=False, std=0.07),
    "bfloat16-tied": partial(make_tiny_policy, tie=True, std=0.07),
    "bfloat16-untied": partial(make_tiny_policy, tie=False, std=0.07),
    "bfloat16-hybrid": make_hybrid_policy,
    "float32-experts": partial(make_expert_policy, width=64),
    # vLLM pads this width, as its kernels need it.
    "float32-padded-experts": partial(make_expert_policy, width=40),
}


@dataclass
class EngineCase:
    """Engine in another process, and the policy that it was started with."""

    pool: ProcessPoolExecutor
    directory: Path
    dtype: str

    def call(self, function, *args):
        """Run a function of ``vllm_process`` in the process of the engine."""
        return self.pool.submit(function, *args).result(timeout=TIMEOUT_S)

    def differences(self, model, requests):
        """Return |log-prob of the engine - log-prob of ``model``| per sampled token, and the
        results.
        """
        results = self.call(remote.serve, requests)
        gaps = []
        for request in requests:
            result = results[request.request_id]
            gaps.append(
                np.abs(
                    result.logprobs - reference_logprobs(model, request, result.token_ids).numpy()
                )
            )
        return np.concatenate(gaps), results


@pytest.fixture(scope="module")
def pool():
    with remote.one_process() as pool:
        yield pool


@pytest.fixture(scope="module", params=CASES)
def case(request, pool, tmp_path_factory):
    directory = CASES[request.param](tmp_path_factory.mktemp("policy"))
    dtype = request.param.partition("-")[0]
    case = EngineCase(pool, directory, dtype)
    case.call(remote.start, str(directory), dtype)
    yield case
    case.call(remote.stop)


@pytest.fixture(scope="module")
def engine(pool, tmp_path_factory):
    """Start a float32 engine with tied embeddings, for tests that do not depend on the
    precision.
    """
    directory = make_tiny_policy(tmp_path_factory.mktemp("policy"), std=0.1)
    case = EngineCase(pool, directory, "float32")
    case.call(remote.start, str(directory), "float32")
    return case


def test_log_probs_agree_before_and_after_a_weight_sync(case):
    def are_close(gaps):
        return gaps.max() < 1e-3 if case.dtype == "float32" else gaps.mean() < 2e-2

    model = load(case.directory)
    gaps, results = case.differences(model, ask(8, max_tokens=20))
    assert are_close(gaps), (gaps.mean(), gaps.max())
    assert {result.policy_version for result in results.values()} == {0}
    weights = perturb(model)
    stale = case.differences(model, ask(8, max_tokens=20))[0]
    assert stale.mean() > 0.1, "the perturbation is too weak to detect a part with old weights"
    case.call(remote.update, weights, 5)
    gaps, results = case.differences(model, ask(8, max_tokens=20))
    assert are_close(gaps), (gaps.mean(), gaps.max())
    assert {result.policy_version for result in results.values()} == {5}
    case.call(remote.update, perturb(model, seed=2), 6)
    gaps, _ = case.differences(model, ask(8, max_tokens=20))
    assert are_close(gaps), (gaps.mean(), gaps.max())


def test_compiled_engine_follows_changed_weights(tmp_path):
    directory = make_tiny_policy(tmp_path / "policy", std=0.07)
    model = load(directory)
    # Use a new process: nothing can be compiled any more in the shared one.
    with remote.one_process() as pool:
        case = EngineCase(pool, directory, "float32")
        case.call(remote.start, str(directory), "float32", False)
        assert case.differences(model, ask(8, max_tokens=20))[0].max() < 1e-3
        case.call(remote.update, perturb(model), 5)
        assert case.differences(model, ask(8, max_tokens=20))[0].max() < 1e-3
        case.call(remote.stop)


def test_every_end_of_a_base_model_with_a_template_ends_a_turn(tmp_path):
    directory, end_ids = make_base_policy(tmp_path)
    # Use a new process: the other tests share the engine of theirs.
    with remote.one_process() as pool:
        case = EngineCase(pool, directory, "float32")
        case.call(remote.start, str(directory), "float32")
        requests = ask(160, max_tokens=48, temperature=1.0)
        assert_every_end_stops(case.call(remote.serve, requests), end_ids, 48)
        case.call(remote.stop)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0},
    ],
)
def test_log_probs_include_temperature_and_truncation(engine, sampling):
    gaps, _ = engine.differences(load(engine.directory), ask(8, **sampling))
    assert gaps.max() < 1e-3


def test_tokens_follow_the_distribution(engine):
    prompt = prompts(3)[2]
    requests = [SamplingRequest(f"d{i}", prompt, 1, temperature=0.5, seed=i) for i in range(2000)]
    results = engine.call(remote.serve, requests)
    with torch.no_grad():
        logits = load(engine.directory)(torch.tensor([prompt])).logits[0, -1]
    expected = (logits / 0.5).softmax(-1).numpy()
    counts = np.bincount(
        [result.token_ids[0] for result in results.values()], minlength=len(expected)
    )
    likely = expected * len(requests) >= 5
    chi_square = ((counts - expected * len(requests)) ** 2 / (expected * len(requests)))[
        likely
    ].sum()
    freedom = likely.sum()
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_seed_determines_the_tokens_in_any_batch(engine):
    together = engine.call(remote.serve, ask(8))
    staggered = engine.call(remote.serve_staggered, ask(8))
    for name, result in together.items():
        assert staggered[name].token_ids == result.token_ids
        np.testing.assert_allclose(staggered[name].logprobs, result.logprobs, atol=1e-4)
    other = [
        SamplingRequest(
            request.request_id, request.prompt_ids, request.max_tokens, seed=200 + number
        )
        for number, request in enumerate(ask(8))
    ]
    assert engine.call(remote.serve, other)["r0"].token_ids != together["r0"].token_ids


def test_repeated_prompt_comes_from_the_prefix_cache(engine):
    long = SamplingRequest("p", [(3 * i) % 380 + 5 for i in range(200)], 4, seed=1)
    first, second = (engine.call(remote.serve, [long])["p"] for _ in range(2))
    assert second.info["cached_tokens"] >= 160
    np.testing.assert_allclose(second.logprobs, first.logprobs, atol=1e-4)
    assert second.token_ids == first.token_ids


def test_stop_strings_end_the_segment_and_keep_their_tokens(engine):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine.directory)
    unstopped = engine.call(remote.serve, ask(8, max_tokens=20))
    kinds = {"one token": 0, "several": 0}
    requests, expected = [], {}
    for request in ask(8, max_tokens=20):
        ids = unstopped[request.request_id].token_ids
        width = 1 if len(requests) % 2 else 2
        texts = [tokenizer.decode(ids[i : i + width]) for i in range(2, len(ids) - width)]
        request.stop = tuple(text for text in texts if text.isascii() and text.strip())[:1]
        if not request.stop:
            continue
        single = len(tokenizer.encode(request.stop[0])) == 1
        kinds["one token" if single else "several"] += 1
        target = tokenizer.encode(request.stop[0])[0]
        expected[request.request_id] = next(
            ids[:n]
            for n in range(1, len(ids) + 1)
            if (ids[n - 1] == target if single else request.stop[0] in tokenizer.decode(ids[:n]))
        )
        requests.append(request)
    assert all(kinds.values()), kinds
    for name, result in engine.call(remote.serve, requests).items():
        assert result.stop_reason is StopReason.STOP
        assert result.token_ids == expected[name]
        assert len(result.logprobs) == len(result.token_ids)


def test_lengths_end_at_max_tokens_and_at_the_context(engine):
    long = SamplingRequest("long", list(range(5, 255)), 50, seed=1)
    results = engine.call(remote.serve, [*ask(2, max_tokens=4), long])
    assert len(results["long"].token_ids) == 6
    assert {result.stop_reason for result in results.values()} == {StopReason.LENGTH}


def test_invalid_request_is_refused_with_the_reason(engine):
    message = engine.call(remote.refusal, "add", SamplingRequest("x", [5] * 256, 3))
    assert message.startswith("ValueError") and "max_model_len" in message
    assert "vocabulary" in engine.call(remote.refusal, "add", SamplingRequest("x", [5, 4000], 3))


def test_aborted_requests_do_not_change_the_others(engine):
    alone = engine.call(remote.serve, ask(4))
    results = engine.call(remote.serve_and_abort, ask(4), ["r1", "r3", "unknown"])
    assert sorted(results) == ["r0", "r2"]
    assert results["r0"].token_ids == alone["r0"].token_ids


def test_weights_that_vllm_drops_are_detected(engine):
    model = load(engine.directory)
    weights = [(name, 2 * value.detach().numpy()) for name, value in model.named_parameters()]
    assert engine.call(remote.lost_update, weights, False) == (
        0,
        "",
    )  # the engine finds no error; the trainer notices that no weight was received
    received, error = engine.call(remote.lost_update, weights, True)
    assert received == 0 and "model." in error


@pytest.mark.parametrize("damage", ["missing", "renamed", "reshaped"])
def test_weights_of_another_model_are_refused_by_name(engine, tmp_path, damage):
    directory = make_tiny_policy(tmp_path / "policy")
    weights = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = weights.pop(name)
    if damage != "missing":
        weights[f"x.{name}" if damage == "renamed" else name] = tensor[1:].clone()
    save_file(weights, directory / "model.safetensors")
    message = engine.call(remote.start_refusal, str(directory))
    assert message.startswith("UnusableWeightsError") and name in message


def test_worker_serves_joining_requests_and_new_weights(engine):
    model = load(engine.directory)
    with torch.no_grad():
        model.model.embed_tokens.weight[END] *= 4  # tied weights: the end of turn becomes likely
    weights = [(name, parameter.detach().numpy()) for name, parameter in model.named_parameters()]
    first = ask(4, max_tokens=100)
    second = [SamplingRequest(f"s{i}", r.prompt_ids, 60, seed=r.seed) for i, r in enumerate(ask(4))]
    results = engine.call(remote.through_worker, first, second, weights)
    before, after = results[:8], results[8:]
    assert {result.request_id for result in before} == {r.request_id for r in first + second}
    assert {result.policy_version for result in before} == {0}
    assert {result.policy_version for result in after} == {9}
    ended = [result for result in after if result.stop_reason is StopReason.STOP]
    assert ended
    assert all(result.token_ids.index(END) == len(result.token_ids) - 1 for result in ended)
    for result in after:
        request = next(r for r in second if r.request_id == result.request_id)
        expected = reference_logprobs(model, request, result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-3)
