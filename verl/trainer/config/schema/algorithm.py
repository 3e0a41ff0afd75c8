"""``algorithm``: how rewards become advantages."""

from typing import Literal

from verl.names import KLEstimator, NormMode, RowWeight
from verl.utils.settings import NonNegative, PositiveInt, Section, Share
from verl.utils.settings.section import OpenSection


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


class FilterGroupsConfig(Section):
    """Dynamic sampling: keep playing until enough groups have returns that differ."""

    enable: bool = False
    """drop groups whose returns are all equal and sample new tasks"""
    max_num_gen_batches: PositiveInt = 10
    """batches sampled at most per iteration"""


class AlgorithmConfig(OpenSection):
    """Advantage estimation and KL in the reward.

    A method that is plugged in has a section of its name here.
    """

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
    gigpo: GiGPOConfig = GiGPOConfig()
    """group-in-group credit"""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """dynamic sampling"""
