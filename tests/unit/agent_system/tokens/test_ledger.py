"""TokenLedger: append-only segments, and masks that follow from their kinds."""

from typing import Any

import pytest

from agent_system.tokens.ledger import Segment, SegmentKind, TokenLedger
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
    assert ledger.ids == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert ledger.completion_only_mask() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1]
    assert ledger.full_attention_mask() == [1] * 10
    assert ledger.turn_ids() == [-1, -1, -1, 0, 0, -1, -1, -1, -1, 1]
    assert ledger.logprobs() == [0, 0, 0, -0.1, -0.2, 0, 0, 0, 0, -0.3]
    assert ledger.prompt_length == 3


def test_segments_know_where_they_lie_and_cannot_be_changed():
    ledger = played()
    assert [(s.start, s.end) for s in ledger.segments] == [
        (0, 3),
        (3, 5),
        (5, 6),
        (6, 8),
        (8, 9),
        (9, 10),
    ]
    assert [s.policy_version for s in ledger.agent_segments] == [None, 3]
    segment: Any = ledger.segments[0]
    with pytest.raises(AttributeError):
        segment.kind = SegmentKind.AGENT


@pytest.mark.parametrize("logprobs", [None, [], [-0.1], [-0.1, -0.2, -0.3]])
def test_an_agent_segment_needs_one_logprob_per_token(logprobs):
    with pytest.raises(ValueError, match="2 tokens came with"):
        TokenLedger().append([1, 2], SegmentKind.AGENT, logprobs=logprobs)


@pytest.mark.parametrize("kind", [SegmentKind.PROMPT, SegmentKind.ENV, SegmentKind.BRIDGE])
def test_what_was_not_sampled_has_no_logprobs(kind):
    with pytest.raises(ValueError, match="not sampled"):
        TokenLedger().append([1], kind, logprobs=[-0.1])


def test_a_prompt_cannot_follow_an_agent():
    with pytest.raises(ValueError, match="before the first agent"):
        played().append([1], SegmentKind.PROMPT)


def test_retokenized_text_is_flagged():
    ledger = played()
    assert not ledger.retokenized
    ledger.append([11, 12], SegmentKind.AGENT, turn=2, retokenized=True)
    assert ledger.retokenized
    assert ledger.completion_only_mask()[-2:] == [1, 1]
    assert ledger.logprobs()[-2:] == [0, 0]


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
