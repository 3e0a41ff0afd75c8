"""``algorithm``: how rewards become advantages."""

from typing import Annotated, Literal

from annotated_types import Ge

from verl.config.settings import (
    NULL,
    Derived,
    NonNegative,
    NonNegativeInt,
    PositiveInt,
    Section,
    Share,
)
from verl.names import KLEstimator, NormMode, RolloutRS, RowWeight


class KLControl(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """how the coefficient of the KL penalty moves: constant, or steered towards target_kl"""
    kl_coef: NonNegative = 0.001
    """coefficient of the KL penalty; an adaptive one starts here"""
    horizon: PositiveInt = 10000
    """how slowly an adaptive coefficient moves, in trajectories"""
    target_kl: NonNegative = 0.1
    """KL an adaptive coefficient aims at"""


class GiGPOConfig(Section):
    """Group-in-group credit: steps that start from the same anchor state are compared."""

    step_advantage_w: NonNegative = 1.0
    """weight of the step-level advantage"""
    mode: NormMode = "mean_norm"
    """whether groups are also divided by their spread"""
    enable_similarity: bool = False
    """group similar anchors, not only equal ones"""
    similarity_thresh: Share = 0.95
    """how similar two anchors of a group must be, with enable_similarity"""


class GraphGPOConfig(Section):
    """Steps are worth what they bring one nearer to a won end, in the graph of anchor states."""

    step_advantage_w: NonNegative = 1.0
    """weight of the step-level advantage"""
    mode: NormMode = "mean_std_norm"
    """whether groups are also divided by their spread"""
    gamma: Share = 0.1
    """what a step further from the goal is worth"""
    goal_value: NonNegative = 10.0
    """return of a step that reaches the goal; counts with mode=mean_norm"""


class HGPOConfig(Section):
    """Steps are compared with those of the same state and of the same last states."""

    step_advantage_w: NonNegative = 1.0
    """weight of the step-level advantage"""
    mode: NormMode = "mean_norm"
    """whether groups are also divided by their spread"""
    context: NonNegativeInt = 2
    """states before a step's own that the longest context holds; 0 is gigpo"""
    alpha: NonNegative = 1.0
    """how much more longer contexts count: (k + 1)^alpha"""


class FilterGroupsConfig(Section):
    """Dynamic sampling: keep playing until enough groups have returns that differ."""

    enable: bool = False
    """drop groups whose returns are all equal and sample new tasks"""
    max_num_gen_batches: PositiveInt = 10
    """batches sampled at most per iteration"""


class RolloutCorrectionConfig(Section):
    """What is done where the trainer's probabilities of sampled tokens differ from the engine's.

    A sequence is what algorithm.row_weight says: a row, or all rows of a trajectory.
    """

    rollout_is: Literal["auto", "token", "sequence"] | None = "auto"
    """weigh tokens by trainer's over engine's probability, of the token or the whole sequence;
    auto: token where the engine computes in less than float32 or plays overlap with updates
    (trainer.rollout_overlap), else null, which is 1"""
    rollout_is_threshold: Annotated[float, Ge(1)] = 2.0
    """largest weight; more is truncated to it"""
    rollout_rs: RolloutRS | None = None
    """leave out tokens by their ratio, or sequences by the product or the geometric mean of their
    tokens' ratios"""
    rollout_rs_threshold: Derived[Annotated[float, Ge(1)]] = NULL
    """largest ratio that is kept with rollout_rs; null: rollout_is_threshold. For geometric, 1.01
    is usual"""
    rollout_rs_threshold_lower: Derived[Share] = NULL
    """least ratio that is kept with rollout_rs; null: 1 / rollout_rs_threshold"""
    bypass_mode: bool = False
    """take the engine's log-probs for the old ones: no pass of the trainer over the rows before the
    update, and nothing to compare with"""


class AlgorithmConfig(Section):
    """Advantage estimation and KL in the reward."""

    adv_estimator: str = "grpo"
    """name in the estimator registry"""
    gamma: Share = 1.0
    """discount per token (gae) or per step (gigpo)"""
    lam: Share = 1.0
    """lambda of GAE"""
    norm_adv_by_std_in_grpo: bool = True
    """divide by the group's standard deviation as well"""
    use_kl_in_reward: bool = False
    """subtract the KL to the reference policy from the reward"""
    kl_penalty: KLEstimator = "kl"
    """estimator of the KL in the reward"""
    kl_ctrl: KLControl = KLControl()
    """the coefficient of the KL in the reward"""
    row_weight: RowWeight = "row"
    """what a sequence of the seq-mean loss_agg_modes is: a row, or all rows of a trajectory"""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """trainer's probabilities against the engine's"""
    gigpo: GiGPOConfig = GiGPOConfig()
    """group-in-group credit"""
    graphgpo: GraphGPOConfig = GraphGPOConfig()
    """credit by the distance to a won end"""
    hgpo: HGPOConfig = HGPOConfig()
    """credit in a hierarchy of contexts"""
    gdpo_reward_keys: list[str] = []
    """gdpo: rewards of custom_reward_function that count, each normalised by itself; none: those of
    reward_model.weights"""
    gdpo_reward_weights: list[float] = []
    """gdpo: weights of these rewards, in the same order; none: those of reward_model.weights, or 1
    each where keys are named"""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """dynamic sampling"""
