"""Tests of the transformers engine: its log-probs equal those of a plain full forward in any
batch.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, RwkvConfig

from tests.helpers.engine_cases import (
    ask,
    assert_every_end_stops,
    load,
    make_base_policy,
    perturb,
    prompts,
    reference_logprobs,
    rollout_section,
    run_requests,
)
from tests.helpers.model_families import ROW_WISE, SCALED, WINDOWED, build_family
from tests.helpers.refusals import has_problem, mentions
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from verl.config.schema.actor_rollout_ref import ActorRolloutRefConfig
from verl.config.settings.errors import UserError
from verl.models.loader import load_causal_lm, prepare_for_training, read_config
from verl.models.policy import PolicyModel
from verl.models.prefix_tree import pack_rows
from verl.models.token_scores import Targets
from verl.utils.sampling import SamplingRequest, StopReason
from verl.workers.rollout import create_engine, hf
from verl.workers.rollout.base import EngineError
from verl.workers.rollout.engine_registry import start_engine

END = 1  # <|im_end|> in the tiny tokenizer


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), std=0.2)


@pytest.fixture(scope="module")
def model(policy):
    return load(policy)


@pytest.fixture()
def engine(policy):
    engine = create_engine("hf", rollout_section(), str(policy), seed=3, num_threads=1)
    yield engine
    engine.close()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0},
    ],
)
def test_logprobs_equal_a_full_forward(engine, model, sampling):
    requests = ask(6, **sampling)
    results = run_requests(engine, requests)
    for request in requests:
        result = results[request.request_id]
        expected = reference_logprobs(model, request, result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


def test_logits_of_a_bfloat16_model_are_not_rounded(tmp_path):
    directory = make_tiny_policy(tmp_path, std=0.5)
    engine = create_engine("hf", rollout_section(dtype="bfloat16"), str(directory))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="bfloat16").eval()
    for request in ask(4, max_tokens=1):
        result = run_requests(engine, [request])[request.request_id]
        ids, token = torch.tensor([request.prompt_ids]), result.token_ids[0]
        with torch.no_grad():
            hidden = model.base_model(ids).last_hidden_state[0, -1]
            rounded = model(ids).logits[0, -1].float().log_softmax(dim=0)[token].item()
        exact = (model.lm_head.weight.double() @ hidden.double()).log_softmax(dim=0)[token].item()
        assert abs(result.logprobs[0] - exact) < 1e-4 < abs(rounded - exact)


def test_bfloat16_model_with_a_custom_head_generates(tmp_path, monkeypatch):
    class Head(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.weight = linear.weight

        def forward(self, hidden):
            return hidden @ self.weight.T

    def load_with_head(path, **options):
        loaded: Any = from_pretrained(path, **options)
        model, info = loaded
        model.lm_head = Head(model.lm_head)
        return model, info

    from_pretrained = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load_with_head)
    engine = create_engine("hf", rollout_section(dtype="bfloat16"), str(make_tiny_policy(tmp_path)))
    assert len(run_requests(engine, ask(2, max_tokens=3))) == 2


@pytest.mark.parametrize(
    "override",
    [
        {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}},
        {"rope_theta": 100.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
    ids=lambda override: next(iter(override)),
)
def test_engine_uses_the_overridden_model_config(policy, override):
    config = ActorRolloutRefConfig(rollout=rollout_section(name="hf"))
    config.model.override_config = override
    overridden = start_engine(config, str(policy), 0, 1, [])
    request = ask(1, temperature=1.0, max_tokens=12)[0]
    result = run_requests(overridden, [request])[request.request_id]
    training_config = read_config(policy, override_config=config.model.override_config)
    trained = AutoModelForCausalLM.from_pretrained(policy, config=training_config)
    plain = AutoModelForCausalLM.from_pretrained(policy)
    for model, is_equal in ((trained, True), (plain, False)):
        expected = reference_logprobs(model, request, list(result.token_ids))
        assert (np.abs(np.array(result.logprobs) - np.array(expected)).max() < 1e-4) == is_equal


def test_temperature_zero_takes_the_argmax(engine, model):
    request = SamplingRequest("g", prompts(1)[0], max_tokens=5, temperature=0.0)
    ids = list(request.prompt_ids)
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert run_requests(engine, [request])["g"].token_ids == ids[len(request.prompt_ids) :]


def test_requests_that_join_later_give_the_same_results(engine):
    requests = ask(8, max_tokens=10)
    alone = {}
    for request in requests:
        alone |= run_requests(engine, [request])
    together, waiting = {}, list(requests)
    while waiting or engine.has_work():
        if waiting:
            engine.add(waiting.pop())
        together.update({result.request_id: result for result in engine.step()})
    for name, result in alone.items():
        assert together[name].token_ids == result.token_ids
        np.testing.assert_allclose(together[name].logprobs, result.logprobs, atol=1e-4)


@pytest.mark.parametrize("running, joining, steps", [(0, 1, 1), (4, 1, 1), (8, 1, 5), (8, 2, 1)])
def test_few_requests_wait_a_bounded_number_of_steps(engine, running, joining, steps):
    requests = ask(running + joining, max_tokens=20)
    for request in requests[:running]:
        engine.add(request)
    if running:
        engine.step()
    for request in requests[running:]:
        request.max_tokens = 1  # ends in the step in which it joins
        engine.add(request)
    steps_taken = 1
    while not any(result.request_id == f"r{running}" for result in engine.step()):
        steps_taken += 1
    assert steps_taken == steps


def test_equal_prompts_are_computed_once(engine, model, monkeypatch):
    batch_sizes = []
    run_model = engine._run_model

    def count_rows(rows, ids, kv_cache):
        batch_sizes.append(len(ids))
        return run_model(rows, ids, kv_cache)

    monkeypatch.setattr(engine, "_run_model", count_rows)
    first, second = prompts(2)
    requests = [
        SamplingRequest(f"r{i}", ids, seed=i, max_tokens=6)
        for i, ids in enumerate([first, second, first, first, second])
    ]
    results = run_requests(engine, requests)
    assert batch_sizes[0] == 2 and max(batch_sizes[1:]) <= 5
    assert len({tuple(result.token_ids) for result in results.values()}) > 2, "own seeds"
    for request in requests:
        result = results[request.request_id]
        expected = reference_logprobs(model, request, result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


def test_more_requests_than_sequences_all_finish(policy):
    engine = create_engine("hf", rollout_section(max_num_seqs=3), str(policy))
    assert len(run_requests(engine, ask(10, max_tokens=3))) == 10


def test_seed_determines_the_tokens(engine):
    first, repeated = run_requests(engine, ask(3)), run_requests(engine, ask(3))
    other = ask(3)
    for number, request in enumerate(other):
        request.seed = 1000 + number
    assert {n: r.token_ids for n, r in first.items()} == {
        n: r.token_ids for n, r in repeated.items()
    }
    assert {n: r.token_ids for n, r in first.items()} != {
        n: r.token_ids for n, r in run_requests(engine, other).items()
    }


def test_unseeded_requests_follow_the_engine_seed(policy):
    def sample_with_seed(seed):
        engine = create_engine("hf", rollout_section(), str(policy), seed=seed)
        requests = [SamplingRequest(f"u{i}", prompts(1)[0], max_tokens=8) for i in range(2)]
        return [result.token_ids for result in run_requests(engine, requests).values()]

    assert sample_with_seed(1) == sample_with_seed(1) != sample_with_seed(2)
    assert sample_with_seed(1)[0] != sample_with_seed(1)[1]


def test_stop_token_ends_the_segment_and_is_included(engine):
    unstopped = run_requests(engine, ask(4, max_tokens=20))
    tokenizer = engine._stop_condition_factory._tokenizer
    for request in ask(4, max_tokens=20):
        ids = unstopped[request.request_id].token_ids
        request.stop = ("</action>", tokenizer.decode(ids[3]))
        if tokenizer.encode(request.stop[1]) != [ids[3]]:
            continue  # half a character: no string of one token
        result = run_requests(engine, [request])[request.request_id]
        assert result.stop_reason is StopReason.STOP
        assert result.token_ids == ids[: ids.index(ids[3]) + 1]


def test_stop_string_of_several_tokens_keeps_its_tokens(engine):
    unstopped = run_requests(engine, ask(4, max_tokens=20))
    tokenizer = engine._stop_condition_factory._tokenizer
    count = 0
    for request in ask(4, max_tokens=20):
        ids = unstopped[request.request_id].token_ids
        positions = [
            i for i in range(2, len(ids)) if tokenizer.decode(ids[i - 1 : i + 1]).isascii()
        ]
        request.stop = tuple(tokenizer.decode(ids[i - 1 : i + 1]) for i in positions[:1])
        if not engine._stop_condition_factory.get_conditions(request.stop).stop_strings:
            continue
        count += 1
        expected = next(
            n for n in range(1, len(ids) + 1) if request.stop[0] in tokenizer.decode(ids[:n])
        )
        result = run_requests(engine, [request])[request.request_id]
        assert result.stop_reason is StopReason.STOP
        assert result.token_ids == ids[:expected]
        assert len(result.logprobs) == expected
    assert count


def test_empty_stop_string_is_refused(engine):
    with pytest.raises(ValueError, check=mentions("stop")):
        engine.add(SamplingRequest("e", [5], 3, stop=("",)))


def test_end_of_turn_token_ends_and_is_included(policy):
    model = load(policy)
    engine = create_engine("hf", rollout_section(), str(policy))
    with torch.no_grad():
        model.model.embed_tokens.weight[END] *= 3  # tied weights: the end token becomes likely
    engine.update_weights([(n, p.detach().numpy()) for n, p in model.named_parameters()], version=1)
    ended = [
        r
        for r in run_requests(engine, ask(8, max_tokens=60)).values()
        if r.stop_reason is StopReason.STOP
    ]
    assert ended
    for result in ended:
        assert result.token_ids.index(END) == len(result.token_ids) - 1
        assert len(result.logprobs) == len(result.token_ids)


def test_every_end_of_a_base_model_with_a_template_ends_a_turn(tmp_path):
    directory, end_ids = make_base_policy(tmp_path)
    section = rollout_section(max_num_seqs=128)
    engine = create_engine("hf", section, str(directory), seed=3, num_threads=1)
    requests = ask(160, max_tokens=48, temperature=1.0)
    assert_every_end_stops(run_requests(engine, requests), end_ids, 48)


def test_length_ends_at_max_tokens_and_at_the_context(engine):
    long = SamplingRequest("long", list(range(5, 255)), max_tokens=50, seed=1)
    results = run_requests(engine, [*ask(2, max_tokens=4), long])
    lengths = {
        name: len(result.token_ids)
        for name, result in results.items()
        if result.stop_reason is StopReason.LENGTH
    }
    assert lengths["long"] == 6
    assert all(size == 4 for name, size in lengths.items() if name != "long")


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "parts"),
    [
        ([], 3, ["empty"]),
        ([5], 0, ["max_tokens=0"]),
        ([5] * 256, 3, [256, "max_model_len"]),
        ([5, 400], 3, ["vocabulary"]),
    ],
)
def test_request_that_can_never_run_is_refused(engine, prompt, max_tokens, parts):
    with pytest.raises(ValueError, check=mentions(*parts)):
        engine.add(SamplingRequest("x", prompt, max_tokens))
    assert not engine.has_work()


def test_abort_removes_running_and_waiting_requests(policy):
    engine = create_engine("hf", rollout_section(max_num_seqs=2), str(policy))
    requests = ask(4, max_tokens=6)
    alone = run_requests(engine, requests[:1])["r0"].token_ids
    for request in requests:
        engine.add(request)
    engine.step()
    engine.abort(["r1", "r3", "unknown"])
    results = {}
    while engine.has_work():
        results.update({result.request_id: result for result in engine.step()})
    assert sorted(results) == ["r0", "r2"]
    assert results["r0"].token_ids == alone


def test_engine_samples_from_new_weights(policy):
    engine, model = create_engine("hf", rollout_section(), str(policy)), load(policy)
    before = run_requests(engine, ask(3))
    engine.update_weights(perturb(model), version=4)
    for request in ask(3):
        result = run_requests(engine, [request])[request.request_id]
        assert result.policy_version == 4
        expected = reference_logprobs(model, request, result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    assert before["r0"].policy_version == 0


def test_engine_samples_with_new_values_of_persistent_buffers():
    """The router of this model adds a buffer to its scores, which the trainer sends too."""
    model = build_family(SCALED["deepseek-v3"]())
    engine = hf.HFEngine.wrap_model(model, make_tiny_tokenizer(), [END])
    trained, request = copy.deepcopy(model), ask(1, temperature=1.0)[0]
    trained.model.layers[1].mlp.gate.e_score_correction_bias += torch.tensor([9.0, -9, 0, 5])
    engine.update_weights(trained.state_dict().items(), version=1)
    result = run_requests(engine, [request])[request.request_id]
    expected = reference_logprobs(trained, request, result.token_ids)
    np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=1e-5)


def test_wrong_weights_and_weights_during_requests_are_refused(engine, model):
    weights = [(name, parameter.detach().numpy()) for name, parameter in model.named_parameters()]
    with pytest.raises(EngineError, check=mentions("'nonsense'")):
        engine.update_weights([("nonsense", np.zeros(1, dtype=np.float32))], 1)
    with pytest.raises(EngineError, check=mentions(weights[-1][0])):
        engine.update_weights(weights[:-1], 1)
    engine.add(ask(1)[0])
    with pytest.raises(EngineError, check=mentions(1)):
        engine.update_weights(weights, 1)


def test_sleep_frees_weights_only_at_level_2(policy, monkeypatch):
    engine = create_engine("hf", rollout_section(), str(policy))
    weights = [(name, held.clone()) for name, held in engine.held_weights().items()]
    before = run_requests(engine, ask(2))["r0"].token_ids
    moves: list[str] = []
    monkeypatch.setattr(hf, "_move_model", lambda _model, device: moves.append(str(device)))
    engine.sleep(2)
    assert moves == [] and engine.held_weights()["lm_head.weight"].numel(), (
        "on CPU nothing is freed"
    )
    monkeypatch.setattr(engine, "_device", torch.device("cuda"))
    engine.sleep()
    engine.wake()
    assert moves == ["cpu", "cuda"]
    assert all(torch.equal(held, dict(weights)[n]) for n, held in engine.held_weights().items())
    engine.sleep(2)
    assert not any(held.numel() for held in engine.held_weights().values())
    engine.wake("weights")
    engine.wake("kv_cache")
    assert moves == ["cpu", "cuda"] * 2
    assert [held.shape for held in engine.held_weights().values()] == [w.shape for _, w in weights]
    engine.update_weights(weights, 3)
    monkeypatch.setattr(engine, "_device", torch.device("cpu"))
    assert run_requests(engine, ask(2))["r0"].token_ids == before


def test_unknown_engine_gets_a_suggestion():
    refused = has_problem("unknown_name", "actor_rollout_ref.rollout.name", "vllm", "hf")
    with pytest.raises(UserError, check=refused):
        create_engine("vlm", rollout_section(), "nowhere")


def test_missing_vllm_names_the_fallback(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(ImportError, check=mentions("rollout.name=hf")):
        create_engine("vllm", rollout_section(), "nowhere")


@pytest.mark.parametrize("name", ["qwen3.5", "falcon-h1", "nemotron-3", "lfm2", "gemma3"])
def test_recurrent_states_and_windows_follow_joining_and_finishing_rows(name):
    """The log-probs equal a full forward, although rows of other lengths join, finish and pad.

    Every second row has the prompt of the row before it, so both are computed once.
    """
    distinct = prompts(5, vocab=300)
    model = build_family({**ROW_WISE, **WINDOWED}[name]())
    engine = hf.HFEngine.wrap_model(model, make_tiny_tokenizer(), [END], max_num_seqs=4)
    requests = [
        SamplingRequest(f"r{i}", ids, seed=i, max_tokens=3 + 4 * (i % 3))
        for i, ids in enumerate(distinct[i // 2] for i in range(10))
    ]
    results = run_requests(engine, requests)
    for request in requests:
        result = results[request.request_id]
        expected = reference_logprobs(model, request, result.token_ids)
        np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)


def compute_trainer_logprobs(policy, prompt_ids, token_ids):
    """Return the log-probs [T] of ``token_ids`` by the forward pass of the trainer."""
    packed = pack_rows([torch.tensor(prompt_ids + token_ids)])
    start = len(prompt_ids)
    positions = torch.arange(start - 1, start - 1 + len(token_ids))
    targets = Targets(positions, torch.tensor(token_ids))
    with torch.no_grad():
        scores = policy(packed.input_ids, packed.position_ids, packed.layout, [targets])
    return scores[0].log_probs


FAMILIES_WITH_OTHER_CACHE = (
    "deepseek-v3.2",
    "glm-5",
    "deepseek-v4",
    "rwkv",
    "mamba",
    "mamba2",
    "minimax",
    "recurrent-gemma",
    "openai-gpt",
)


@pytest.mark.parametrize("name", FAMILIES_WITH_OTHER_CACHE)
def test_model_with_another_kind_of_cache_samples_as_the_trainer_computes(name, caplog):
    """Rows of other lengths join and finish. Every second row is greedy and shares its prompt."""
    distinct = prompts(5, vocab=300)
    model = build_family(ROW_WISE[name]())
    hf._warn_about_missing_cache.cache_clear()
    engine, _ = (  # the second engine does not repeat the warning
        hf.HFEngine.wrap_model(model, make_tiny_tokenizer(), [END], max_num_seqs=6)
        for _ in range(2)
    )
    requests = [
        SamplingRequest(
            f"r{i}", distinct[i // 2], seed=i, max_tokens=3 + 4 * (i % 3), temperature=float(i % 2)
        )
        for i in range(10)
    ]
    results = run_requests(engine, requests)
    messages = [record.message for record in caplog.records if record.name == hf.__name__]
    assert len(messages) == 1 and model.config.model_type in messages[0]
    policy = PolicyModel(prepare_for_training(copy.deepcopy(model)))
    for request in requests:
        prompt_ids, token_ids = request.prompt_ids, results[request.request_id].token_ids
        expected = compute_trainer_logprobs(policy, prompt_ids, token_ids)
        actual = results[request.request_id].logprobs
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
        if request.temperature == 0:
            with torch.no_grad():
                logits = model(torch.tensor([prompt_ids + token_ids]), use_cache=False).logits[0]
            assert token_ids == logits[len(prompt_ids) - 1 : -1].argmax(dim=-1).tolist()


def test_rwkv_engine_and_trainer_have_equal_weights_after_a_sync(tmp_path):
    """Without training mode, RWKV divides the weights of later layers at its first pass."""
    config = RwkvConfig(
        vocab_size=400, hidden_size=32, num_hidden_layers=4, context_length=256, rescale_every=2
    )
    model = build_family(config)
    model.save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    policy = PolicyModel(load_causal_lm(tmp_path))
    engine = create_engine("hf", rollout_section(), str(tmp_path))
    request = ask(1)[0]
    for version in (1, 2):  # before and after the first pass of the engine
        engine.update_weights([(n, p.detach()) for n, p in policy.lm.named_parameters()], version)
        result = run_requests(engine, [request])[request.request_id]
        for expected in (
            compute_trainer_logprobs(policy, request.prompt_ids, result.token_ids),
            reference_logprobs(model.train(), request, result.token_ids),
        ):
            np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=1e-5)
    saved = model.state_dict()
    assert all(torch.equal(weight, saved[n]) for n, weight in policy.lm.state_dict().items())


def test_padding_changes_no_rotary_embeddings_that_depend_on_the_length(monkeypatch):
    """Rotary embeddings of this model change beyond 10 tokens. One row has 9 tokens, one 12."""
    monkeypatch.setattr(hf, "_make_cache", lambda _: None)
    model = build_family(WINDOWED["phi3-longrope"]())
    engine = hf.HFEngine.wrap_model(model, make_tiny_tokenizer(), [END])
    requests = [SamplingRequest(f"r{n}", list(range(5, 5 + n)), max_tokens=1) for n in (9, 12)]
    results = run_requests(engine, requests)
    for request in requests:
        result = results[request.request_id]
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt_ids]), use_cache=False).logits[0, -1]
        expected = logits.log_softmax(dim=-1)[result.token_ids].tolist()
        np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=1e-5)
