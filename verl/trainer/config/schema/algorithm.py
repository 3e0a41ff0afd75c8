"""``algorithm``: how rewards become advantages."""

from dataclasses import dataclass

from verl.trainer.config.schema.actor import KL_TYPES
from verl.trainer.config.schema.field import opt, section

ESTIMATORS = (
    "gae",
    "grpo",
    "gigpo",
    "rlvcr",
    "copo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
)
GROUP_ESTIMATORS = (
    "grpo",
    "gigpo",
    "rlvcr",
    "copo",
    "rloo",
    "reinforce_plus_plus_baseline",
    "opo",
    "gpg",
)
THINKING_ESTIMATORS = ("rlvcr", "copo")
NORM_MODES = ("mean_norm", "mean_std_norm")


@dataclass
class KLControl:
    """The coefficient of the KL penalty in the reward."""

    type: str = opt(
        "fixed", "constant, or steered towards target_kl", choices=("fixed", "adaptive")
    )
    kl_coef: float = opt(0.001, "(first) coefficient", low=0)
    horizon: int = opt(10000, "how slowly an adaptive coefficient moves, in trajectories", low=1)
    target_kl: float = opt(0.1, "KL an adaptive coefficient aims at", low=0)


@dataclass
class GiGPOConfig:
    """Group-in-group credit: steps that start from the same anchor state are compared."""

    step_advantage_w: float = opt(1.0, "weight of the step-level advantage", low=0)
    mode: str = opt(
        "mean_norm", "whether groups are also divided by their spread", choices=NORM_MODES
    )
    enable_similarity: bool = opt(False, "group similar anchors, not only equal ones")
    similarity_thresh: float = opt(0.95, "how similar", low=0, high=1)


@dataclass
class FilterGroupsConfig:
    """Dynamic sampling: keep playing until enough groups have returns that differ."""

    enable: bool = opt(False, "drop groups whose returns are all equal and sample new tasks")
    max_num_gen_batches: int = opt(10, "batches sampled at most per iteration", low=1)


@dataclass
class RLVCRConfig:
    """Credit for how much was thought: the step's action scored under four thoughts.

    Defaults: the additive formula.
    """

    enable: bool | None = opt(
        None, "sample and score alternative thoughts; null: follows algorithm.adv_estimator"
    )
    score: str = opt(
        "entropy",
        "score of a context: -entropy, log-prob, prob",
        choices=("entropy", "logprob", "prob"),
    )
    mode: str = opt(
        "mean_norm", "whether groups are also divided by their spread", choices=NORM_MODES
    )
    combine: str = opt(
        "additive",
        "how the thinking advantage joins the trajectory's",
        choices=("additive", "gated", "success", "reweight"),
    )
    step_advantage_w: float = opt(1.0, "w: weight of the thinking advantage", low=0)
    thinking_diversity_w: float = opt(
        0.5, "weight of the entropy over the four level digits in the loss", low=0
    )
    cost_coef: float = opt(
        0.0, "price of a thought of cost_max tokens, in units of the score", low=0
    )
    cost_max: int = opt(64, "thought tokens beyond which the price stays the same", low=1)
    std_floor: float = opt(0.1, "smallest spread of scores that mean_std_norm divides by", low=0)
    alternatives: str = opt(
        "all", "thoughts sampled per step: the three others or one of them", choices=("all", "one")
    )
    action_blind: bool = opt(True, "alternatives do not see the action; false is for comparison")
    expand: str = opt("all", "groups whose steps get alternatives", choices=("all", "mixed_groups"))
    step_fraction: float = opt(1.0, "share of steps that get alternatives", low=0, high=1)
    max_alternative_tokens: int = opt(64, "longest alternative thought", low=1)
    collapse_patience: int = opt(10, "warn when a level was not seen for this many updates", low=1)
    level_bonus_w: float = opt(0.0, "weight of the count bonus for rare levels in a group", low=0)
    epsilon_levels: float = opt(
        0.0, "probability of a level drawn uniformly instead of by the policy", low=0, high=1
    )
    prompts: dict[str, str] = opt(
        {}, "texts that replace the built-in description of levels 1 to 4"
    )


@dataclass
class AlgorithmConfig:
    """Advantage estimation and KL in the reward."""

    adv_estimator: str = opt("grpo", "name in the estimator registry: " + ", ".join(ESTIMATORS))
    gamma: float = opt(1.0, "discount per token (gae) or per step (gigpo)", low=0, high=1)
    lam: float = opt(1.0, "lambda of GAE", low=0, high=1)
    norm_adv_by_std_in_grpo: bool = opt(True, "divide by the group's standard deviation as well")
    use_kl_in_reward: bool = opt(False, "subtract the KL to the reference policy from the reward")
    kl_penalty: str = opt("kl", "its estimator", choices=KL_TYPES)
    kl_ctrl: KLControl = section(KLControl, "the coefficient of that penalty")
    row_weight: str = opt(
        "trajectory",
        "what counts the same: trajectories or tokens",
        choices=("trajectory", "token"),
    )
    gigpo: GiGPOConfig = section(GiGPOConfig, "group-in-group credit")
    filter_groups: FilterGroupsConfig = section(FilterGroupsConfig, "dynamic sampling")
    rlvcr: RLVCRConfig = section(RLVCRConfig, "credit for thinking levels")
