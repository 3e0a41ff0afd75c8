"""``algorithm.rlvcr``, and the keys about levels elsewhere. Light: the command line imports it."""

from typing import Literal

from rlvcr.names import (
    LEVEL_RULES,
    Combination,
    CreditRule,
    LevelRuleName,
    PriceRule,
    Score,
)
from verl.config.schema.algorithm import AlgorithmConfig
from verl.config.settings import NULL, Derived, NonNegative, PositiveInt, Section, Share
from verl.names import NormMode


class RLVCRSettings(Section):
    """Credit for how much was thought: the step's action scored under four thoughts.

    Defaults: the additive formula.
    """

    enable: Derived[bool] = NULL
    """sample and score alternative thoughts; null: follows algorithm.adv_estimator"""
    score: Score = "entropy"
    """score of a context: entropy is -score_entropy of the records, logprob is score_logprob, prob
    is score_geometric_prob (of the action's tokens)"""
    mode: NormMode = "mean_norm"
    """whether groups of thoughts are also divided by their spread"""
    combine: Combination = "additive"
    """how the thinking advantage joins the advantage of the trajectory"""
    step_advantage_w: NonNegative = 1.0
    """w: weight of the thinking advantage"""
    thinking_diversity_w: Derived[NonNegative] = NULL
    """weight of the entropy over the four level digits in the loss, whatever the estimator, where
    env.levels is true; null: 0.5 with thinking credit, 0 without"""
    cost_coef: NonNegative = 0.0
    """price of a thought of cost_max tokens, in units of the score"""
    cost_max: PositiveInt = 64
    """thought tokens beyond which the price stays the same"""
    price_in: PriceRule = "all"
    """plays in which thoughts cost something: all, or won ones only; gate: all, but the price goes
    through the gate of combine, which turns it round in lost plays"""
    std_floor: NonNegative = 0.1
    """smallest spread of scores that mean_std_norm divides by"""
    spread_floor: NonNegative = 0.02
    """smallest distance between best and worst thought that combine=reweight and copo scale to 1,
    in units of the score"""
    permute: bool = False
    """control: deal the thinking credit anew, at random, among the scored steps of the batch"""
    credit: CreditRule = "scored"
    """where thinking credit comes from: scored (confidence in the step's action), executed (at a
    share of the steps another level is forced and played on with, and the returns are compared),
    corrected (executed, and confidence elsewhere, as far as it agrees with what was executed)"""
    executed_share: Share = 0.25
    """share of the steps at which another level is executed, where credit asks for it"""
    credit_end: bool = False
    """thinking credit also goes to the token that ends the thought; without it, where credit is
    positive, another token of thought earns it and stopping does not"""
    alternatives: Literal["all", "one"] = "all"
    """thoughts sampled per step: the three others or one of them"""
    action_blind: bool = True
    """alternatives do not see the action; false is for comparison"""
    expand: Literal["all", "mixed_groups"] = "all"
    """groups whose steps get alternatives"""
    step_fraction: Share = 1.0
    """share of steps that get alternatives"""
    max_alternative_tokens: Derived[PositiveInt] = NULL
    """longest alternative thought; null: env.max_turn_tokens"""
    collapse_patience: PositiveInt = 10
    """warn when a level was not seen for this many updates"""
    level_bonus_w: NonNegative = 0.0
    """weight of the count bonus for rare levels in a group"""
    epsilon_levels: Share = 0.0
    """probability of a level drawn uniformly instead of by the policy"""
    eval_levels: list[LevelRuleName] = list(LEVEL_RULES)
    """what main_eval compares the policy's own levels (free, which is always played) with, on the
    same panel with the same seeds: one level at every step, levels drawn with the shares of free
    (random), and the level that the environment calls needed (oracle)"""
    audit_tasks: PositiveInt = 64
    """validation tasks from whose plays main_audit takes its steps, a group of plays each, at most:
    steps of one task are like each other, and intervals are over tasks"""
    audit_points: PositiveInt = 100
    """steps at which main_audit plays on with every level, at most"""
    audit_plays: PositiveInt = 8
    """plays of main_audit from a step, for each level"""
    prompts: dict[str, str] = {}
    """texts that replace the built-in description of levels 1 to 4"""


def method_settings(algorithm: AlgorithmConfig) -> RLVCRSettings:
    """Return the section ``algorithm.rlvcr``, which the schema does not declare itself."""
    return algorithm.rlvcr


class LevelKeys(Section):
    """Below ``env``: whether the policy is asked for levels at all."""

    levels: Derived[bool] = NULL
    """ask the policy for thinking levels; null: where the method needs them"""


class DemonstrationKeys(Section):
    """Below ``data`` of a supervised run: the levels of the expert's thoughts."""

    levels: list[Literal[1, 2, 3, 4]] = [1, 2, 3, 4]
    """thinking levels, drawn uniformly; empty: files of plain actions"""
    needed_level_share: Share = 0.0
    """share of the steps demonstrated on the level that the expert calls needed, before levels are
    drawn uniformly"""
