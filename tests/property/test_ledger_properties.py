"""Properties of the ledger for any sampled tokens and observations."""

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.ledger import SegmentKind, TokenLedger
from tests.helpers.tiny_model import SPECIAL, TAGS, make_tiny_tokenizer


@cache
def tokenizer():
    return make_tiny_tokenizer()


@cache
def bridge() -> ChatBridge:
    return ChatBridge(tokenizer())


ODD = ["You see a desk.", "\n", "  ", "cabinet 10", "<|im_", "end|>", "\u00fc\u4e16"]
PIECES = st.sampled_from([*SPECIAL, *TAGS, *ODD])
TEXT = st.one_of(st.lists(PIECES, max_size=6).map("".join), st.text(max_size=30))
SAMPLED = st.lists(st.integers(0, 399), min_size=1, max_size=12)
TURNS = st.lists(st.tuples(SAMPLED, TEXT), min_size=1, max_size=6)


def make_ledger(turns) -> TokenLedger:
    ledger = TokenLedger()
    ledger.append(
        bridge().encode_first_prompt([{"role": "user", "content": turns[0][1]}]), SegmentKind.PROMPT
    )
    for turn, (sampled, text) in enumerate(turns):
        ledger.append(
            sampled, SegmentKind.AGENT, logprobs=[-(1.0 + turn)] * len(sampled), turn=turn
        )
        bridge().make_inter_turn_tokens(sampled, text).append_to(ledger, turn=turn + 1)
    return ledger


@settings(max_examples=60, deadline=None)
@given(TURNS)
def test_trained_tokens_are_the_sampled_ones_in_order(turns):
    ledger = make_ledger(turns)
    mask = ledger.completion_only_mask()
    trained = [token for token, flag in zip(ledger.token_ids, mask, strict=True) if flag]
    assert trained == [token for sampled, _ in turns for token in sampled]
    logprobs = [value for value, flag in zip(ledger.token_logprobs(), mask, strict=True) if flag]
    assert logprobs == [-(1.0 + turn) for turn, (sampled, _) in enumerate(turns) for _ in sampled]
    assert all(
        value == 0.0 for value, flag in zip(ledger.token_logprobs(), mask, strict=True) if not flag
    )


@settings(max_examples=60, deadline=None)
@given(TURNS)
def test_segments_cover_the_ledger_and_masks_agree(turns):
    ledger = make_ledger(turns)
    assert [token for segment in ledger.all_segments for token in segment.ids] == ledger.token_ids
    assert [segment.start for segment in ledger.all_segments[1:]] == [
        segment.end_position for segment in ledger.all_segments[:-1]
    ]
    assert [turn >= 0 for turn in ledger.to_arrays().turn_ids()] == [
        flag == 1 for flag in ledger.completion_only_mask()
    ]
    assert sum(ledger.completion_only_mask()[: ledger.prompt_length]) == 0


@settings(max_examples=100, deadline=None)
@given(TEXT)
def test_environment_text_never_holds_a_control_token(text):
    vocabulary = tokenizer().get_vocab()
    control = {vocabulary[token] for token in SPECIAL}
    observation = bridge().make_inter_turn_tokens([], text).observation
    assert not control & set(observation)
    assert tokenizer().decode(list(observation), skip_special_tokens=False) == text


@settings(max_examples=60, deadline=None)
@given(SAMPLED, TEXT)
def test_every_agent_turn_has_one_end_of_turn(sampled, text):
    end = bridge().end_of_turn_id
    tokens = [*sampled, *bridge().make_inter_turn_tokens(sampled, text).ids_before]
    end_position = len(sampled) - 1 if sampled[-1] == end else len(sampled)
    assert tokens[end_position] == end and tokens[end_position + 1] != end
