"""Record of a thinking turn: its line in a rollout file, and how credit is added."""

import copy
import dataclasses
import pickle

from rlvcr.records import ScoredThought, ThinkingTurnRecord
from verl.records import ScoreResult, StepRecord

SCORES = ScoreResult(
    step=3, label=2, logprob=-0.5, entropy=1.5, mean_prob=0.625, geometric_prob=0.6, num_tokens=4
)
CONTEXT = ScoredThought(
    level=2, thought="a desk", tokens=2, cost=0.25, original=True, scores=SCORES
)
TURN = ThinkingTurnRecord(
    step=3,
    observation="You see a desk.",
    response="<level>2</level><think>a desk</think><action>look</action>",
    action="look",
    is_action_valid=True,
    reward=0.0,
    done=False,
    num_tokens=9,
    stop_reason="stop",
    span=(12, 21),
    level=2,
    thought_tokens=2,
)


def test_line_of_a_turn_keeps_its_keys_in_order():
    line = TURN.with_credit((CONTEXT,), 0.5, -0.125).to_json()
    assert list(line) == [
        *("step", "observation", "response", "action", "is_action_valid", "reward", "done"),
        *("num_tokens", "stop_reason", "span", "level", "level_forced", "parse_failure"),
        *("thought_tokens", "contexts", "think_advantage", "think_cost"),
    ]
    assert line["span"] == [12, 21]
    assert (line["think_advantage"], line["think_cost"]) == (0.5, -0.125)
    assert line["contexts"] == [
        {
            "level": 2,
            "thought": "a desk",
            "tokens": 2,
            "cost": 0.25,
            "original": True,
            "score_logprob": -0.5,
            "score_entropy": 1.5,
            "score_mean_prob": 0.625,
            "score_geometric_prob": 0.6,
        }
    ]


def test_with_credit_returns_a_new_record():
    credited = TURN.with_credit((CONTEXT,), 0.5, -0.125)
    assert credited != TURN and TURN.contexts == () and TURN.think_advantage == 0.0
    assert credited.with_credit((), 0.0, 0.0) == TURN


def test_record_can_be_pickled_and_copied():
    credited = TURN.with_credit((CONTEXT,), 0.5, -0.125)
    assert pickle.loads(pickle.dumps(credited)) == credited
    assert copy.deepcopy(credited) == credited


def test_line_holds_the_situation_if_the_environment_gives_it():
    line = dataclasses.replace(TURN, situation="3 hops", needed_level=2).to_json()
    assert (line["situation"], line["needed_level"]) == ("3 hops", 2)
    assert not {"situation", "needed_level"} & set(TURN.to_json())


def test_turn_without_levels_has_empty_thinking_fields():
    names = [field.name for field in dataclasses.fields(StepRecord)]
    step = ThinkingTurnRecord(**{name: getattr(TURN, name) for name in names})
    assert (step.situation, step.needed_level) == ("", None)
    line = step.to_json()
    assert {name: line[name] for name in set(line) - set(names)} == {
        "level": None,
        "level_forced": False,
        "parse_failure": None,
        "thought_tokens": 0,
        "contexts": [],
        "think_advantage": 0.0,
        "think_cost": 0.0,
    }
