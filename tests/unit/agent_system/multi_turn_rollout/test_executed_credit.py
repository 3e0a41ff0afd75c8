"""Executed credit is unbiased, whatever turns come to: exact expectations in worlds of one turn.

A world says what a turn of each level comes to: texts with probabilities and returns. All pairs of
a turn and a branch are enumerated, so that no tolerance for chance is needed.
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
    """A turn of a level, ``text`` with its digit as {}: how likely it is and what it leads to."""

    text: str
    probability: float
    returns: float
    thought: int = 0  # priced tokens


def tokens(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False))


def trajectory_of(uid: str, level: int, outcome: Outcome) -> Trajectory:
    ids = TOKENIZER.encode(outcome.text.format(level), add_special_tokens=False)
    ledger = TokenLedger()
    ledger.append([0], SegmentKind.PROMPT)
    segment = ledger.append(ids, SegmentKind.AGENT, logprobs=[0.0] * len(ids))
    turn = Turn(0, "o", "o", 0, segment.start, segment.end_position, outcome.text, StopReason.STOP)
    turn.parsed = CODEC.parse_turn(ids)
    job = RolloutSpec(0, {}, "u", uid, 0, 0)
    won = outcome.returns > 0
    return Trajectory(job, [ledger], [turn], reward=outcome.returns, won=won)


@cache
def uid_that_tries(own: int, other: int) -> str:
    """A name whose turn of level ``own`` is compared with level ``other``."""
    parsed = CODEC.parse_turn(TOKENIZER.encode(READ.format(own), add_special_tokens=False))
    names = (f"u/{number}" for number in count())
    return next(n for n in names if choose_executed_level(parsed, 1.0, SEED, n, 0) == other)


def priced(cost: float = 0.0, price_in: str = "won") -> Any:
    return SimpleNamespace(
        executed_share=1.0, credit="executed", cost_coef=cost, cost_max=8, price_in=price_in
    )


def credited(world: dict[int, list[Outcome]], level: int, rlvcr: Any) -> float:
    """The expectation of the credit of ``level``, over turns, other levels and branches."""
    total = 0.0
    for other in LEVELS:
        if other == level:
            continue
        uid = uid_that_tries(level, other)
        for own in world[level]:
            for branch in world[other]:
                trajectory = trajectory_of(uid, level, own)
                played = [trajectory_of("b", other, branch)]

                def play(jobs: Any, played: Any = played, other: int = other) -> Any:
                    assert [job.forced_level for job in jobs] == [other]
                    return SimpleNamespace(trajectories=played)

                execute_alternatives([trajectory], play, rlvcr, SEED)
                difference = trajectory.turns[0].executed_credit
                assert difference is not None, own
                total += own.probability * branch.probability * difference / 3
    return total


def value(world: dict[int, list[Outcome]], level: int, cost: float = 0.0) -> float:
    """What a level is worth: returns less the price of won plays' thoughts."""
    return sum(
        o.probability * (o.returns - (cost * min(o.thought, 8) / 8 if o.returns > 0 else 0.0))
        for o in world[level]
    )


def true_credit(world: dict[int, list[Outcome]], level: int, cost: float = 0.0) -> float:
    return value(world, level, cost) - sum(value(world, k, cost) for k in LEVELS) / 4


READ = "<level>{}</level><think>a b</think><action>go</action>"
CUT = "<level>{}</level><think>a b c d"
# Turns in which a level was sampled and no thinking credit is given.
UNREAD = {
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


def world_of(read: tuple[float, ...], cut: tuple[float, ...], text: str = CUT):
    """Levels that win with probability ``read`` where their turn is read, and lose where it is
    ``cut``.
    """
    return {
        level: [
            Outcome(READ, (1 - share) * q, 1.0, tokens("a b")),
            Outcome(READ, (1 - share) * (1 - q), 0.0),
            Outcome(text, share, 0.0),
        ]
        for level, q, share in zip(LEVELS, read, cut, strict=True)
    }


@pytest.mark.parametrize(
    ("read", "cut", "expected"),
    [
        ((0.5, 0.5, 0.5, 0.7), (0, 0, 0, 0.4), (0.02, 0.02, 0.02, -0.06)),
        ((0.5, 0.5, 0.5, 0.5), (0, 0, 0, 0.2), (0.025, 0.025, 0.025, -0.075)),
        ((0.2, 0.5, 0.6, 0.7), (0, 0, 0, 0), (-0.3, 0.0, 0.1, 0.2)),
        ((0.9, 0.1, 0.3, 0.4), (0.1, 0.2, 0.3, 1.0), (0.535, -0.195, -0.065, -0.275)),
    ],
)
def test_a_level_is_credited_with_what_it_is_worth(read, cut, expected):
    world = world_of(read, cut)
    for level, right in zip(LEVELS, expected, strict=True):
        assert true_credit(world, level) == pytest.approx(right)
        assert credited(world, level, priced()) == pytest.approx(true_credit(world, level))


@pytest.mark.parametrize("text", UNREAD.values(), ids=UNREAD)
def test_turns_that_cannot_be_read_count_like_the_branches(text):
    world = world_of((0.5, 0.5, 0.5, 0.7), (0, 0, 0.3, 0.4), text)
    for level in (1, 3, 4):
        assert credited(world, level, priced()) == pytest.approx(true_credit(world, level))


@pytest.mark.parametrize("text", UNREAD.values(), ids=UNREAD)
def test_digit_and_thought_of_an_unread_turn_get_the_credit(text):
    ids = TOKENIZER.encode(text.format(4), add_special_tokens=False)
    parsed = CODEC.parse_turn(ids)
    assert parsed.failure is not None and parsed.credit_spans() == []
    spans = parsed.choice_spans(10)
    assert ids[spans[0][0] - 10] == CODEC.digit_ids[3]
    said = "".join(TOKENIZER.decode(ids[start - 10 : end - 10]) for start, end in spans[1:])
    opened = text.split("{}</level><think>")[1:]
    assert said == (opened[0].split("<")[0] if opened else "")


def test_the_token_that_ended_the_thought_is_credited_on_request():
    ids = TOKENIZER.encode("<level>4</level><think>a</think><action>go", add_special_tokens=False)
    (digit, thought) = CODEC.parse_turn(ids).choice_spans(0, with_end=True)
    assert TOKENIZER.decode(ids[slice(*thought)]) == "a</think>"
    cut = TOKENIZER.encode("<level>4</level><think>a", add_special_tokens=False)
    assert CODEC.parse_turn(cut).choice_spans(0, with_end=True) == [digit, (thought[0], len(cut))]


def test_every_token_of_a_thought_is_credited_with_what_it_leads_to():
    """A thought begins with ``a`` or ``b``; after ``a`` it is cut in half of the turns."""
    halves = "<level>{}</level><think>b</think><action>go</action>"
    for first, expected in (("a", 0.75 * (0.5 * 0.9 - 0.2)), ("b", 0.75 * (0.4 - 0.2))):
        others = {level: [Outcome(halves, 0.2, 1.0), Outcome(halves, 0.8, 0.0)] for level in LEVELS}
        turns = [Outcome(halves, 0.4, 1.0), Outcome(halves, 0.6, 0.0)]
        if first == "a":
            turns = [
                Outcome(CUT, 0.5, 0.0),
                Outcome(READ, 0.5 * 0.9, 1.0),
                Outcome(READ, 0.5 * 0.1, 0.0),
            ]
        assert credited(others | {3: turns}, 3, priced()) == pytest.approx(expected)
        for turn in turns:
            ids = TOKENIZER.encode(turn.text.format(3), add_special_tokens=False)
            thought = CODEC.parse_turn(ids).choice_spans()[1]
            assert TOKENIZER.decode(ids[thought[0]]).strip() == first


LONG = "a b c d e f g h i j k l"


@pytest.mark.parametrize(
    ("text", "charged"),
    [
        (f"<level>{{}}</level><think>{LONG}</think><action>go</action>", LONG),
        ("<level>{}</level><think></think><action>go</action>", ""),
        ("<level>{}</level><action>go</action>", ""),
        ("<level>{}</level><think>a b<action>go</action>", "a b"),
        ("<level>{}</level><think>a b</think><action>go", "a b"),
        # Where no thought can be told apart, all that is said before the action.
        ("<level>{}</level><think>a b", "</level><think>a b"),
        ("<level>{}</level> a b <action>go</action>", "</level> a b <action>"),
        (
            "<level>{}</level><think>a<think>b</think><action>go",
            "</level><think>a<think>b</think><action>",
        ),
    ],
)
@pytest.mark.parametrize(
    ("price_in", "returns", "paid"),
    [
        ("all", 1.0, True),
        ("all", 0.0, True),
        ("gate", 0.0, True),
        ("won", 1.0, True),
        ("won", 0.0, False),
    ],
)
def test_the_price_of_a_turn_that_cannot_be_read(text, charged, price_in, returns, paid):
    rlvcr = priced(0.4, price_in)
    branch = Outcome("<level>{}</level><think></think><action>go</action>", 1.0, 0.25)
    trajectory = trajectory_of(uid_that_tries(4, 1), 4, Outcome(text, 1.0, returns))
    played: Any = SimpleNamespace(trajectories=[trajectory_of("b", 1, branch)])
    execute_alternatives([trajectory], lambda _jobs: played, rlvcr, SEED)
    price = 0.4 * min(tokens(charged), 8) / 8 if paid else 0.0
    assert trajectory.turns[0].executed_credit == pytest.approx(0.75 * (returns - price - 0.25))


def test_a_price_keeps_the_credit_unbiased():
    world = world_of((0.5, 0.6, 0.5, 0.7), (0.1, 0, 0.2, 0.4))
    world[3] = [replace(outcome, text=outcome.text.replace("a b", LONG)) for outcome in world[3]]
    world[3][0] = replace(world[3][0], thought=tokens(LONG))
    assert true_credit(world, 4, 0.4) != pytest.approx(true_credit(world, 4))
    for level in LEVELS:
        right = pytest.approx(true_credit(world, level, 0.4))
        assert credited(world, level, priced(0.4)) == right


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_share_of_the_turns_is_executed(share):
    rlvcr = priced()
    rlvcr.executed_share = share
    turns = [trajectory_of(f"u/{number}", 2, Outcome(READ, 1.0, 1.0)) for number in range(40)]
    asked = []

    def play(jobs: Any) -> Any:
        asked.extend(job.traj_uid.partition("@")[0] for job in jobs)
        return SimpleNamespace(trajectories=[turns[0] for _ in jobs])

    execute_alternatives(turns, play, rlvcr, SEED)
    draws = {
        t.spec.traj_uid: derive_seed(SEED, "executed", t.spec.traj_uid, 0) / 2**63 for t in turns
    }
    assert asked == [uid for uid, draw in draws.items() if draw < share]
    assert 0 < len(asked) < 40
    tried = [t.spec.traj_uid for t in turns if t.turns[0].executed_credit is not None]
    assert tried == asked


def test_a_digit_that_is_no_token_of_its_own_is_not_tried():
    parsed = CODEC.parse_turn(TOKENIZER.encode("I do not know", add_special_tokens=False))
    assert parsed.sampled_level is None and parsed.choice_spans() == []
    assert choose_executed_level(parsed, 1.0, SEED, "u/0", 0) is None
