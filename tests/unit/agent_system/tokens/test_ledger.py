"""TokenLedger: append-only segments, and the masks of their kinds."""

import pickle
from typing import Any

import pytest

from agent_system.tokens.ledger import Segment, SegmentKind, TokenLedger
from tests.helpers.refusals import mentions
from verl.utils.sampling import StopReason


def make_ledger() -> TokenLedger:
    ledger = TokenLedger()
    ledger.append([1, 2, 3], SegmentKind.PROMPT)
    ledger.append(
        [4, 5], SegmentKind.AGENT, logprobs=[-0.1, -0.2], turn=0, stop_reason=StopReason.STOP
    )
    ledger.append([6], SegmentKind.BRIDGE, turn=1)
    ledger.append([7, 8], SegmentKind.ENV, turn=1)
    ledger.append([9], SegmentKind.BRIDGE, turn=1)
    ledger.append([10], SegmentKind.AGENT, logprobs=[-0.3], turn=1, policy_version=3)
    return ledger


def test_masks_follow_from_the_segment_kinds():
    ledger = make_ledger()
    assert ledger.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert ledger.completion_only_mask() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    assert ledger.to_arrays().turn_ids().tolist() == [-1, -1, -1, 0, 0, -1, -1, -1, -1, 1]
    assert ledger.token_logprobs() == [0, 0, 0, -0.1, -0.2, 0, 0, 0, 0, -0.3]
    assert ledger.prompt_length == 3


def test_segments_have_positions_and_are_immutable():
    ledger = make_ledger()
    assert [(s.start, s.end_position) for s in ledger.all_segments] == [
        (0, 3),
        (3, 5),
        (5, 6),
        (6, 8),
        (8, 9),
        (9, 10),
    ]
    assert [s.policy_version for s in ledger.agent_segments] == [None, 3]
    segment: Any = ledger.all_segments[0]
    with pytest.raises(AttributeError):
        segment.kind = SegmentKind.AGENT


@pytest.mark.parametrize("logprobs", [None, [], [-0.1], [-0.1, -0.2, -0.3]])
def test_agent_segment_needs_one_logprob_per_token(logprobs):
    with pytest.raises(ValueError, check=mentions(2)):
        TokenLedger().append([1, 2], SegmentKind.AGENT, logprobs=logprobs)


@pytest.mark.parametrize("kind", [SegmentKind.PROMPT, SegmentKind.ENV, SegmentKind.BRIDGE])
def test_segment_that_was_not_sampled_has_no_logprobs(kind):
    with pytest.raises(ValueError):
        TokenLedger().append([1], kind, logprobs=[-0.1])


def test_prompt_cannot_follow_an_agent_segment():
    with pytest.raises(ValueError):
        make_ledger().append([1], SegmentKind.PROMPT)


def test_retokenized_text_is_flagged():
    ledger = make_ledger()
    assert not ledger.has_retokenized_tokens
    ledger.append([11, 12], SegmentKind.AGENT, turn=2, retokenized=True)
    assert ledger.has_retokenized_tokens
    assert ledger.completion_only_mask()[-2:] == [1, 1]
    assert ledger.token_logprobs()[-2:] == [0, 0]


def test_ledger_with_only_a_prompt_is_all_prompt():
    ledger = TokenLedger()
    ledger.append([1, 2], SegmentKind.PROMPT)
    assert ledger.prompt_length == len(ledger) == 2
    assert ledger.completion_only_mask() == [0, 0]


def test_segment_defaults():
    plain = Segment((1,), SegmentKind.ENV, 0)
    assert TokenLedger().append([1], SegmentKind.ENV) == plain
    assert (plain.logprobs, plain.turn, plain.episode) == ((), 0, 0)
    assert (plain.policy_version, plain.stop_reason, plain.retokenized) == (None, None, False)


def test_pickled_ledger_is_equal_and_can_be_extended():
    ledger = make_ledger()
    ledger.append([11, 12], SegmentKind.AGENT, turn=2, episode=1, retokenized=True)
    pickled = pickle.loads(pickle.dumps(ledger))
    for copy in (pickled, pickle.loads(pickle.dumps(pickled))):
        assert copy.all_segments == ledger.all_segments
        assert copy.token_ids == ledger.token_ids and len(copy) == 12
        assert copy.token_logprobs() == ledger.token_logprobs()
        assert copy.completion_only_mask() == ledger.completion_only_mask()
        assert (copy.to_arrays().turn_ids() == ledger.to_arrays().turn_ids()).all()
        assert copy.has_retokenized_tokens and copy.prompt_length == 3
    # The copy holds arrays at first; a segment added to them must not be lost.
    extended = pickle.loads(pickle.dumps(ledger))
    for either in (ledger, extended):
        either.append([13], SegmentKind.ENV, turn=3)
        assert either.to_arrays().ids.tolist() == [*range(1, 14)]
    assert extended.all_segments == ledger.all_segments


def test_empty_ledger_can_be_pickled():
    copy = pickle.loads(pickle.dumps(TokenLedger()))
    assert len(copy) == 0 and copy.all_segments == () and copy.token_logprobs() == []


def test_sampled_tokens_are_counted_by_policy_version():
    ledger = make_ledger()
    ledger.append([11, 12], SegmentKind.AGENT, logprobs=[-0.1, -0.2], policy_version=3)
    ledger.append([13], SegmentKind.AGENT, logprobs=[-0.1], policy_version=-1)
    assert ledger.to_arrays().count_tokens_by_version() == {3: 3}
