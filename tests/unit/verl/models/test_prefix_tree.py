"""Tests that rows merged into a prefix tree equal rows that are computed one by one."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_policy
from verl.models import attention_calls, packed_layout
from verl.models.loader import load_causal_lm
from verl.models.packed_layout import number_tokens_depth_first
from verl.models.policy import PolicyModel, ValueModel
from verl.models.prefix_tree import pack_rows, should_merge_rows, sort_sequences
from verl.models.token_scores import Targets
from verl.records import BranchRequest

EXACT = 1e-6


@st.composite
def families(draw):
    """Draw rows that share prefixes of all depths, and branches at random starts.

    Few distinct tokens make shared prefixes likely, up to equal rows and rows that are prefixes.
    """
    token = st.integers(1, draw(st.integers(1, 3)))
    rows = draw(st.lists(st.lists(token, min_size=1, max_size=24), min_size=1, max_size=7))
    prefix = draw(st.lists(token, max_size=30))
    rows = [prefix + row if draw(st.booleans()) else row for row in rows]
    branches = [
        [
            BranchRequest(
                draw(st.integers(1, len(row))), draw(st.lists(token, min_size=1, max_size=9))
            )
            for _ in range(draw(st.integers(0, 2)))
        ]
        for row in rows
    ]
    return [torch.tensor(row) for row in rows], branches


def list_sequences(rows, branches):
    """Return the rows, then all branches with the tokens of their row before them."""
    sequences = list(rows)
    for row, row_branches in zip(rows, branches, strict=True):
        sequences += [torch.cat([row[: b.start], torch.tensor(b.token_ids)]) for b in row_branches]
    return sequences


def list_paths(packed, rows):
    """Return the packed positions of the tokens of these sequences."""
    paths = [
        packed.row_positions[o : o + len(r)] for o, r in zip(packed.offsets, rows, strict=True)
    ]
    return paths + [path for row in packed.branch_positions for path in row]


@settings(max_examples=200, deadline=None)
@given(families(), st.booleans())
def test_every_token_is_packed_once_and_sees_its_prefix(drawn, merged):
    rows, branches = drawn
    packed = pack_rows(rows, branches, prefix_tree=merged)
    enter, leave = map(torch.from_numpy, number_tokens_depth_first(packed.layout))
    is_visible = (enter[None, :] <= enter[:, None]) & (enter[:, None] < leave[None, :])
    sequences = list_sequences(rows, branches)
    for sequence, path in zip(sequences, list_paths(packed, rows), strict=True):
        assert torch.equal(packed.input_ids[path], sequence)
        assert packed.position_ids[path].tolist() == list(range(len(sequence)))
        for position, token in enumerate(path.tolist()):
            assert set(is_visible[token].nonzero()[:, 0].tolist()) == set(
                path[: position + 1].tolist()
            )
    family_of = [*range(len(rows)), *(r for r, row in enumerate(branches) for _ in row)]
    prefixes = {
        (0 if merged else family, *sequence[:end].tolist())
        for family, sequence in zip(family_of, sequences, strict=True)
        for end in range(1, len(sequence) + 1)
    }
    assert len(packed.input_ids) == len(prefixes)
    assert packed.layout.attention_pairs == int(is_visible.sum())


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    path = make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=64, layers=2, std=0.2)
    return PolicyModel(load_causal_lm(path).double())


def sum_scores(policy, packed, paths, sequences, weights):
    """Return a weighted sum of log-probs and entropies of all but the first tokens, and the
    log-probs.
    """
    total = torch.zeros((), dtype=torch.float64)
    targets = [
        Targets(path[:-1], sequence[1:]) for path, sequence in zip(paths, sequences, strict=True)
    ]
    scores = policy(packed.input_ids, packed.position_ids, packed.layout, targets)
    for score, weight in zip(scores, weights, strict=True):
        total = total + (weight * (score.log_probs + 0.3 * score.required_entropy)).sum()
    return total, torch.cat([score.log_probs for score in scores])


@settings(max_examples=25, deadline=None)
@given(
    families(),
    st.sampled_from([(2, 0), (7, 30), (64, 1 << 14)]),
    st.sampled_from([0, 5, 2048]),
    st.integers(0, 99),
)
def test_log_probs_and_gradients_equal_those_of_separate_rows(policy, drawn, block, long, seed):
    """Every sequence has weights of its own, also on tokens that it shares. They are those of a
    mean. The weights of the policy are float64, and log-probs are computed in float32.
    """
    rows, branches = drawn
    sequences = list_sequences(rows, branches)
    draw = torch.Generator().manual_seed(seed)
    num_tokens = sum(map(len, sequences))
    weights = [torch.randn(len(s) - 1, generator=draw).double() / num_tokens for s in sequences]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_calls, "BLOCK_QUERIES", block[0])
        patch.setattr(attention_calls, "CALL_OVERHEAD_PAIRS", block[1])
        patch.setattr(packed_layout, "MAX_MASKED_LENGTH", long)
        packed = pack_rows(rows, branches, prefix_tree=True)
        total, log_probs = sum_scores(policy, packed, list_paths(packed, rows), sequences, weights)
    gradients = torch.autograd.grad(total, list(policy.parameters()))
    results = []
    expected_total = torch.zeros((), dtype=torch.float64)
    for sequence, weight in zip(sequences, weights, strict=True):
        alone = pack_rows([sequence])
        share, scores = sum_scores(policy, alone, [alone.row_positions], [sequence], [weight])
        expected_total = expected_total + share
        results.append(scores)
    torch.testing.assert_close(log_probs, torch.cat(results), atol=EXACT, rtol=0)
    expected = torch.autograd.grad(expected_total, list(policy.parameters()))
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, atol=EXACT, rtol=EXACT)


def test_values_of_merged_rows_equal_those_of_separate_rows(policy):
    critic = ValueModel(copy.deepcopy(policy.lm)).double()
    torch.nn.init.normal_(critic.value_head.weight)
    rows = [torch.tensor([5, 6, 7, 8, *end]) for end in ([], [9], [9, 10], [4, 4, 4, 4, 4, 4])]
    packed = pack_rows(rows, prefix_tree=True)
    assert len(packed.input_ids) == 12
    inputs = (packed.input_ids, packed.position_ids, packed.layout)
    values = critic(*inputs, packed.row_positions)
    for row, offset in zip(rows, packed.offsets, strict=True):
        alone = pack_rows([row])
        expected = critic(alone.input_ids, alone.position_ids, alone.layout, alone.row_positions)
        torch.testing.assert_close(values[offset : offset + len(row)], expected, atol=EXACT, rtol=0)


def test_longest_sequence_of_a_family_is_one_segment():
    """The example of ``verl.models.packed_layout``."""
    rows = [torch.tensor(row) for row in ([1, 2, 3, 4, 5, 6], [7, 8, 9], [1, 2, 3, 10, 11])]
    rows.append(torch.tensor([1, 2, 3, 10, 12]))
    layout = pack_rows(rows, prefix_tree=True).layout
    assert layout.lengths == (3, 6, 2, 1)
    assert layout.prefix_lengths == (0, 0, 3, 4)
    assert layout.parents == (-1, -1, 1, 2)


def test_rows_without_branches_keep_their_order_unless_merged():
    rows = [torch.tensor(row) for row in ([1, 2, 3], [1, 2], [4], [1, 2, 3])]
    packed = pack_rows(rows)
    assert torch.equal(packed.input_ids, torch.cat(rows))
    assert packed.row_positions.tolist() == list(range(9)) and packed.offsets == [0, 3, 5, 6]
    assert packed.layout.prefix_lengths == (0, 0, 0, 0)


@pytest.mark.parametrize(("prefix_tree", "lengths"), [(True, (3, 20, 17)), ("auto", (20, 20, 3))])
def test_rows_are_merged_according_to_the_key(prefix_tree, lengths):
    """The rows share 3 of 43 tokens. ``auto`` merges rows that share at least a tenth."""
    rows = [torch.tensor([1] * 3 + [token] * 17) for token in (2, 3)] + [torch.tensor([4] * 3)]
    assert pack_rows(rows, prefix_tree=prefix_tree).layout.lengths == lengths


@pytest.mark.parametrize(("prefix_tree", "branches"), [(True, None), ("auto", [[], []])])
def test_merged_rows_are_sorted_once(monkeypatch, prefix_tree, branches):
    calls = []

    def count_sorting(sequences):
        calls.append(len(sequences))
        return sort_sequences(sequences)

    monkeypatch.setattr("verl.models.prefix_tree.sort_sequences", count_sorting)
    packed = pack_rows([torch.arange(9), torch.arange(8)], branches, prefix_tree=prefix_tree)
    assert len(packed.input_ids) == 9 and calls == [2]


@pytest.mark.parametrize("start", [0, 7, -1])
def test_branches_outside_their_row_are_refused(start):
    with pytest.raises(ValueError, check=mentions("1..6")):
        pack_rows([torch.arange(6)], [[BranchRequest(start, [1])]])
    with pytest.raises(ValueError):
        pack_rows([torch.arange(6)], [[BranchRequest(2, [])]])


def test_rows_are_merged_automatically_where_it_saves_enough():
    rows = sort_sequences([np.array(row) for row in ([1] * 10, [1, 2] * 45, [1] * 4 + [3] * 96)])
    assert rows.order == [0, 2, 1] and rows.shared_lengths == [0, 4, 1]
    assert should_merge_rows(rows, 200, True) and not should_merge_rows(rows, 200, False)
    assert should_merge_rows(rows, 50, "auto") and not should_merge_rows(rows, 51, "auto")
