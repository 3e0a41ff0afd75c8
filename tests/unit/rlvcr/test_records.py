"""The record of a thinking step: what a rollout file holds of it, and how credit joins it."""

import copy
import dataclasses
import pickle

from rlvcr.records import ThinkingTurnRecord, ThoughtContext
from verl.records import SegmentScore, StepRecord

SCORES = SegmentScore(
    step=3, label=2, logprob=-0.5, entropy=1.5, mean_prob=0.625, geometric_prob=0.6, num_tokens=4
)
CONTEXT = ThoughtContext(
    level=2, thought="a desk", tokens=2, cost=0.25, original=True, scores=SCORES
)
STEP = ThinkingTurnRecord(
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


def test_the_line_of_a_step_keeps_its_keys_in_order():
    line = STEP.with_credit((CONTEXT,), 0.5, -0.125).to_json()
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


def test_credit_makes_a_new_record():
    credited = STEP.with_credit((CONTEXT,), 0.5, -0.125)
    assert credited != STEP and STEP.contexts == () and STEP.think_advantage == 0.0
    assert credited.with_credit((), 0.0, 0.0) == STEP


def test_records_travel_between_processes():
    credited = STEP.with_credit((CONTEXT,), 0.5, -0.125)
    assert pickle.loads(pickle.dumps(credited)) == credited
    assert copy.deepcopy(credited) == credited


def test_a_line_says_what_a_state_is_like_where_the_environment_does():
    told = dataclasses.replace(STEP, situation="3 hops", needed_level=2).to_json()
    assert (told["situation"], told["needed_level"]) == ("3 hops", 2)
    assert not {"situation", "needed_level"} & set(STEP.to_json())


def test_a_step_of_a_policy_without_levels_has_neither_thought_nor_credit():
    names = [field.name for field in dataclasses.fields(StepRecord)]
    step = ThinkingTurnRecord(**{name: getattr(STEP, name) for name in names})
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
