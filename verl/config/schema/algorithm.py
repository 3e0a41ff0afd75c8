"""Section ``algorithm``: advantage estimation, KL in the reward and corrections."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

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
    """The coefficient of the KL penalty in the reward, fixed or adaptive."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """control of the coefficient: constant, or adapted so that the KL approaches target_kl"""
    kl_coef: NonNegative = 0.001
    """coefficient of the KL penalty; initial value of an adaptive one"""
    horizon: PositiveInt = 10000
    """time constant of an adaptive coefficient, in trajectories"""
    target_kl: Annotated[float, Gt(0)] = 0.1
    """KL that an adaptive coefficient approaches"""


class GiGPOConfig(Section):
    """GiGPO: turns that start from the same environment state (anchor state) form a group."""

    step_advantage_w: NonNegative = 1.0
    """weight of the turn-level advantage"""
    mode: NormMode = "mean_norm"
    """normalisation of a group: by its mean, or by its mean and standard deviation"""
    enable_similarity: bool = False
    """group turns of similar anchor states, not only of equal ones"""
    similarity_thresh: Share = 0.95
    """least similarity of two anchor states of a group, with enable_similarity"""


class GraphGPOConfig(Section):
    """GraphGPO: the advantage of a turn is its progress towards success in a graph of states.

    The nodes of the graph are the environment states that the trajectories of a group visit.
    """

    step_advantage_w: NonNegative = 1.0
    """weight of the turn-level advantage"""
    mode: NormMode = "mean_std_norm"
    """normalisation of a group: by its mean, or by its mean and standard deviation"""
    gamma: Share = 0.1
    """discount for each turn of distance to the goal"""
    goal_value: NonNegative = 10.0
    """return of a turn that reaches the goal; has an effect with mode=mean_norm"""


class HGPOConfig(Section):
    """HGPO: a turn is compared with turns of the same state and of the same preceding states."""

    step_advantage_w: NonNegative = 1.0
    """weight of the turn-level advantage"""
    mode: NormMode = "mean_norm"
    """normalisation of a group: by its mean, or by its mean and standard deviation"""
    context: NonNegativeInt = 2
    """preceding states in the longest context; 0 is gigpo"""
    alpha: NonNegative = 1.0
    """exponent of the weight of a context with k preceding states: (k + 1)^alpha"""


class FilterGroupsConfig(Section):
    """Dynamic sampling: generate trajectories until enough groups have returns that differ."""

    enable: bool = False
    """drop groups whose returns are all equal and sample new tasks"""
    max_num_gen_batches: PositiveInt = 10
    """largest number of batches generated per training step"""


class RolloutCorrectionConfig(Section):
    """Correction of the mismatch between the log-probs of trainer and rollout engine.

    For corrections per sequence, algorithm.row_weight decides if a sequence is one row or all rows
    of a trajectory.
    """

    rollout_is: Literal["auto", "token", "sequence"] | None = "auto"
    """weight of tokens: ratio of trainer's to engine's probability of the token or the sequence;
    null: 1; auto: token if the engine's dtype is not float32 or trainer.rollout_overlap is on, else
    null"""
    rollout_is_threshold: Annotated[float, Ge(1)] = 2.0
    """largest weight; larger ones are truncated to it"""
    rollout_rs: RolloutRS | None = None
    """exclude tokens by their ratio, or sequences by the product or the geometric mean of their
    tokens' ratios"""
    rollout_rs_threshold: Derived[Annotated[float, Ge(1)]] = NULL
    """largest ratio that is kept with rollout_rs; null: rollout_is_threshold. For geometric, 1.01
    is usual"""
    rollout_rs_threshold_lower: Derived[Share] = NULL
    """least ratio that is kept with rollout_rs; null: 1 / rollout_rs_threshold"""
    bypass_mode: bool = False
    """use rollout log-probs as old log-probs: the trainer does not score the rows before the
    update, and the mismatch is not measured"""


class AlgorithmConfig(Section):
    """Advantage estimation and KL in the reward."""

    adv_estimator: str = "grpo"
    """name in the estimator registry"""
    gamma: Share = 1.0
    """discount per token (gae, reinforce_plus_plus) or per turn (gigpo, hgpo)"""
    lam: Share = 1.0
    """lambda of GAE"""
    norm_adv_by_std_in_grpo: bool = True
    """also divide advantages by the standard deviation of the group's returns"""
    use_kl_in_reward: bool = False
    """subtract the KL to the reference policy from the reward"""
    kl_penalty: KLEstimator = "kl"
    """estimator of the KL in the reward"""
    kl_ctrl: KLControl = KLControl()
    """the coefficient of the KL in the reward"""
    row_weight: RowWeight = "row"
    """unit over which the seq-mean loss_agg_modes average: a row, or all rows of a trajectory"""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """correction of the mismatch between trainer and engine"""
    gigpo: GiGPOConfig = GiGPOConfig()
    """group-in-group credit"""
    graphgpo: GraphGPOConfig = GraphGPOConfig()
    """credit by the distance to success"""
    hgpo: HGPOConfig = HGPOConfig()
    """credit in a hierarchy of contexts"""
    gdpo_reward_keys: list[str] = []
    """gdpo: names of the rewards of custom_reward_function, each normalised separately; empty:
    those of reward_model.weights"""
    gdpo_reward_weights: list[float] = []
    """gdpo: weights of the rewards of gdpo_reward_keys, in the same order; empty: those of
    reward_model.weights, or 1 each if gdpo_reward_keys is set"""
    success_tolerance: Annotated[float, Gt(0), Le(100)] | None = None
    """largest fall of the success rate, in percentage points, that token prices may cause: a factor
    of all prices rises up to 1 while the average success rate is within this distance of its best,
    and falls otherwise; null: the factor is 1
    """
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """dynamic sampling"""
