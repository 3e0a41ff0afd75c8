"""Allowed values of the options in ``algorithm.rlvcr``."""

from typing import Literal, get_args

Score = Literal["entropy", "logprob", "prob"]
SCORES: tuple[Score, ...] = get_args(Score)

Combination = Literal["additive", "gated", "success", "reweight"]
COMBINES: tuple[Combination, ...] = get_args(Combination)

PriceRule = Literal["all", "won", "gate", "group"]
PRICE_RULES: tuple[PriceRule, ...] = get_args(PriceRule)

CreditRule = Literal["scored", "posterior", "executed", "corrected"]

LevelRuleName = Literal["free", "level_1", "level_2", "level_3", "level_4", "random", "oracle"]
LEVEL_RULES: tuple[LevelRuleName, ...] = get_args(LevelRuleName)
