"""Executed credit is unbiased: exact expectations in worlds of one turn.

A world gives the outcomes of a turn at each level: texts with probabilities and returns. All pairs
of a turn and a branch are enumerated, so no tolerance for chance is needed.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from agent_system.multi_turn_rollout.branches import execute_alternatives
from agent_system.multi_turn_rollout.trajectory import RolloutSpec, Trajectory, Turn
from agent_system.tokens.ledger import SegmentKind, TokenLedger
from rlvcr.levels import LEVELS, LevelCodec
from rlvcr.research.executed import choose_executed_level
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.utils.sampling import StopReason
from verl.utils.seeds import derive_seed

SEED = 3
TOKENIZER = make_tiny_tokenizer()
CODEC = LevelCodec(TOKENIZER)


@dataclass(frozen=True)
class Outcome:
    """An outcome of a turn: its text, with {} for the level digit, its probability and its
    return.
    """

    text: str
    probability: float
    returns: float
    thought: int = 0  # priced tokens


def count_tokens(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False))


def trajectory_of(uid: str, level: int, outcome: Outcome) -> Trajectory:
    ids = TOKENIZER.encode(outcome.text.format(level), add_special_tokens=False)
    ledger = TokenLedger()
    ledger.append([0], SegmentKind.PROMPT)
    segment = ledger.append(ids, SegmentKind.AGENT, logprobs=[0.0] * len(ids))
    turn = Turn(0, "o", "o", 0, segment.start, segment.end_position, outcome.text, StopReason.STOP)
    turn.parsed = CODEC.parse_turn(ids)
    spec = RolloutSpec(0, {}, "u", uid, 0, 0)
    won = outcome.returns > 0
    return Trajectory(spec, [ledger], [turn], reward=outcome.returns, won=won)


@cache
def find_uid_compared_with(level: int, other: int) -> str:
    """Find a uid whose turn of level ``level`` is compared with level ``other``."""
    parsed = CODEC.parse_turn(TOKENIZER.encode(PARSED.format(level), add_special_tokens=False))
    uids = (f"u/{number}" for number in count())
    return next(n for n in uids if choose_executed_level(parsed, 1.0, SEED, n, 0) == other)


def get_method_settings(cost: float = 0.0, price_in: str = "won") -> Any:
    return SimpleNamespace(
        executed_share=1.0, credit="executed", cost_coef=cost, cost_max=8, price_in=price_in
    )


def expected_credit(world: dict[int, list[Outcome]], level: int, rlvcr: Any) -> float:
    """Return the expected credit of ``level``, over turns, other levels and branches."""
    total = 0.0
    for other in LEVELS:
        if other == level:
            continue
        uid = find_uid_compared_with(level, other)
        for outcome in world[level]:
            for branch_outcome in world[other]:
                trajectory = trajectory_of(uid, level, outcome)
                branches = [trajectory_of("b", other, branch_outcome)]

                def generate(specs: Any, branches: Any = branches, other: int = other) -> Any:
                    assert [spec.forced_level for spec in specs] == [other]
                    return SimpleNamespace(trajectories=branches)

                execute_alternatives([trajectory], generate, rlvcr, SEED)
                difference = trajectory.turns[0].executed_credit
                assert difference is not None, outcome
                total += outcome.probability * branch_outcome.probability * difference / 3
    return total


def expected_return(world: dict[int, list[Outcome]], level: int, cost: float = 0.0) -> float:
    """Return the expected priced return of a level. Only thoughts of successes have a price."""
    return sum(
        outcome.probability
        * (outcome.returns - (cost * min(outcome.thought, 8) / 8 if outcome.returns > 0 else 0.0))
        for outcome in world[level]
    )


def true_credit(world: dict[int, list[Outcome]], level: int, cost: float = 0.0) -> float:
    return (
        expected_return(world, level, cost)
        - sum(expected_return(world, k, cost) for k in LEVELS) / 4
    )


PARSED = "<level>{}</level><think>a b</think><action>go</action>"
CUT = "<level>{}</level><think>a b c d"
# Turns with a sampled level that get no scored thinking advantage.
UNPARSED = {
    "cut in the thought": CUT,
    "cut after the level": "<level>{}</level>",
    "cut in the action": "<level>{}</level><think>a</think><action>go",
    "level left open": "<level>{}<think>a</think><action>go</action>",
    "no thought": "<level>{}</level><action>go</action>",
    "thought left open": "<level>{}</level><think>a<action>go</action>",
    "no action": "<level>{}</level><think>a</think> go",
    "text before the level": "so <level>{}</level><think>a</think><action>go</action>",
    "text after the level": "<level>{}</level> so <think>a</think><action>go</action>",
    "a level in the thought": "<level>{}</level><think>a<level>2</level></think><action>go",
    "a tag in an open action": "<level>{}</level><think>a<think>b</think><action>go",
    "no number of one digit": "<level>{}7</level><think>a</think><action>go</action>",
}


def world_of(success_rates: tuple[float, ...], cut_shares: tuple[float, ...], text: str = CUT):
    """Return levels that succeed at ``success_rates`` if their turn is parsed, and fail if it is
    cut.
    """
    return {
        level: [
            Outcome(PARSED, (1 - cut_share) * success_rate, 1.0, count_tokens("a b")),
            Outcome(PARSED, (1 - cut_share) * (1 - success_rate), 0.0),
            Outcome(text, cut_share, 0.0),
        ]
        for level, success_rate, cut_share in zip(LEVELS, success_rates, cut_shares, strict=True)
    }


@pytest.mark.parametrize(
    ("success_rates", "cut_shares", "expected"),
    [
        ((0.5, 0.5, 0.5, 0.7), (0, 0, 0, 0.4), (0.02, 0.02, 0.02, -0.06)),
        ((0.5, 0.5, 0.5, 0.5), (0, 0, 0, 0.2), (0.025, 0.025, 0.025, -0.075)),
        ((0.2, 0.5, 0.6, 0.7), (0, 0, 0, 0), (-0.3, 0.0, 0.1, 0.2)),
        ((0.9, 0.1, 0.3, 0.4), (0.1, 0.2, 0.3, 1.0), (0.535, -0.195, -0.065, -0.275)),
    ],
)
def test_expected_credit_is_the_return_minus_the_mean(success_rates, cut_shares, expected):
    world = world_of(success_rates, cut_shares)
    for level, credit in zip(LEVELS, expected, strict=True):
        assert true_credit(world, level) == pytest.approx(credit)
        assert expected_credit(world, level, get_method_settings()) == pytest.approx(
            true_credit(world, level)
        )


@pytest.mark.parametrize("text", UNPARSED.values(), ids=UNPARSED)
def test_credit_stays_unbiased_with_unparsed_turns(text):
    world = world_of((0.5, 0.5, 0.5, 0.7), (0, 0, 0.3, 0.4), text)
    for level in (1, 3, 4):
        assert expected_credit(world, level, get_method_settings()) == pytest.approx(
            true_credit(world, level)
        )


@pytest.mark.parametrize("text", UNPARSED.values(), ids=UNPARSED)
def test_unparsed_turn_is_credited_on_digit_and_thought(text):
    ids = TOKENIZER.encode(text.format(4), add_special_tokens=False)
    parsed = CODEC.parse_turn(ids)
    assert parsed.failure is not None and parsed.credit_spans() == []
    spans = parsed.choice_spans(10)
    assert ids[spans[0][0] - 10] == CODEC.digit_ids[3]
    thought = "".join(TOKENIZER.decode(ids[start - 10 : end - 10]) for start, end in spans[1:])
    after_tag = text.split("{}</level><think>")[1:]
    assert thought == (after_tag[0].split("<")[0] if after_tag else "")


def test_credit_includes_the_end_of_the_thought_on_request():
    ids = TOKENIZER.encode("<level>4</level><think>a</think><action>go", add_special_tokens=False)
    (digit, thought) = CODEC.parse_turn(ids).choice_spans(0, includes_thought_end=True)
    assert TOKENIZER.decode(ids[slice(*thought)]) == "a</think>"
    cut = TOKENIZER.encode("<level>4</level><think>a", add_special_tokens=False)
    assert CODEC.parse_turn(cut).choice_spans(0, includes_thought_end=True) == [
        digit,
        (thought[0], len(cut)),
    ]


def test_first_token_of_a_thought_gets_its_expected_credit():
    """A thought begins with ``a`` or ``b``. After ``a`` it is cut in half of the turns."""
    text = "<level>{}</level><think>b</think><action>go</action>"
    for first, expected in (("a", 0.75 * (0.5 * 0.9 - 0.2)), ("b", 0.75 * (0.4 - 0.2))):
        world = {level: [Outcome(text, 0.2, 1.0), Outcome(text, 0.8, 0.0)] for level in LEVELS}
        turns = [Outcome(text, 0.4, 1.0), Outcome(text, 0.6, 0.0)]
        if first == "a":
            turns = [
                Outcome(CUT, 0.5, 0.0),
                Outcome(PARSED, 0.5 * 0.9, 1.0),
                Outcome(PARSED, 0.5 * 0.1, 0.0),
            ]
        assert expected_credit(world | {3: turns}, 3, get_method_settings()) == pytest.approx(
            expected
        )
        for turn in turns:
            ids = TOKENIZER.encode(turn.text.format(3), add_special_tokens=False)
            thought = CODEC.parse_turn(ids).choice_spans()[1]
            assert TOKENIZER.decode(ids[thought[0]]).strip() == first


LONG = "a b c d e f g h i j k l"


@pytest.mark.parametrize(
    ("text", "priced_text"),
    [
        (f"<level>{{}}</level><think>{LONG}</think><action>go</action>", LONG),
        ("<level>{}</level><think></think><action>go</action>", ""),
        ("<level>{}</level><action>go</action>", ""),
        ("<level>{}</level><think>a b<action>go</action>", "a b"),
        ("<level>{}</level><think>a b</think><action>go", "a b"),
        # Without a separate thought, everything before the action has a price.
        ("<level>{}</level><think>a b", "</level><think>a b"),
        ("<level>{}</level> a b <action>go</action>", "</level> a b <action>"),
        (
            "<level>{}</level><think>a<think>b</think><action>go",
            "</level><think>a<think>b</think><action>",
        ),
    ],
)
@pytest.mark.parametrize(
    ("price_in", "returns", "has_price"),
    [
        ("all", 1.0, True),
        ("all", 0.0, True),
        ("gate", 0.0, True),
        ("won", 1.0, True),
        ("won", 0.0, False),
    ],
)
def test_price_of_an_unparsed_turn(text, priced_text, price_in, returns, has_price):
    rlvcr = get_method_settings(0.4, price_in)
    branch = Outcome("<level>{}</level><think></think><action>go</action>", 1.0, 0.25)
    trajectory = trajectory_of(find_uid_compared_with(4, 1), 4, Outcome(text, 1.0, returns))
    branches: Any = SimpleNamespace(trajectories=[trajectory_of("b", 1, branch)])
    execute_alternatives([trajectory], lambda _specs: branches, rlvcr, SEED)
    price = 0.4 * min(count_tokens(priced_text), 8) / 8 if has_price else 0.0
    assert trajectory.turns[0].executed_credit == pytest.approx(0.75 * (returns - price - 0.25))


def test_credit_stays_unbiased_with_a_price():
    world = world_of((0.5, 0.6, 0.5, 0.7), (0.1, 0, 0.2, 0.4))
    world[3] = [replace(outcome, text=outcome.text.replace("a b", LONG)) for outcome in world[3]]
    world[3][0] = replace(world[3][0], thought=count_tokens(LONG))
    assert true_credit(world, 4, 0.4) != pytest.approx(true_credit(world, 4))
    for level in LEVELS:
        expected = pytest.approx(true_credit(world, level, 0.4))
        assert expected_credit(world, level, get_method_settings(0.4)) == expected


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_executed_share_selects_the_turns(share):
    rlvcr = get_method_settings()
    rlvcr.executed_share = share
    turns = [trajectory_of(f"u/{number}", 2, Outcome(PARSED, 1.0, 1.0)) for number in range(40)]
    executed_uids = []

    def generate(specs: Any) -> Any:
        executed_uids.extend(spec.traj_uid.partition("@")[0] for spec in specs)
        return SimpleNamespace(trajectories=[turns[0] for _ in specs])

    execute_alternatives(turns, generate, rlvcr, SEED)
    draws = {
        t.spec.traj_uid: derive_seed(SEED, "executed", t.spec.traj_uid, 0) / 2**63 for t in turns
    }
    assert executed_uids == [uid for uid, draw in draws.items() if draw < share]
    assert 0 < len(executed_uids) < 40
    credited_uids = [t.spec.traj_uid for t in turns if t.turns[0].executed_credit is not None]
    assert credited_uids == executed_uids


def test_turn_without_a_level_is_not_executed():
    parsed = CODEC.parse_turn(TOKENIZER.encode("I do not know", add_special_tokens=False))
    assert parsed.sampled_level is None and parsed.choice_spans() == []
    assert choose_executed_level(parsed, 1.0, SEED, "u/0", 0) is None
