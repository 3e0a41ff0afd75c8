"""Tests of tiny random models of many families against plain forwards of transformers.

Log-probs, gradients and the scores of RLVCR (branches and spans) are equal, on whichever path.
"""

import copy

import pytest
import torch

from tests.helpers.model_families import ROW_WISE, SCALED, WINDOWED, build_family
from tests.helpers.naive_scorer import NaiveScorer
from tests.helpers.policy_rows import add_branches, random_rows
from verl.models.forward_kind import (
    PackedForward,
    RowWiseForward,
    decode_forward_kind,
    encode_forward_kind,
    get_forward_kind,
    plan_passes,
)
from verl.models.loader import predict_packing_support, prepare_for_training
from verl.models.policy import PolicyModel
from verl.workers.branch_scores import compute_log_probs_and_scores
from verl.workers.engine import TrainEngine
from verl.workers.rows import Rows

FAMILIES = {**ROW_WISE, **WINDOWED, **SCALED}
TOLERANCE = 1e-5
ROWS = 3


def build_pair(name):
    """Return a prepared policy and an independent copy with eager attention of transformers."""
    plain = build_family(FAMILIES[name](), attention="eager")
    return PolicyModel(prepare_for_training(copy.deepcopy(plain))), plain


def mean_log_prob(policy, data):
    """Return the mean log-prob of the sampled tokens, as in an update."""
    rows, index = Rows(data), list(range(len(data)))
    packed = rows.pack_rows(index)
    targets = rows.sampled_targets(packed, index)
    return policy(packed.input_ids, packed.position_ids, packed.layout, [targets])[
        0
    ].log_probs.mean()


def mean_plain_log_prob(plain, data):
    """Return the mean log-prob of the sampled tokens, from one plain forward per row."""
    chosen = []
    for row in data.batch:
        real = row["attention_mask"].bool()
        ids = row["input_ids"][real]
        sampled = torch.cat([torch.zeros(len(real) - len(row["responses"])), row["response_mask"]])
        log_probs = plain(ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        log_probs = log_probs[:-1].gather(-1, ids[1:, None])[:, 0]
        chosen.append(log_probs[sampled[real][1:].bool()])
    return torch.cat(chosen).mean()


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_gradients_and_scores_equal_plain_forwards(name):
    policy, plain = build_pair(name)
    assert isinstance(policy.forward_kind, RowWiseForward) == (name in ROW_WISE)
    assert policy.forward_kind.computes_logits_by_forward == any(
        key in name for key in ("gemma", "granite", "cohere", "nanochat", "minicpm", "falcon-h1")
    )
    data = add_branches(random_rows(ROWS))
    loss, plain_loss = mean_log_prob(policy, data), mean_plain_log_prob(plain, data)
    torch.testing.assert_close(loss, plain_loss, atol=TOLERANCE, rtol=0)
    loss.backward()
    plain_loss.backward()
    gradients = {name: p.grad for name, p in policy.lm.named_parameters() if p.grad is not None}
    assert gradients.keys() == {n for n, p in plain.named_parameters() if p.grad is not None}
    for parameter_name, gradient in gradients.items():
        expected = plain.get_parameter(parameter_name).grad
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(gradient / scale, expected / scale, atol=TOLERANCE, rtol=0)
    policy.zero_grad()
    scores = compute_log_probs_and_scores(
        TrainEngine(policy, device="cpu"), data, temperature=0.7, max_rows=2
    )
    data.meta_info["temperature"] = 0.7
    expected_scores = NaiveScorer(plain)(data)
    columns = expected_scores.non_tensor_batch
    for actual, expected in (
        (scores.log_probs, expected_scores.batch["old_log_probs"]),
        (scores.entropy, expected_scores.batch["entropys"]),
    ):
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)
    for actual, expected in (
        (scores.branch_scores, columns["branch_scores"]),
        (scores.span_scores, columns["span_scores"]),
    ):
        assert actual is not None
        for row, expected_row in zip(actual, expected, strict=True):
            assert [list(s) for s in row] == [
                pytest.approx(list(s), abs=TOLERANCE) for s in expected_row
            ]


@pytest.mark.parametrize("name", FAMILIES)
def test_prediction_without_weights_is_the_choice_at_load(name):
    chosen = get_forward_kind(prepare_for_training(build_family(FAMILIES[name]())))
    expected = (
        ("", chosen.max_row_tokens)
        if isinstance(chosen, PackedForward)
        else (chosen.not_packed_reason, None)
    )
    config = FAMILIES[name]()
    assert predict_packing_support(config) == expected
    assert config._attn_implementation is None, "the config of the caller was changed"


def test_short_rows_of_a_windowed_model_are_packed():
    policy, _ = build_pair("mistral")
    forward_kind = policy.forward_kind
    assert isinstance(forward_kind, PackedForward) and forward_kind.long_row_forward is not None
    assert forward_kind.max_row_tokens == 10
    assert forward_kind.count_tokens(10, []) == 10
    assert policy.lm.config._attn_implementation == forward_kind.attention
    mean_log_prob(policy, random_rows(ROWS))
    assert policy.lm.config._attn_implementation == "sdpa", "a row has more tokens than the window"


def test_sequences_of_similar_length_share_a_pass():
    assert plan_passes([9, 2, 8]) == [[0, 2], [1]]
    assert plan_passes([9, 2, 8], padded=False) == [[0], [2], [1]]
    assert plan_passes([9000, 9000, 3]) == [[0], [1], [2]], "a pass has at most 16,384 tokens"


def test_rotary_embeddings_by_length_are_computed_without_padding():
    policy, _ = build_pair("phi3-longrope")
    forward_kind = policy.forward_kind
    assert isinstance(forward_kind, PackedForward) and forward_kind.long_row_forward is not None
    assert forward_kind.long_row_forward.should_pad is False


@pytest.mark.parametrize("name", ["qwen3.5", "mistral", "qwen3", "cohere"])
def test_path_survives_the_way_to_other_ranks(name):
    forward_kind = build_pair(name)[0].forward_kind
    assert decode_forward_kind(encode_forward_kind(forward_kind)) == forward_kind


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing_gives_the_same_gradient_after_packed_and_long_rows(checkpointing):
    """Backward repeats the layers with the attention of the pass, not with that of the other."""
    plain = build_family(FAMILIES["mistral"](), attention="eager")
    lm = prepare_for_training(copy.deepcopy(plain), gradient_checkpointing=checkpointing)
    policy = PolicyModel(lm).train()
    data = random_rows(ROWS)
    for _ in range(2):
        mean_log_prob(policy, data).backward()
        mean_plain_log_prob(plain, data).backward()
    for name, parameter in policy.lm.named_parameters():
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, expected, atol=2 * TOLERANCE, rtol=0)
