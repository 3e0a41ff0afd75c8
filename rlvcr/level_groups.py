"""Level groups: price thoughts by their length relative to other successful trajectories.

A turn of a successful trajectory is compared with the turns of the group's other successful
trajectories in the same state (equal ``uid`` and ``anchor_obs``). All of them succeeded, so the
additional tokens of the longer thoughts were not needed. The price of a thought is its number of
tokens minus the mean of the others, divided by the standard deviation (scale). It is subtracted
from the advantage of the thought, so a negative price is a reward. The method needs no alternative
thoughts and no price per token::

    task 7, state "desk 3"
    success, 5 tokens:  mean of the other trajectories 9, scale 2, price (5 - 9) / 2 = -2
    success, 9 tokens:  mean of the other trajectories 5, scale 2, price (9 - 5) / 2 = +2
    no success, 2 tokens:  not compared, price 0
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlvcr.shapes import Ids, PerTurn, TurnMask
from verl.algos import compute_group_stats, number_distinct_keys

MIN_SCALE = 1.0  # tokens; lower bound of ``scale``, so that small differences have small prices


@dataclass(frozen=True, slots=True)
class ThoughtLengthStatistics:
    """Thought lengths (tokens) with which the thoughts of S turns are compared, each field [S].

    ``mean`` is over the turns of *other* successful trajectories of the group in the same state.
    ``scale`` is the standard deviation over the turns of all successful trajectories of the group
    in that state, at least ``MIN_SCALE`` tokens. ``has_other_success`` is true for a turn whose
    state another successful trajectory of the group reached too.
    """

    mean: PerTurn
    scale: PerTurn
    has_other_success: TurnMask

    def compute_group_prices(self, thought_tokens: Tensor) -> Tensor:
        """Return the price ``(tokens - mean) / scale`` of each thought, which lowers its advantage.

        ``thought_tokens`` is [S], or [S, K] for K thoughts of each turn. ``mean`` is the mean
        thought length over the group's other successful trajectories in the same state. ``scale``
        is the standard deviation over all successful trajectories of the group in it. A thought
        longer than the mean has a positive price. The price is 0 if no other successful trajectory
        reached the state.
        """
        columns = (-1,) + (1,) * (thought_tokens.dim() - 1)
        prices = (thought_tokens.double() - self.mean.view(columns)) / self.scale.view(columns)
        return torch.where(self.has_other_success.view(columns), prices, 0.0)


def compute_thought_length_statistics(
    tokens: PerTurn, is_compared: TurnMask, states: Ids, trajectories: Ids
) -> ThoughtLengthStatistics:
    """Compute mean and scale of the thought lengths with which each of S turns is compared.

    A turn is compared with turns of the group's other successful trajectories in the same state.
    ``tokens [S]`` are the numbers of thought tokens of the turns. ``is_compared [S]`` marks the
    parsed turns of successful trajectories. ``states`` identifies the group and state of each turn,
    ``trajectories`` its trajectory. A trajectory may reach one state several times, and is never
    compared with itself.
    """
    tokens = tokens.double()
    state_ids = number_distinct_keys(states)
    trajectory_state_ids = number_distinct_keys(zip(states, trajectories, strict=True))
    comparison_weights = is_compared.double()

    def sum_by_key(keys: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(len(keys), dtype=torch.float64).index_add(0, keys, values)[keys]

    num_other_turns = sum_by_key(state_ids, comparison_weights) - sum_by_key(
        trajectory_state_ids, comparison_weights
    )
    other_token_sum = sum_by_key(state_ids, comparison_weights * tokens) - sum_by_key(
        trajectory_state_ids, comparison_weights * tokens
    )
    mean = other_token_sum / num_other_turns.clamp(min=1)
    scale = torch.full_like(tokens, MIN_SCALE)
    if is_compared.any():
        stats = compute_group_stats(
            tokens[is_compared], number_distinct_keys(state_ids[is_compared])
        )
        # Convert the std of compute_group_stats (divisor n - 1) to the population std (divisor n).
        population_std = stats.std * ((stats.count - 1).clamp(min=0) / stats.count).sqrt()
        scale[is_compared] = population_std.clamp(min=MIN_SCALE)
    return ThoughtLengthStatistics(mean, scale, is_compared & (num_other_turns > 0))
