"""Pure maths of policy optimisation: advantage estimators, losses, KL estimators and registries.

The functions take and return tensors. They read no configuration object, do not use Ray and do not
log. Modules: ``algorithm_registry`` (dicts of names), ``groups`` (statistics over trajectories),
``advantages`` and ``step_advantages`` (estimators), ``losses``, ``token_losses``,
``policy_losses``, ``rollout_correction`` and ``controllers`` (coefficients that adapt).
"""

import importlib
import pkgutil

from verl.algos.advantages import *
from verl.algos.algorithm_registry import *
from verl.algos.controllers import *
from verl.algos.groups import *
from verl.algos.losses import *
from verl.algos.policy_losses import *
from verl.algos.rollout_correction import *
from verl.algos.step_advantages import *
from verl.algos.token_losses import *

__all__ = [
    "ADVANTAGES_ONLY",
    "ADV_ESTIMATORS",
    "LOSS_AGG_MODES",
    "OUTCOME_INPUTS",
    "POLICY_LOSSES",
    "TAKES_WEIGHTS",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "CorrectionRule",
    "CovarianceRange",
    "FixedKLController",
    "GroupStats",
    "KLController",
    "LossNeeds",
    "PolicyLossInputs",
    "PriceController",
    "TokenLosses",
    "TokenSelector",
    "agg_loss",
    "choose",
    "compute_correction_weights",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gigpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_graphgpo_outcome_advantage",
    "compute_group_stats",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_hgpo_outcome_advantage",
    "compute_loss_denominator",
    "compute_mismatch_metrics",
    "compute_opo_outcome_advantage",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_row_shares",
    "compute_value_loss",
    "factorize_keys",
    "find_covariance_range",
    "find_missing_inputs",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_loss_needs",
    "get_policy_loss_fn",
    "group_normalised_scores",
    "kl_penalty",
    "merge_rows_to_trajectories",
    "register_adv_est",
    "register_policy_loss",
    "register_token_loss",
    "spread",
]

# Importing a module registers its estimators and losses.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
