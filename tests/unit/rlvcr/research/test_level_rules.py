"""Rules that force levels: which level they force on a step, and where they cannot be played."""

import logging
from collections import Counter

import pytest

from rlvcr.level_metrics import compute_levels_by_situation
from rlvcr.records import ThinkingTurnRecord
from rlvcr.research.level_rules import FREE_RULE, LevelRule, build_level_rule, select_level_rules
from rlvcr.settings import LEVEL_RULES
from tests.helpers.refusals import mentions
from verl.config.load import load_config
from verl.config.settings import ConfigError

LOTS = [place / 1000 for place in range(1000)]


def step_at(level: int | None, situation: str = "", needed: int | None = None, forced=False):
    """A step of which only the level counts."""
    return ThinkingTurnRecord(
        step=0,
        observation="",
        response="",
        action="",
        is_action_valid=True,
        reward=0.0,
        done=False,
        num_tokens=1,
        stop_reason="stop",
        span=(0, 1),
        level=level,
        level_forced=forced,
        situation=situation,
        needed_level=needed,
    )


def drawn(rule: LevelRule, needed: int | None = None) -> Counter:
    """How often each level is forced when the lots lie evenly."""
    return Counter(rule.draw_level(lot, needed) for lot in LOTS)


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_always_forces_one_level(level):
    rule = build_level_rule(f"level_{level}", [])
    assert rule is not None and rule.may_force
    assert drawn(rule, needed=5 - level) == {level: 1000}
    assert rule == LevelRule.force_level(level) and rule.forces_required_level is False


def test_the_policys_shares_are_drawn_exactly():
    steps = [step_at(level) for level in (1, 1, 1, 4, 4, 2, 2, 2, 2, 2)]
    rule = build_level_rule("random", [*steps, step_at(None), step_at(3, forced=True)])
    assert rule is not None and rule.may_force
    assert drawn(rule, needed=3) == {1: 300, 2: 500, 4: 200}
    assert rule.shares == (0.3, 0.5, 0.0, 0.2)


def test_what_shares_lack_to_one_is_left_to_the_policy():
    assert drawn(FREE_RULE) == {None: 1000} and not FREE_RULE.may_force
    assert drawn(LevelRule.force_uniformly(0.5)) == {1: 125, 2: 125, 3: 125, 4: 125, None: 500}


def test_needed_follows_the_environment_and_nothing_else():
    rule = build_level_rule("oracle", [step_at(None), step_at(1, needed=3)])
    assert rule is not None and rule.may_force
    assert [rule.draw_level(lot, needed) for lot, needed in ((0.0, 4), (0.9, 1), (0.5, None))] == [
        4,
        1,
        None,
    ]


def test_rules_that_cannot_be_played_are_left_out_with_a_sentence(caplog):
    with caplog.at_level(logging.WARNING):
        found = select_level_rules(LEVEL_RULES, [step_at(None), step_at(2, forced=True)])
    assert found == {f"level_{level}": LevelRule.force_level(level) for level in (1, 2, 3, 4)}
    assert list(found) == ["level_1", "level_2", "level_3", "level_4"]
    assert "random" in caplog.text
    assert "oracle" in caplog.text
    assert select_level_rules(["free"], []) == {} == select_level_rules([], [])


@pytest.mark.parametrize(
    "shares", [(0.5, 0.5), (0.5, 0.5, 0.5, 0.0), (-0.5, 0.5, 0.5, 0.5)], ids=str
)
def test_shares_that_are_none_are_refused(shares):
    with pytest.raises(ValueError, check=mentions(1)):
        LevelRule(shares)


def test_shares_may_be_off_by_rounding():
    assert LevelRule((1 + 1e-9, 0.0, 0.0, 0.0)).draw_level(0.999, None) == 1
    with pytest.raises(ValueError, check=mentions(1)):
        LevelRule((1 + 2e-9, 0.0, 0.0, 0.0))


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, check=mentions("eval_levels", "'orakle'", "'oracle'")):
        build_level_rule("orakle", [])
    words = ["actor_rollout_ref.model.path=.", "algorithm.rlvcr.eval_levels=[free,level_5]"]
    with pytest.raises(ConfigError, check=mentions("eval_levels", "'level_5'", "level_1")):
        load_config("relay", words)


def test_situations_tell_what_was_chosen_in_them():
    steps = [step_at(1, "+0", 1), step_at(2, "+0", 1), step_at(4, "+7", 4), step_at(None, "+7", 4)]
    found = compute_levels_by_situation(
        [*steps, step_at(3, "+7", 4, forced=True), step_at(1)], "in"
    )
    assert found == {
        "in/+0/steps": 2.0,
        "in/+0/needed_level": 1.0,
        "in/+0/share_1": 0.5,
        "in/+0/share_2": 0.5,
        "in/+0/share_3": 0.0,
        "in/+0/share_4": 0.0,
        "in/+7/steps": 1.0,
        "in/+7/needed_level": 4.0,
        "in/+7/share_1": 0.0,
        "in/+7/share_2": 0.0,
        "in/+7/share_3": 0.0,
        "in/+7/share_4": 1.0,
    }
    assert "in/+0/needed_level" not in compute_levels_by_situation([step_at(1, "+0")], "in")
    many = [step_at(1, str(number)) for number in range(17)]
    assert (
        compute_levels_by_situation(many, "in") == {} != compute_levels_by_situation(many[1:], "in")
    )
