"""Tests that the pass with a shared prefix has the scores of one forward pass per thought.

This is rule 9 of ``test_rlvcr_rules``. The pass also returns the old log-probs.

The rows come from real trajectories in both history policies. They differ in length, and some turns
have no alternatives. The cases are tied and untied embeddings, float32 and bfloat16, one rank and
two. The naive side is a transformers model with its own attention.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.naive_scorer import NaiveScorer
from tests.helpers.policy_rows import policy_config
from tests.helpers.ranks import run_two_ranks
from tests.helpers.thinking_trajectories import collect, steps_of, thinking_config
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from verl.single_controller.base.decorator import Dispatch, MethodRegistration, plan_calls
from verl.workers.actor import ActorWorker

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
HISTORIES = ("append", "window")
EMBEDDINGS = ("tied", "untied")
NUMBERS = ("logprob", "entropy", "mean_prob", "geometric_prob")
CASES = [("tied", "float32"), ("untied", "float32"), ("tied", "bfloat16")]
every_case = pytest.mark.parametrize(("embeddings", "dtype"), CASES)
both = pytest.mark.parametrize("history", HISTORIES)


def score_rows_of(worker, data) -> list[dict]:
    """Return the scores of the pass, row by row, as plain numbers."""
    scored = worker.compute_log_prob(data)
    columns = scored.non_tensor_batch
    rows = []
    for row in range(len(scored)):
        mask = data.batch["response_mask"][row].bool()
        tokens = {
            key: scored.batch[key][row][mask].tolist() for key in ("old_log_probs", "entropys")
        }
        records = []
        if "branch_scores" in columns:
            records = [*columns["branch_scores"][row], *columns["span_scores"][row]]
        rows.append({**tokens, "records": [record._asdict() for record in records]})
    return rows


def make_worker(path, dtype, **actor):
    worker = ActorWorker(policy_config(path, dtype=dtype, **actor), device="cpu")
    worker.init_model()
    return worker


def run_rank(rank, directory, score_requests):
    """Score the rows of one of two ranks for every case and history, and write them to a file."""
    registration = MethodRegistration(Dispatch.DP_COMPUTE_PROTO)
    scores = {}
    for embeddings, dtype in CASES:
        worker = make_worker(directory / embeddings, dtype, ppo_micro_batch_size_per_gpu=2)
        for history, data in score_requests.items():
            calls, _ = plan_calls(registration, 2, (data,), {})
            (own_rows,), _ = calls[rank]
            scores[f"{embeddings} {dtype} {history}"] = score_rows_of(worker, own_rows)
    (directory / f"rank{rank}.json").write_text(json.dumps(scores))


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    directory = tmp_path_factory.mktemp("policies")
    for embeddings in EMBEDDINGS:
        make_tiny_policy(directory / embeddings, tie=embeddings == "tied", std=0.1)
    return directory


@pytest.fixture(scope="module")
def score_requests(policies):
    """Return the input of ``compute_log_prob`` by history policy, with an odd number of rows."""
    inputs = {}
    scorer = NaiveScorer(AutoModelForCausalLM.from_pretrained(policies / "tied"))
    for history in HISTORIES:
        config = thinking_config(history, n=1, step_fraction=0.8)
        data = collect(make_tiny_tokenizer(), scorer, config, groups=3)
        expanded = [len(record.contexts) for _, record in steps_of(data)]
        assert {1, 4} == set(expanded) and len(
            {len(b) for b in scorer.calls[-1].non_tensor_batch["branches"]}
        ) > 1
        inputs[history] = scorer.calls[-1]
        if len(data) % 2 == 0:
            inputs[history] = inputs[history][: len(data) - 1]
    return inputs


@pytest.fixture(scope="module")
def naive(policies, score_requests):
    """Return a function (embeddings, dtype, history) -> scores from one forward per row and
    thought.
    """
    cache = {}

    def score(embeddings, dtype, history):
        if (embeddings, dtype, history) not in cache:
            model = AutoModelForCausalLM.from_pretrained(
                policies / embeddings, dtype=getattr(torch, dtype)
            )
            cache[embeddings, dtype, history] = NaiveScorer(model)(score_requests[history])
        return cache[embeddings, dtype, history]

    return score


@pytest.fixture(scope="module")
def two_ranks(policies, score_requests):
    """Return the scores of two gloo ranks, with the rows in order."""
    run_two_ranks(run_rank, policies, score_requests)
    ranks = [json.loads((policies / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return {case: [*ranks[0][case], *ranks[1][case]] for case in ranks[0]}


def assert_equal_records(actual: list[dict], reference, tolerance: float):
    """Compare the records of the ``actual`` rows with the naive scorer's ``reference``, a
    ``DataProto``.
    """
    branches, spans = (reference.non_tensor_batch[key] for key in ("branch_scores", "span_scores"))
    count = 0
    for row in range(len(reference)):
        expected = [score._asdict() for score in (*branches[row], *spans[row])]
        assert len(actual[row]["records"]) == len(expected)
        for record, naive_record in zip(actual[row]["records"], expected, strict=True):
            assert all(record[key] == naive_record[key] for key in ("step", "label", "num_tokens"))
            for key in NUMBERS:
                assert record[key] == pytest.approx(naive_record[key], abs=tolerance), (
                    row,
                    record["step"],
                    key,
                )
            count += 1
    assert count > 20


@both
@every_case
def test_one_pass_equals_a_forward_per_thought(
    policies, score_requests, naive, embeddings, dtype, history
):
    worker, data = make_worker(policies / embeddings, dtype), score_requests[history]
    actual = score_rows_of(worker, data)
    reference = naive(embeddings, dtype, history)
    assert_equal_records(actual, reference, TOLERANCE[dtype])
    plain = score_rows_of(worker, data.select(list(data.batch.keys()), []))
    for row, (scored, unbranched) in enumerate(zip(actual, plain, strict=True)):
        for key in ("old_log_probs", "entropys"):
            assert scored[key] == pytest.approx(unbranched[key], abs=TOLERANCE[dtype]), (
                "the pass without branches"
            )
            if dtype == "float32":
                sampled = data.batch["response_mask"][row].bool()
                assert scored[key] == pytest.approx(
                    reference.batch[key][row][sampled].tolist(), abs=TOLERANCE[dtype]
                )


@both
@every_case
def test_two_ranks_equal_a_forward_per_thought(
    two_ranks, score_requests, naive, embeddings, dtype, history
):
    actual, reference = (
        two_ranks[f"{embeddings} {dtype} {history}"],
        naive(embeddings, dtype, history),
    )
    assert (
        len(score_requests[history]) % 2 == 1 and len(actual) == len(score_requests[history]) + 1
    )  # a padding row, so that both ranks have the same number of rows
    assert_equal_records(actual[: len(reference)], reference, TOLERANCE[dtype])
    if dtype == "float32":
        for row in range(len(reference)):
            sampled = score_requests[history].batch["response_mask"][row].bool()
            expected = reference.batch["old_log_probs"][row][sampled].tolist()
            assert actual[row]["old_log_probs"] == pytest.approx(expected, abs=TOLERANCE[dtype])


@every_case
def test_comparison_detects_exchanged_thoughts(policies, score_requests, naive, embeddings, dtype):
    """The difference is larger than either tolerance."""
    worker, data = make_worker(policies / embeddings, dtype), score_requests["append"]
    actual = score_rows_of(worker, data)
    for row in actual:
        row["records"] = row["records"][1:] + row["records"][:1]
    for row, other in zip(
        actual, naive(embeddings, dtype, "append").non_tensor_batch["branch_scores"], strict=True
    ):
        for record, expected in zip(row["records"], other, strict=False):
            record |= {key: getattr(expected, key) for key in ("step", "label", "num_tokens")}
    with pytest.raises(AssertionError):
        assert_equal_records(actual, naive(embeddings, dtype, "append"), TOLERANCE[dtype])
