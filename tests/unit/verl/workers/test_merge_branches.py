"""Tests that branches with equal tokens after equal prefixes are computed once."""

import pytest
import torch

from tests.helpers.policy_rows import policy_config, random_rows, score_branches_naively
from tests.helpers.tiny_model import make_tiny_policy
from verl.protocol import object_array
from verl.records import BranchRequest
from verl.workers import branch_scores
from verl.workers.actor import ActorWorker
from verl.workers.branch_scores import compute_log_probs_and_scores, merge_equal_branches


def test_owners_of_merged_branches():
    """Rows 0 and 1 share a prefix; row 2 has another prefix."""
    rows = [torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 9]), torch.tensor([5, 2, 3])]
    branches = [
        [BranchRequest(2, [7, 8], target_start=1, label=1), BranchRequest(2, [6], label=2)],
        [BranchRequest(2, [7, 8], target_start=1, label=4), BranchRequest(2, [7, 8], label=1)],
        [BranchRequest(2, [6], label=2), BranchRequest(1, [6], label=3)],
    ]
    merged, owners = merge_equal_branches(branches, rows)
    # Branches with equal tokens and other targets are not equal.
    assert merged == [branches[0], [branches[1][1]], branches[2]]
    assert owners == [[(0, 0), (0, 1)], [(0, 0), (1, 0)], [(2, 0), (2, 1)]]


@pytest.mark.parametrize("max_rows", [8, 1])
def test_merged_branches_get_the_scores_of_separate_forwards(tmp_path, monkeypatch, max_rows):
    worker = ActorWorker(policy_config(make_tiny_policy(tmp_path)), device="cpu")
    worker.init_model()
    data = random_rows(rows=4)
    # Rows 1 and 3 are copies of rows 0 and 2.
    for copy, original in ((1, 0), (3, 2)):
        for key in ("input_ids", "attention_mask", "response_mask", "responses"):
            data.batch[key][copy] = data.batch[key][original]
    branches = [
        [
            BranchRequest(3, [30, 31, 32], target_start=1, step=row, label=1),
            BranchRequest(2, [33], step=row),
        ]
        for row in range(4)
    ]
    data.non_tensor_batch["branches"] = object_array(branches)
    data.non_tensor_batch["spans"] = object_array([[] for _ in range(4)])
    packed: list[int] = []
    original_pack = branch_scores.Rows.pack_rows

    def count_and_pack(self, rows, of_rows=None):
        packed.append(sum(len(row) for row in of_rows or []))
        return original_pack(self, rows, of_rows)

    monkeypatch.setattr(branch_scores.Rows, "pack_rows", count_and_pack)
    actual = compute_log_probs_and_scores(
        worker.train_engine, data, max_rows=max_rows
    ).branch_scores
    assert actual is not None and sum(packed) == 4  # of 8
    expected = score_branches_naively(worker.train_engine, data)
    for row in range(4):
        for score, reference in zip(actual[row], expected[row], strict=True):
            assert (score.step, score.label, score.num_tokens) == (
                row,
                reference.label,
                reference.num_tokens,
            )
            assert score.logprob == pytest.approx(reference.logprob, abs=1e-5)
            assert score.entropy == pytest.approx(reference.entropy, abs=1e-5)
