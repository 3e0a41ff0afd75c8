"""Tests of data sent to the workers, of engines by name, and of refusals of missing preparation."""

import pickle

import pytest

from tests.helpers.policy_rows import actor_of, add_branches, policy_config, random_rows
from tests.helpers.refusals import mentions, suggests
from tests.helpers.tiny_model import make_tiny_policy
from verl.models.loader import load_causal_lm
from verl.models.policy import PolicyModel
from verl.models.prefix_tree import SortedSequences
from verl.protocol import DataProto
from verl.records import BranchRequest, RestrictedTokenLoss, ScoreResult, SpanRequest
from verl.workers.actor import ActorWorker
from verl.workers.engine import TrainEngine
from verl.workers.policy_loss import create_policy_loss
from verl.workers.rollout.engine_registry import import_engine_class
from verl.workers.rows import (
    choose_micro_batch_limits,
    make_micro_batches,
    make_prefix_tree_micro_batches,
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1)


def test_branches_spans_and_choice_survive_pickling():
    data = add_branches(random_rows(rows=4))
    data.meta_info["choice"] = RestrictedTokenLoss((1, 2), weight=0.5, name="colour")
    received = pickle.loads(pickle.dumps(data))
    for key, kind in (("branches", BranchRequest), ("spans", SpanRequest)):
        for row, sent in zip(
            received.non_tensor_batch[key], data.non_tensor_batch[key], strict=True
        ):
            assert row == sent and all(isinstance(record, kind) for record in row)
    assert received.meta_info["choice"] == data.meta_info["choice"]


def test_shards_of_branches_and_scores_are_joined_in_order(policy):
    data = add_branches(random_rows(rows=4))
    worker = actor_of(policy)
    whole = worker.compute_log_prob(data).non_tensor_batch
    parts = [pickle.loads(pickle.dumps(worker.compute_log_prob(part))) for part in data.chunk(2)]
    joined = DataProto.concat(parts).non_tensor_batch
    for key in ("branch_scores", "span_scores"):
        for row, expected in zip(joined[key], whole[key], strict=True):
            assert all(isinstance(score, ScoreResult) for score in row)
            labels = [(score.step, score.label, score.num_tokens) for score in row]
            assert labels == [(score.step, score.label, score.num_tokens) for score in expected]


def test_metric_of_a_choice_contains_its_name(policy):
    worker = actor_of(policy)
    data = random_rows()
    data.meta_info["choice"] = RestrictedTokenLoss((20, 21), weight=0.1, name="colour")
    metrics = worker.update_actor(data).meta_info["metrics"]
    assert 0 < metrics["actor/colour_entropy"] <= 0.6932
    assert "actor/level_entropy" not in metrics


def test_bonus_without_choice_mask_is_no_loss_term(policy):
    data = random_rows()
    data.meta_info["choice"] = RestrictedTokenLoss((20, 21), weight=0.1)
    del data.batch["choice_mask"]
    loss = create_policy_loss(policy_config(policy).actor, data)
    assert loss.restricted_loss is None and loss.allowed_token_ids is None


def test_uninitialised_worker_names_the_missing_call(policy):
    worker = ActorWorker(policy_config(policy), device="cpu")
    with pytest.raises(RuntimeError, check=mentions("init_model()")):
        worker.compute_log_prob(random_rows())


def test_frozen_engine_refuses_steps(policy):
    engine = TrainEngine(PolicyModel(load_causal_lm(policy)), device="cpu")
    for call in (engine.step, engine.skip_step):
        with pytest.raises(RuntimeError):
            call()
    assert engine.steps == 0


def test_unset_dtype_is_refused(policy):
    with pytest.raises(ValueError, check=mentions("dtype=None")):
        TrainEngine(PolicyModel(load_causal_lm(policy)), device="cpu", dtype=None)


def test_unknown_override_gets_a_suggestion(policy):
    with pytest.raises(ValueError, check=suggests("hidden_size")):
        load_causal_lm(policy, override_config={"hiden_size": 64})


def test_unknown_engine_gets_a_suggestion():
    with pytest.raises(ValueError, check=suggests("vllm", "hf")):
        import_engine_class("vlm")


def test_micro_batches_of_a_tree_hold_neighbours_up_to_the_tokens_of_their_limit():
    """The sorted rows share 4, 0 and 3 tokens with their neighbour."""
    rows = SortedSequences([1, 0, 3, 2], [0, 4, 0, 3])
    sizes = [6, 8, 7, 5]
    assert make_prefix_tree_micro_batches(sizes, rows, max_tokens=19) == [[1, 0, 3, 2]]
    assert make_prefix_tree_micro_batches(sizes, rows, max_tokens=18) == [[1, 0, 3], [2]]
    assert make_prefix_tree_micro_batches(sizes, rows, max_tokens=9) == [[1], [0], [3, 2]]
    assert make_prefix_tree_micro_batches(sizes, rows, max_rows=2) == [[1, 0, 3], [2]], (
        "8 + 7 tokens"
    )
    assert make_prefix_tree_micro_batches(sizes, rows, max_rows=1) == [[1], [0], [3], [2]]


def test_limits_count_tokens_or_rows():
    lengths = [10, 20, 30]
    assert make_micro_batches(lengths, **choose_micro_batch_limits(True, 1, 30)) == [[0, 1], [2]]
    assert make_micro_batches(lengths, **choose_micro_batch_limits(False, 1, 30)) == [[0], [1], [2]]
    assert make_micro_batches(lengths, **choose_micro_batch_limits(None, 2, 30)) == [[0, 1], [2]]
