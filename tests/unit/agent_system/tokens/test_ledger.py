"""TokenLedger: append-only segments, and masks that follow from their kinds."""

import pickle
from typing import Any

import pytest

from agent_system.tokens.ledger import Segment, SegmentKind, TokenLedger
from tests.helpers.refusals import mentions
from verl.utils.sampling import StopReason


def played() -> TokenLedger:
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


def test_masks_follow_from_the_kinds():
    ledger = played()
    assert ledger.token_ids == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert ledger.completion_only_mask() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    assert ledger.full_attention_mask() == [1] * 10
    assert ledger.turn_ids() == [-1, -1, -1, 0, 0, -1, -1, -1, -1, 1]
    assert ledger.token_logprobs() == [0, 0, 0, -0.1, -0.2, 0, 0, 0, 0, -0.3]
    assert ledger.prompt_length == 3


def test_segments_know_where_they_lie_and_cannot_be_changed():
    ledger = played()
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
def test_an_agent_segment_needs_one_logprob_per_token(logprobs):
    with pytest.raises(ValueError, check=mentions(2)):
        TokenLedger().append([1, 2], SegmentKind.AGENT, logprobs=logprobs)


@pytest.mark.parametrize("kind", [SegmentKind.PROMPT, SegmentKind.ENV, SegmentKind.BRIDGE])
def test_what_was_not_sampled_has_no_logprobs(kind):
    with pytest.raises(ValueError):
        TokenLedger().append([1], kind, logprobs=[-0.1])


def test_a_prompt_cannot_follow_an_agent():
    with pytest.raises(ValueError):
        played().append([1], SegmentKind.PROMPT)


def test_retokenized_text_is_flagged():
    ledger = played()
    assert not ledger.has_retokenized_tokens
    ledger.append([11, 12], SegmentKind.AGENT, turn=2, retokenized=True)
    assert ledger.has_retokenized_tokens
    assert ledger.completion_only_mask()[-2:] == [1, 1]
    assert ledger.token_logprobs()[-2:] == [0, 0]


def test_a_prompt_alone_is_all_prompt():
    ledger = TokenLedger()
    ledger.append([1, 2], SegmentKind.PROMPT)
    assert ledger.prompt_length == len(ledger) == 2
    assert ledger.completion_only_mask() == [0, 0]


def test_a_segment_says_no_more_than_was_said_of_it():
    plain = Segment((1,), SegmentKind.ENV, 0)
    assert TokenLedger().append([1], SegmentKind.ENV) == plain
    assert (plain.logprobs, plain.turn, plain.episode) == ((), 0, 0)
    assert (plain.policy_version, plain.stop_reason, plain.retokenized) == (None, None, False)


def test_a_ledger_that_travelled_is_the_same_and_goes_on():
    ledger = played()
    ledger.append([11, 12], SegmentKind.AGENT, turn=2, episode=1, retokenized=True)
    there = pickle.loads(pickle.dumps(ledger))
    for found in (there, pickle.loads(pickle.dumps(there))):
        assert found.all_segments == ledger.all_segments
        assert found.token_ids == ledger.token_ids and len(found) == 12
        assert found.token_logprobs() == ledger.token_logprobs()
        assert found.completion_only_mask() == ledger.completion_only_mask()
        assert found.turn_ids() == ledger.turn_ids()
        assert found.has_retokenized_tokens and found.prompt_length == 3
    # As arrays first: what is added then is not lost.
    again = pickle.loads(pickle.dumps(ledger))
    for one in (ledger, again):
        one.append([13], SegmentKind.ENV, turn=3)
        assert one.to_arrays().ids.tolist() == [*range(1, 14)]
    assert again.all_segments == ledger.all_segments


def test_an_empty_ledger_travels():
    there = pickle.loads(pickle.dumps(TokenLedger()))
    assert len(there) == 0 and there.all_segments == () and there.token_logprobs() == []


def test_sampled_tokens_are_counted_by_the_version_of_the_weights():
    ledger = played()
    ledger.append([11, 12], SegmentKind.AGENT, logprobs=[-0.1, -0.2], policy_version=3)
    ledger.append([13], SegmentKind.AGENT, logprobs=[-0.1], policy_version=-1)
    assert ledger.to_arrays().tokens_by_version() == {3: 3}
