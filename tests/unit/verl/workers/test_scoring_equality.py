"""Rule 9: the prefix-shared pass gives what one forward per thought gives, and the old log-probs on
the way.

Rows of real plays in both history policies, ragged, some steps without alternatives; tied and
untied embeddings; float32 and bfloat16; one rank and two. The naive side is a transformers model
with its own attention.
"""

import json
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.naive_scorer import NaiveScorer
from tests.helpers.policy_rows import policy_config
from tests.helpers.ranks import run_two_ranks
from tests.helpers.thinking_plays import collect, steps_of, thinking_config
from tests.helpers.tiny_model import make_tiny_policy, make_tiny_tokenizer
from verl.single_controller.base.decorator import Dispatch, Registration, plan_calls
from verl.workers.actor import ActorWorker

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
HISTORIES = ("append", "window")
EMBEDDINGS = ("tied", "untied")
NUMBERS = ("logprob", "entropy", "mean_prob", "geometric_prob")
CASES = [("tied", "float32"), ("untied", "float32"), ("tied", "bfloat16")]
every_case = pytest.mark.parametrize(("embeddings", "dtype"), CASES)
both = pytest.mark.parametrize("history", HISTORIES)


def answers(worker, data) -> list[dict]:
    """What the pass gives, row by row, as plain numbers."""
    found = worker.compute_log_prob(data)
    others = found.non_tensor_batch
    rows = []
    for row in range(len(found)):
        mask = data.batch["response_mask"][row].bool()
        tokens = {
            key: found.batch[key][row][mask].tolist() for key in ("old_log_probs", "entropys")
        }
        records = []
        if "branch_scores" in others:
            records = [*others["branch_scores"][row], *others["span_scores"][row]]
        rows.append({**tokens, "records": [asdict(record) for record in records]})
    return rows


def worker_of(path, dtype, **actor):
    worker = ActorWorker(policy_config(path, dtype=dtype, **actor), device="cpu")
    worker.init_model()
    return worker


def run_rank(rank, directory, questions):
    """One of two ranks: score this rank's rows for every case and history."""
    registration = Registration(Dispatch.DP_COMPUTE_PROTO)
    found = {}
    for embeddings, dtype in CASES:
        worker = worker_of(directory / embeddings, dtype, ppo_micro_batch_size_per_gpu=2)
        for history, data in questions.items():
            calls, _ = plan_calls(registration, 2, (data,), {})
            (mine,), _ = calls[rank]
            found[f"{embeddings} {dtype} {history}"] = answers(worker, mine)
    (directory / f"rank{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    directory = tmp_path_factory.mktemp("policies")
    for embeddings in EMBEDDINGS:
        make_tiny_policy(directory / embeddings, tie=embeddings == "tied", std=0.1)
    return directory


@pytest.fixture(scope="module")
def questions(policies):
    """What ``compute_log_prob`` is asked about a collected batch, by history policy: an odd number
    of rows.
    """
    asked = {}
    scorer = NaiveScorer(AutoModelForCausalLM.from_pretrained(policies / "tied"))
    for history in HISTORIES:
        config = thinking_config(history, n=1, step_fraction=0.8)
        data = collect(make_tiny_tokenizer(), scorer, config, groups=3)
        expanded = [len(record.contexts) for _, record in steps_of(data)]
        assert {1, 4} == set(expanded) and len(
            {len(b) for b in scorer.calls[-1].non_tensor_batch["branches"]}
        ) > 1
        asked[history] = scorer.calls[-1]
        if len(data) % 2 == 0:
            asked[history] = asked[history][: len(data) - 1]
    return asked


@pytest.fixture(scope="module")
def naive(policies, questions):
    """(embeddings, dtype, history) -> one forward per row and per thought."""
    known = {}

    def answer(embeddings, dtype, history):
        if (embeddings, dtype, history) not in known:
            model = AutoModelForCausalLM.from_pretrained(
                policies / embeddings, dtype=getattr(torch, dtype)
            )
            known[embeddings, dtype, history] = NaiveScorer(model)(questions[history])
        return known[embeddings, dtype, history]

    return answer


@pytest.fixture(scope="module")
def two_ranks(policies, questions):
    """What two gloo ranks give, rows in order."""
    run_two_ranks(run_rank, policies, questions)
    ranks = [json.loads((policies / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    return {case: [*ranks[0][case], *ranks[1][case]] for case in ranks[0]}


def assert_equal_records(found: list[dict], reference, tolerance: float):
    """Records of ``found`` rows against the naive scorer's ``reference`` (a ``DataProto``)."""
    branches, spans = (reference.non_tensor_batch[key] for key in ("branch_scores", "span_scores"))
    count = 0
    for row in range(len(reference)):
        expected = [asdict(score) for score in (*branches[row], *spans[row])]
        assert len(found[row]["records"]) == len(expected)
        for record, other in zip(found[row]["records"], expected, strict=True):
            assert all(record[key] == other[key] for key in ("step", "label", "num_tokens"))
            for key in NUMBERS:
                assert record[key] == pytest.approx(other[key], abs=tolerance), (
                    row,
                    record["step"],
                    key,
                )
            count += 1
    assert count > 20


@both
@every_case
def test_rule_09_one_pass_equals_a_forward_per_thought(
    policies, questions, naive, embeddings, dtype, history
):
    worker, data = worker_of(policies / embeddings, dtype), questions[history]
    found = answers(worker, data)
    reference = naive(embeddings, dtype, history)
    assert_equal_records(found, reference, TOLERANCE[dtype])
    plain = answers(worker, data.select(list(data.batch.keys()), []))
    for row, (scored, alone) in enumerate(zip(found, plain, strict=True)):
        for key in ("old_log_probs", "entropys"):
            assert scored[key] == pytest.approx(alone[key], abs=TOLERANCE[dtype]), (
                "the pass without branches"
            )
            if dtype == "float32":
                sampled = data.batch["response_mask"][row].bool()
                assert scored[key] == pytest.approx(
                    reference.batch[key][row][sampled].tolist(), abs=TOLERANCE[dtype]
                )


@both
@every_case
def test_rule_09_two_ranks_equal_a_forward_per_thought(
    two_ranks, questions, naive, embeddings, dtype, history
):
    found, reference = (
        two_ranks[f"{embeddings} {dtype} {history}"],
        naive(embeddings, dtype, history),
    )
    assert (
        len(questions[history]) % 2 == 1 and len(found) == len(questions[history]) + 1
    )  # a row to even the ranks out
    assert_equal_records(found[: len(reference)], reference, TOLERANCE[dtype])
    if dtype == "float32":
        for row in range(len(reference)):
            sampled = questions[history].batch["response_mask"][row].bool()
            expected = reference.batch["old_log_probs"][row][sampled].tolist()
            assert found[row]["old_log_probs"] == pytest.approx(expected, abs=TOLERANCE[dtype])


@every_case
def test_rule_09_the_comparison_can_fail(policies, questions, naive, embeddings, dtype):
    """Exchanging two thoughts moves the numbers by more than either tolerance."""
    worker, data = worker_of(policies / embeddings, dtype), questions["append"]
    found = answers(worker, data)
    for row in found:
        row["records"] = row["records"][1:] + row["records"][:1]
    for row, other in zip(
        found, naive(embeddings, dtype, "append").non_tensor_batch["branch_scores"], strict=True
    ):
        for record, expected in zip(row["records"], other, strict=False):
            record |= {key: getattr(expected, key) for key in ("step", "label", "num_tokens")}
    with pytest.raises(AssertionError):
        assert_equal_records(found, naive(embeddings, dtype, "append"), TOLERANCE[dtype])
