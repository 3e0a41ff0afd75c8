"""Level rules: the level that a rule forces in a turn, and rules that cannot be applied."""

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

DRAWS = [place / 1000 for place in range(1000)]


def turn_at(level: int | None, situation: str = "", needed: int | None = None, forced=False):
    """Return the record of a turn in which only the level matters."""
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


def count_draws(rule: LevelRule, needed: int | None = None) -> Counter:
    """Count the levels that the rule forces over evenly spaced draws."""
    return Counter(rule.draw_level(draw, needed) for draw in DRAWS)


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_level_rule_always_forces_its_level(level):
    rule = build_level_rule(f"level_{level}", [])
    assert rule is not None and rule.can_force_level
    assert count_draws(rule, needed=5 - level) == {level: 1000}
    assert rule == LevelRule.from_level_frequencies([level]) and rule.forces_required_level is False


def test_random_rule_draws_the_shares_of_the_policy():
    turns = [turn_at(level) for level in (1, 1, 1, 4, 4, 2, 2, 2, 2, 2)]
    rule = build_level_rule("random", [*turns, turn_at(None), turn_at(3, forced=True)])
    assert rule is not None and rule.can_force_level
    assert count_draws(rule, needed=3) == {1: 300, 2: 500, 4: 200}
    assert rule.shares == (0.3, 0.5, 0.0, 0.2)


def test_share_missing_to_one_is_not_forced():
    assert count_draws(FREE_RULE) == {None: 1000} and not FREE_RULE.can_force_level
    assert count_draws(LevelRule.from_uniform_share(0.5)) == {
        1: 125,
        2: 125,
        3: 125,
        4: 125,
        None: 500,
    }


def test_oracle_rule_forces_the_required_level():
    rule = build_level_rule("oracle", [turn_at(None), turn_at(1, needed=3)])
    assert rule is not None and rule.can_force_level
    assert [
        rule.draw_level(draw, needed) for draw, needed in ((0.0, 4), (0.9, 1), (0.5, None))
    ] == [
        4,
        1,
        None,
    ]


def test_inapplicable_rules_are_dropped_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        rules = select_level_rules(LEVEL_RULES, [turn_at(None), turn_at(2, forced=True)])
    assert rules == {
        f"level_{level}": LevelRule.from_level_frequencies([level]) for level in (1, 2, 3, 4)
    }
    assert list(rules) == ["level_1", "level_2", "level_3", "level_4"]
    assert "random" in caplog.text
    assert "oracle" in caplog.text
    assert select_level_rules(["free"], []) == {} == select_level_rules([], [])


@pytest.mark.parametrize(
    "shares", [(0.5, 0.5), (0.5, 0.5, 0.5, 0.0), (-0.5, 0.5, 0.5, 0.5)], ids=str
)
def test_invalid_shares_are_refused(shares):
    with pytest.raises(ValueError, check=mentions(1)):
        LevelRule(shares)


def test_shares_may_be_off_by_a_rounding_error():
    assert LevelRule((1 + 1e-9, 0.0, 0.0, 0.0)).draw_level(0.999, None) == 1
    with pytest.raises(ValueError, check=mentions(1)):
        LevelRule((1 + 2e-9, 0.0, 0.0, 0.0))


def test_unknown_rule_is_refused():
    with pytest.raises(ValueError, check=mentions("eval_levels", "'orakle'", "'oracle'")):
        build_level_rule("orakle", [])
    overrides = ["actor_rollout_ref.model.path=.", "algorithm.rlvcr.eval_levels=[free,level_5]"]
    with pytest.raises(ConfigError, check=mentions("eval_levels", "'level_5'", "level_1")):
        load_config("relay", overrides)


def test_level_shares_are_counted_by_situation():
    turns = [turn_at(1, "+0", 1), turn_at(2, "+0", 1), turn_at(4, "+7", 4), turn_at(None, "+7", 4)]
    metrics = compute_levels_by_situation(
        [*turns, turn_at(3, "+7", 4, forced=True), turn_at(1)], "in"
    )
    assert metrics == {
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
    assert "in/+0/needed_level" not in compute_levels_by_situation([turn_at(1, "+0")], "in")
    many = [turn_at(1, str(number)) for number in range(17)]
    assert (
        compute_levels_by_situation(many, "in") == {} != compute_levels_by_situation(many[1:], "in")
    )
