"""Level groups: the price of a turn's tokens relative to the group's other successes.

A turn of a successful trajectory is compared with the turns of the group's other successful
trajectories in the same state (``uid`` and ``anchor_obs``). They all succeeded, so the tokens that
one of them saved were not needed. No alternative thought and no price per token is required::

    task 7, state "desk 3":  success with 5 tokens, success with 9 tokens, failure with 2 tokens
                             mean of the others 9 and 5, scale 2
                             price -2, +2, and 0 for the failure
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlvcr.shapes import Ids, PerTurn, TurnMask
from verl.algos import compute_group_stats, number_keys

MIN_SCALE = 1.0  # tokens; smaller differences between thoughts are chance


@dataclass(frozen=True, slots=True)
class TokenComparison:
    """Token counts of the successes with which S turns are compared, each [S] float64.

    ``mean`` is over the turns of *other* successful trajectories of the group in the same state.
    ``scale`` is the standard deviation over all its successful turns in that state, at least
    ``MIN_SCALE`` tokens. ``has_partner`` is false where nothing is compared.
    """

    mean: PerTurn
    scale: PerTurn
    has_partner: TurnMask

    def compute_prices(self, tokens: Tensor) -> Tensor:
        """Return ``(tokens - mean) / scale``, 0 without a partner.

        ``tokens`` is [S], or [S, K] for K thoughts of each turn. A positive price is for more
        tokens than the others needed.
        """
        columns = (-1,) + (1,) * (tokens.dim() - 1)
        prices = (tokens.double() - self.mean.view(columns)) / self.scale.view(columns)
        return torch.where(self.has_partner.view(columns), prices, 0.0)


def compare_with_successes(
    tokens: PerTurn, is_compared: TurnMask, states: Ids, trajectories: Ids
) -> TokenComparison:
    """Compare the thought tokens of S turns with those of other successes in the same state.

    ``tokens [S]`` are thought tokens. ``is_compared [S]`` marks the readable turns of successful
    trajectories. ``states`` identifies group and state, ``trajectories`` the trajectory, both of
    length S. A trajectory may be in one state several times. It is never compared with itself.
    """
    tokens = tokens.double()
    state = number_keys(states)
    member = number_keys(zip(states, trajectories, strict=True))
    counted = is_compared.double()

    def sum_by(keys: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(len(keys), dtype=torch.float64).index_add(0, keys, values)[keys]

    num_others = sum_by(state, counted) - sum_by(member, counted)
    sum_others = sum_by(state, counted * tokens) - sum_by(member, counted * tokens)
    mean = sum_others / num_others.clamp(min=1)
    scale = torch.full_like(tokens, MIN_SCALE)
    if is_compared.any():
        stats = compute_group_stats(tokens[is_compared], number_keys(state[is_compared]))
        # compute_group_stats divides by n - 1; with two members that would exceed their distance.
        population_std = stats.std * ((stats.count - 1).clamp(min=0) / stats.count).sqrt()
        scale[is_compared] = population_std.clamp(min=MIN_SCALE)
    return TokenComparison(mean, scale, is_compared & (num_others > 0))
