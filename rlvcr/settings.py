"""Settings ``algorithm.rlvcr``, and other keys about thinking levels.

This module imports no torch, because the command line imports it.
"""

from typing import Annotated, Literal, get_args

from annotated_types import Ge

from verl.config.schema import AlgorithmConfig, EnvConfig, PPOConfig, SFTConfig
from verl.config.schema.sft import SFTDataConfig
from verl.config.settings import (
    NULL,
    Derived,
    NonNegative,
    PositiveInt,
    Section,
    Share,
    value_at_path,
)
from verl.names import NormMode

ScoreName = Literal["entropy", "logprob", "prob"]

CombineRule = Literal["additive", "gated", "success", "reweight"]
COMBINE_RULES: tuple[CombineRule, ...] = get_args(CombineRule)

PriceRule = Literal["all", "won", "gate", "group"]
PRICE_RULES: tuple[PriceRule, ...] = get_args(PriceRule)

CreditRule = Literal["scored", "posterior"]

LevelRuleName = Literal["free", "level_1", "level_2", "level_3", "level_4", "random", "oracle"]
LEVEL_RULES: tuple[LevelRuleName, ...] = get_args(LevelRuleName)


class RLVCRSettings(Section):
    """Settings of RLVCR: credit for the thinking level that the policy chooses in a turn.

    The turn's action is scored after thoughts of all levels. The thinking advantage is the score
    minus token cost at the chosen level, minus the mean over all levels. By default it is added to
    the trajectory advantage, as in the published method.
    """

    retired_keys = ("executed_share",)

    enable: Derived[bool] = NULL
    """sample and score alternative thoughts; null: follows algorithm.adv_estimator"""
    score: ScoreName = "entropy"
    """score of the turn's action after a thought: entropy (minus the mean entropy of the action's
    tokens), logprob (their mean log-prob), prob (geometric mean of their probabilities)
    """
    mode: NormMode = "mean_norm"
    """normalisation of utilities (score minus token cost) within a turn: mean_norm subtracts their
    mean, mean_std_norm also divides by their std
    """
    combine: CombineRule = "additive"
    """formula that joins the thinking advantage with the trajectory advantage: additive (weighted
    sum), gated (thinking advantage times the sign of the trajectory advantage), success (weighted
    sum in successful trajectories only), reweight (trajectory advantage times a factor)
    """
    step_advantage_w: NonNegative = 1.0
    """weight of the thinking advantage"""
    thinking_diversity_w: Derived[NonNegative] = NULL
    """weight of the entropy over the four level digits in the loss, for every estimator, where
    env.levels is true; null: 0.5 with thinking advantage, 0 without
    """
    cost_coef: NonNegative = 0.0
    """token cost of a thought of cost_max tokens, in units of the score"""
    cost_max: PositiveInt = 64
    """number of thought tokens above which the token cost stays constant"""
    price_in: PriceRule = "all"
    """trajectories whose thoughts have a token cost: all, or only successful ones; gate: all, but
    combine applies to the cost too, so that combine=gated reverses its sign where the trajectory
    advantage is negative; group: the cost is the thought length relative to the group's other
    successful trajectories in the same state, and cost_coef is not used
    """
    std_floor: NonNegative = 0.1
    """smallest std of utilities that mean_std_norm divides by"""
    spread_floor: NonNegative = 0.02
    """smallest difference between best and worst thought that combine=reweight and copo scale to 1,
    in units of the score
    """
    permute: bool = False
    """control: shuffle thinking advantages among the scored turns of the batch"""
    credit: CreditRule = "scored"
    """source of the thinking advantage: scored (scores of the turn's action), posterior (the
    gradient of the level digit is averaged over all levels, weighted by the probability of each
    level given the action)
    """
    credit_end: bool = False
    """place the thinking advantage also on the token that ends the thought; otherwise a positive
    advantage rewards each further thought token and never the end of the thought
    """
    alternatives: Literal["all", "one"] = "all"
    """alternative thoughts per turn: at each of the three other levels (all), or at one of them"""
    action_blind: bool = True
    """sample alternative thoughts without the action in the prompt; false adds the action, for a
    comparison
    """
    expand: Literal["all", "mixed_groups", "successes"] = "all"
    """turns that get alternative thoughts: all, those of groups whose returns differ, or those of
    successful trajectories; mixed_groups and successes sample them after the rollout of a group
    """
    share_thoughts: bool = False
    """sample one alternative thought per level for all members of a group with the same prompt,
    after the rollout of the group
    """
    step_fraction: Share = 1.0
    """share of turns that get alternative thoughts"""
    max_alternative_tokens: Derived[PositiveInt] = NULL
    """longest alternative thought; null: env.max_turn_tokens"""
    collapse_patience: PositiveInt = 10
    """number of training steps after which a level that was not sampled is reported in a warning"""
    level_bonus_w: NonNegative = 0.0
    """weight of a bonus (-log frequency in the group) on the advantage, for rare levels"""
    epsilon_levels: Share = 0.0
    """probability that the level of a turn is drawn uniformly instead of sampled from the policy"""
    eval_levels: list[LevelRuleName] = list(LEVEL_RULES)
    """level rules that main_eval compares with the policy's choice (free, always included), on the
    same validation tasks and seeds: one level in every turn, levels drawn with the shares of free
    (random), and the required level that the environment names (oracle)
    """
    audit_tasks: PositiveInt = 64
    """maximum number of validation tasks for main_audit, with one group of trajectories each; turns
    of one task are correlated, so intervals resample tasks
    """
    audit_points: PositiveInt = 100
    """maximum number of turns at which main_audit executes every level, or several actions, and
    continues the episode
    """
    audit_plays: PositiveInt = 8
    """number of rollouts of main_audit per turn and level (or action)"""
    audit_actions: Annotated[int, Ge(2)] = 4
    """number of different actions that main_audit executes at a turn without thinking levels: the
    original one, and others that the policy samples there
    """
    audit_scores_file: str | None = None
    """JSONL file with external scores for main_audit; lines {"traj_uid", "step", "score"} or
    {"task_id", "seed", "step", "score"}
    """
    audit_trajectories: str | None = None
    """JSONL file of trajectories that main_audit replays and audits instead of sampling its own;
    lines {"task_id", "seed", "actions"}
    """
    prompts: dict[str, str] = {}
    """texts that replace the built-in description of levels 1 to 4"""

    @property
    def samples_thoughts_after_rollout(self) -> bool:
        """True if alternative thoughts are sampled only after the rollout of a group has ended."""
        return self.share_thoughts or self.expand != "all"


class RLVCRAlgorithmConfig(AlgorithmConfig):
    """Section ``algorithm`` with the keys of RLVCR."""

    rlvcr: RLVCRSettings = RLVCRSettings()
    """credit for thinking levels"""


class RLVCREnvConfig(EnvConfig):
    """Section ``env`` with the key ``levels`` of RLVCR."""

    levels: Derived[bool] = NULL
    """ask in the prompt for a thinking level in each turn; null: true if the method needs levels"""


class RLVCRDataConfig(SFTDataConfig):
    """Section ``data`` of a supervised run, with the thinking levels of the demonstrations."""

    levels: list[Literal[1, 2, 3, 4]] = [1, 2, 3, 4]
    """thinking levels of the demonstrations, drawn uniformly; empty: turns without level"""
    needed_level_share: Share = 0.0
    """share of the turns demonstrated at the required level that the expert names; levels of the
    other turns are drawn uniformly
    """


# Pyright does not allow a subclass as the type of an overridden attribute.
class RLVCRPPOConfig(PPOConfig):
    """Configuration of ``main_ppo`` with the keys of RLVCR."""

    algorithm: RLVCRAlgorithmConfig = RLVCRAlgorithmConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    env: RLVCREnvConfig = RLVCREnvConfig()  # pyright: ignore[reportIncompatibleVariableOverride]


class RLVCRSFTConfig(SFTConfig):
    """Configuration of ``main_sft`` with the keys of RLVCR."""

    data: RLVCRDataConfig = RLVCRDataConfig()  # pyright: ignore[reportIncompatibleVariableOverride]
    env: RLVCREnvConfig = RLVCREnvConfig()  # pyright: ignore[reportIncompatibleVariableOverride]


def get_rlvcr_settings(algorithm: AlgorithmConfig) -> RLVCRSettings:
    """Return the section ``algorithm.rlvcr``, which the schema of ``verl`` does not declare."""
    return value_at_path(algorithm, "rlvcr")
