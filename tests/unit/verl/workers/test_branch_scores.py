"""Tests that branches in one pass with their row equal separate forwards."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.policy_rows import (
    actor_of,
    add_branches,
    random_rows,
    score_branches_naively,
)
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_policy
from verl.models import attention_calls
from verl.protocol import object_array
from verl.records import BranchRequest, ScoreResult, SpanRequest

NUMBERS = ("logprob", "entropy", "mean_prob", "geometric_prob")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=64, layers=2, std=0.2)


def assert_same_records(actual, expected, tolerance=1e-5):
    assert [len(row) for row in actual] == [len(row) for row in expected]
    for row, reference in zip(actual, expected, strict=True):
        for record, other in zip(row, reference, strict=True):
            for name in ("step", "label", "num_tokens"):
                assert getattr(record, name) == getattr(other, name), name
            for name in NUMBERS:
                expected_number = pytest.approx(getattr(other, name), abs=tolerance)
                assert getattr(record, name) == expected_number, name


def score_with_transformers(model, segment, sequence, first):
    """Return the score of ``sequence[first:]`` from a plain forward with transformers' own
    attention.
    """
    with torch.no_grad():
        log_probs = model(sequence[None]).logits[0].log_softmax(-1)[first - 1 : -1]
    target_log_probs = log_probs.gather(-1, sequence[first:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return ScoreResult(
        step=segment.step,
        label=segment.label,
        num_tokens=len(target_log_probs),
        logprob=target_log_probs.mean().item(),
        entropy=entropy.mean().item(),
        mean_prob=target_log_probs.exp().mean().item(),
        geometric_prob=target_log_probs.mean().exp().item(),
    )


@pytest.mark.parametrize(
    "limits", [{"ppo_micro_batch_size_per_gpu": 8}, {"ppo_micro_batch_size_per_gpu": 1}]
)
@pytest.mark.parametrize("block", [1, 20, 10_000])
def test_branches_equal_separate_forwards(policy, monkeypatch, limits, block):
    """Branches differ in length, three share a start, starts are 1 and the end of the row, one row
    has none.
    """
    monkeypatch.setattr(attention_calls, "CALL_OVERHEAD_PAIRS", block)
    data = add_branches(random_rows())
    output = actor_of(policy, **limits).compute_log_prob(data)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    for row, records in enumerate(output.non_tensor_batch["branch_scores"]):
        tokens = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()]
        branches = data.non_tensor_batch["branches"][row]
        expected = []
        for branch in branches:
            sequence = torch.cat([tokens[: branch.start], torch.tensor(branch.token_ids)])
            first = branch.start + branch.target_start
            expected.append(score_with_transformers(model, branch, sequence, first))
        assert_same_records([records], [expected])


def test_naive_reference_gives_the_same_scores(policy):
    worker, data = actor_of(policy), add_branches(random_rows(seed=3))
    actual = worker.compute_log_prob(data).non_tensor_batch["branch_scores"]
    assert_same_records(actual, score_branches_naively(worker.train_engine, data))


def test_branches_do_not_change_the_scores_of_their_row(policy):
    worker, data = actor_of(policy), random_rows()
    plain, branched = worker.compute_log_prob(data), worker.compute_log_prob(add_branches(data))
    assert "branch_scores" not in plain.non_tensor_batch
    for key in ("old_log_probs", "entropys"):
        torch.testing.assert_close(branched.batch[key], plain.batch[key], atol=1e-5, rtol=0)


def test_spans_are_scored_at_temperature_one(policy):
    """``old_log_probs`` use the temperature of the rollout; spans and branches do not."""
    worker, data = actor_of(policy), add_branches(random_rows())
    plain = worker.compute_log_prob(data)
    data.meta_info["temperature"] = 0.5
    sharp = worker.compute_log_prob(data)
    assert (sharp.batch["old_log_probs"] - plain.batch["old_log_probs"]).abs().max() > 0.1
    for key in ("span_scores", "branch_scores"):
        assert_same_records(sharp.non_tensor_batch[key], plain.non_tensor_batch[key])
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    for row, spans in enumerate(data.non_tensor_batch["spans"]):
        tokens = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()]
        (span,) = spans
        expected = [score_with_transformers(model, span, tokens[: span.end], span.start)]
        assert_same_records([plain.non_tensor_batch["span_scores"][row]], [expected])


@pytest.mark.parametrize("is_sampled", [True, False])
def test_logits_of_sampled_tokens_are_not_computed_again_for_spans(policy, is_sampled):
    """A span with a token that was not sampled is scored too, from logits of its own."""
    worker, data = actor_of(policy), random_rows(rows=2)
    prompt_length = int(data.batch["attention_mask"][0, : -data.batch["responses"].shape[1]].sum())
    data.batch["response_mask"][0, :4] = torch.tensor([1, 1, int(is_sampled), 1])
    data = add_branches(data)
    data.non_tensor_batch["spans"] = object_array(
        [[SpanRequest(prompt_length, prompt_length + 4)], []]
    )
    num_span_targets = []
    module = worker.train_engine.module
    hook = module.register_forward_pre_hook(
        lambda _, args: num_span_targets.append(len(args[3][2].tokens))
    )
    ((score,), _) = worker.compute_log_prob(data).non_tensor_batch["span_scores"]
    hook.remove()
    assert sum(num_span_targets) == (0 if is_sampled else 4)
    tokens = data.batch["input_ids"][0][data.batch["attention_mask"][0].bool()]
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    span = SpanRequest(prompt_length, prompt_length + 4)
    expected = score_with_transformers(model, span, tokens[: span.end], span.start)
    assert_same_records([[score]], [[expected]])


def test_branch_that_repeats_its_row_gets_the_same_score(policy):
    worker, data = actor_of(policy), random_rows(rows=2)
    tokens = data.batch["input_ids"][0][data.batch["attention_mask"][0].bool()].tolist()
    branch = BranchRequest(4, tokens[4:9], target_start=2, label=1)
    data = add_branches(data)
    data.non_tensor_batch["branches"][0] = [branch]
    data.non_tensor_batch["spans"][0] = [SpanRequest(6, 9, label=1)]
    columns = worker.compute_log_prob(data).non_tensor_batch
    assert_same_records([columns["branch_scores"][0]], [columns["span_scores"][0]])


def test_spans_and_targets_outside_the_row_are_refused(policy):
    worker, data = actor_of(policy), add_branches(random_rows(rows=2))
    data.non_tensor_batch["spans"][0] = [SpanRequest(2, 999)]
    with pytest.raises(ValueError, check=mentions("span")):
        worker.compute_log_prob(data)
    data = add_branches(random_rows(rows=2))
    data.non_tensor_batch["branches"][0] = [BranchRequest(2, [5], target_start=1)]
    with pytest.raises(ValueError, check=mentions("target_start")):
        worker.compute_log_prob(data)
