"""The distance to the reference policy as a part of the reward."""

import torch

from verl.algos import KLController, factorize, kl_penalty
from verl.protocol import DataProto
from verl.utils.torch_functional import last_selected


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty_type: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Set ``token_level_rewards = token_level_scores - beta * KL(old || ref)`` per sampled token,
    and adapt beta.

    Where an episode has several rows, each carries the whole return; so its last sampled token also
    pays for the KL of the episode's other rows, and the sum over a row does not depend on how the
    episode was cut.
    """
    mask = data.batch["response_mask"].float()
    per_token = kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty_type)
    divergence = torch.where(mask.bool(), per_token, 0.0)
    own = divergence.sum(-1)
    episode = factorize(data.non_tensor_batch["traj_uid"])
    whole = torch.zeros(len(data)).index_add(0, episode, own)[episode]
    rows, last = last_selected(mask)
    # What the episode's other rows diverged by is paid where this row ends.
    penalty = divergence.clone()
    penalty[rows, last] += (whole - own)[rows]
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - kl_ctrl.value * penalty
    mean_kl = (own / mask.sum(-1).clamp(min=1)).mean().item()
    measured = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": kl_ctrl.value}
    kl_ctrl.update(current_kl=mean_kl, n_steps=len(set(data.non_tensor_batch["traj_uid"])))
    return data, measured
