"""Credit for the thinking level of a turn in several forms, and its placement on tokens.

The forms are an advantage, a posterior (probability of each level given the action) and a factor of
the trajectory advantage. A bonus for rare levels is added. A thought has a token cost, or a price
relative to the group. S is the number of turns; level k is column ``k - 1``. ``chosen_columns`` are
the columns of the chosen levels, -1 for a turn that could not be parsed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, Num, Shaped
from torch import Tensor

from rlvcr.levels import LEVELS
from verl.algos import choose, compute_group_stats, factorize_keys
from verl.algos.shapes import Ids
from verl.names import NORM_MODES
from verl.records import ScoreResult

NUM_LEVELS = len(LEVELS)

# Types of tensors with their shapes (see verl.algos.shapes). The functions check the length of the
# second dimension, which is NUM_LEVELS.
PerLevel = Num[Tensor, "S _"]  # a number for every turn and level
LevelMask = Shaped[Tensor, "S _"]  # non-zero where a turn has a scored thought of the level
PerTurn = Num[Tensor, " S"]
TurnMask = Bool[Tensor, " S"]  # true for the turns that a computation uses
LevelColumn = Int[Tensor, " S"]  # column of a level, -1 for a turn without a level


def compute_action_score(entry: ScoreResult, score_name: str) -> float:
    """Return the score of an action after one thought.

    ``entropy`` is minus the mean entropy, ``logprob`` the mean log-prob, ``prob`` the geometric
    mean of the probabilities.
    """
    if score_name == "entropy":
        return -entry.entropy
    return entry.logprob if score_name == "logprob" else entry.geometric_prob


def compute_token_cost(tokens: Tensor, cost_coef: float, cost_max: float) -> Tensor:
    """Return the token cost of thoughts: ``cost_coef min(T, cost_max) / cost_max``, float64.

    T is the number of ``tokens`` of a thought. The cost is subtracted from the score of the action
    after the thought.

        cost_coef 0.4, cost_max 64: 32 tokens cost 0.2, 64 or more tokens cost 0.4
    """
    # The cost is limited, so that one very long thought does not determine the mean of its turn.
    return cost_coef * tokens.double().clamp(max=cost_max) / cost_max


class LevelUtilities(NamedTuple):
    """Utilities of the four thinking levels in every turn.

    ``utility`` is the score of the turn's action after the level's thought, minus the token cost of
    this thought. ``utility`` and ``token_cost`` are float64, and 0 where ``valid`` is false.
    ``chosen_index`` is the column of the chosen level, 0 for an unparsed turn. ``is_comparable`` is
    true for turns with valid scores of the chosen level and of at least one other level.
    """

    utility: PerLevel
    token_cost: PerLevel
    valid: LevelMask
    chosen_index: Tensor  # [S, 1], an index for ``Tensor.gather``
    is_comparable: TurnMask


def _compute_level_utilities(
    scores: PerLevel,
    valid: LevelMask,
    chosen_columns: LevelColumn,
    thought_tokens: PerLevel,
    cost_coef: float,
    cost_max: float,
) -> LevelUtilities:
    if scores.shape[-1] != NUM_LEVELS or not scores.shape == valid.shape == thought_tokens.shape:
        raise ValueError(
            "scores, valid and thought_tokens must be [S, 4], "
            f"got {scores.shape}, {valid.shape}, {thought_tokens.shape}"
        )
    is_usable = valid.bool() & scores.isfinite()
    token_cost = torch.where(
        is_usable, compute_token_cost(thought_tokens, cost_coef, cost_max), 0.0
    )
    utility = torch.where(is_usable, scores.double() - token_cost, 0.0)
    has_chosen_level = (chosen_columns >= 0) & (chosen_columns < NUM_LEVELS)
    chosen_index = torch.where(has_chosen_level, chosen_columns, 0).long().unsqueeze(-1)
    # A comparison needs a score at the chosen level and at one other level or more.
    is_comparable = (
        has_chosen_level & is_usable.gather(-1, chosen_index).squeeze(-1) & (is_usable.sum(-1) >= 2)
    )
    return LevelUtilities(utility, token_cost, is_usable, chosen_index, is_comparable)


def compute_thinking_advantage(
    scores: PerLevel,
    valid: LevelMask,
    chosen_columns: LevelColumn,
    thought_tokens: PerLevel,
    mode: str = "mean_norm",
    cost_coef: float = 0.0,
    cost_max: float = 64,
    std_floor: float = 0.1,
    alternatives: str = "all",
) -> tuple[PerTurn, PerTurn]:
    """Return the thinking advantage ``A_think [S]``, and the part of it due to token cost ``[S]``.

    A_think is the credit for the thinking level that the policy chose in a turn. ``scores [S, 4]``:
    score of the action after a thought of each level. ``valid [S, 4]``: such a thought exists.
    ``chosen_columns [S]``: 0..3, or -1 if unparsed. ``thought_tokens [S, 4]``: number of tokens T_k
    of each thought. The utility of level k is
    ``U_k = score_k - cost_coef min(T_k, cost_max) / cost_max``.

    With ``mean_norm``, A_think is ``U_l - mean U``: utility of the chosen level l minus the mean
    over the valid levels. ``mean_std_norm`` also divides by their (population) standard deviation,
    at least ``std_floor``. With ``alternatives="one"`` only one other level j was drawn. Then
    ``3/4 (U_l - U_j)``, which has the same expectation, replaces ``U_l - mean U``.

    Both results are 0 for unparsed turns, and unless the chosen level and another one are valid.

        scores [-1.0, -0.5, -0.3, -0.2], no cost, chosen column 2: A_think = -0.3 - (-0.5) = 0.2
    """
    choose(mode, NORM_MODES, "mode (algorithm.rlvcr.mode)")
    utilities = _compute_level_utilities(
        scores, valid, chosen_columns, thought_tokens, cost_coef, cost_max
    )
    num_valid = utilities.valid.sum(-1, keepdim=True).clamp(min=1)
    # Subtract the utility of the chosen level first, so that equal utilities cancel exactly.
    chosen_utility = utilities.utility.gather(-1, utilities.chosen_index)
    deviation = torch.where(utilities.valid, utilities.utility - chosen_utility, 0.0)
    mean = deviation.sum(-1, keepdim=True) / num_valid
    advantage = -mean.squeeze(-1)
    mean_cost = utilities.token_cost.sum(-1, keepdim=True) / num_valid
    price_share = (mean_cost - utilities.token_cost.gather(-1, utilities.chosen_index)).squeeze(-1)
    if alternatives == "one":
        # Two levels are valid: l (chosen) and j (drawn), so m = 2. U_l minus their mean is half of
        # U_l - U_j, which the factor m / (m - 1) corrects. The expectation of 3/4 (U_l - U_j) over
        # j is U_l minus the mean of all four levels.
        factor = 0.75 * num_valid.squeeze(-1) / (num_valid.squeeze(-1) - 1).clamp(min=1)
        advantage = advantage * factor
        price_share = price_share * factor
    if mode == "mean_std_norm":
        squares = torch.where(utilities.valid, (deviation - mean) ** 2, 0.0)
        variance = squares.sum(-1) / num_valid.squeeze(-1)
        divisor = variance.sqrt().clamp(min=std_floor)
        divisor = torch.where(divisor > 0, divisor, 1.0)
        advantage = advantage / divisor
        price_share = price_share / divisor
    return (
        torch.where(utilities.is_comparable, advantage, 0.0).float(),
        torch.where(utilities.is_comparable, price_share, 0.0).float(),
    )


def compute_reweight_factors(
    scores: PerLevel,
    valid: LevelMask,
    chosen_columns: LevelColumn,
    thought_tokens: PerLevel,
    cost_coef: float = 0.0,
    cost_max: float = 64,
    spread_floor: float = 0.02,
) -> PerTurn:
    """Return the factors ``g [S]`` by which ``combine: reweight`` multiplies trajectory advantages.

    The factor of level k is ``g_k = exp(2 c_k) / mean_j exp(2 c_j)`` over the valid levels (those
    with a scored thought). The result has that of the chosen level. ``c_k`` is the scaled utility
    ``(U_k - min U) / max(max U - min U, spread_floor)``. The utility ``U_k`` is the score of level
    k minus the token cost of its thought.

    ``spread_floor``, positive and in units of the score, limits the effect of rounding noise
    between nearly equal scores. The other arguments are those of ``compute_thinking_advantage``.
    Turns without thinking advantage, and turns with equal utilities, have g = 1.

        U = [0, 1], two valid levels, chosen column 1: g = e^2 / ((1 + e^2) / 2) = 1.76
    """
    utilities = _compute_level_utilities(
        scores, valid, chosen_columns, thought_tokens, cost_coef, cost_max
    )
    min_utility = torch.where(utilities.valid, utilities.utility, torch.inf).amin(-1, keepdim=True)
    max_utility = torch.where(utilities.valid, utilities.utility, -torch.inf).amax(-1, keepdim=True)
    # Without any valid score the difference is -inf, and clamp returns ``spread_floor``.
    utility_range = (max_utility - min_utility).clamp(min=spread_floor)
    scaled_utility = torch.where(
        utilities.valid, (utilities.utility - min_utility) / utility_range, 0.0
    )
    # Scaled utilities are in [0, 1], so weights differ at most by the factor e^2 = 7.4.
    weight = torch.where(utilities.valid, (2 * scaled_utility).exp(), 0.0)
    mean = weight.sum(-1, keepdim=True) / utilities.valid.sum(-1, keepdim=True).clamp(min=1)
    relative_weight = weight / torch.where(mean > 0, mean, 1.0)
    factor = relative_weight.gather(-1, utilities.chosen_index).squeeze(-1)
    return torch.where(utilities.is_comparable, factor, 1.0).float()


def broadcast_turn_values(
    shape: tuple[int, int],
    row_indices: Sequence[int],
    spans: Sequence[Sequence[tuple[int, int]]],
    values: Sequence[float] | Tensor,
) -> Tensor:
    """Return a float32 tensor of ``shape`` [B, R] with the value of each turn on its spans.

    ``row_indices``, ``spans`` (half-open index ranges in a response of R tokens) and ``values``
    have one entry per turn. Other positions are 0. Raises ``ValueError`` for a span outside its
    response or an overlap with another span.

        shape (1, 5), one turn with the spans (1, 2) and (3, 5) and the value 2: [[0, 2, 0, 2, 2]]
    """
    response_length = shape[1]
    turn_values = torch.as_tensor(values, dtype=torch.float32)
    if len(turn_values) != len(spans):
        raise ValueError(f"got {len(turn_values)} values for the spans of {len(spans)} turns")
    # One line per span: row, start, end, turn.
    placed_spans = np.array(
        [
            (row, start, end, turn)
            for turn, (row, turn_spans) in enumerate(zip(row_indices, spans, strict=True))
            for start, end in turn_spans
        ],
        dtype=np.int64,
    ).reshape(-1, 4)
    rows, starts, ends, turns = placed_spans.T
    is_outside = (starts < 0) | (starts > ends) | (ends > response_length)
    if is_outside.any():
        _, start, end, _ = placed_spans[is_outside][0]
        raise ValueError(
            f"span [{start}, {end}) is not inside a response of {response_length} tokens"
        )
    span_lengths = ends - starts
    first_positions = rows * response_length + starts
    # Positions of all tokens of the spans in the flattened result.
    positions = np.repeat(
        first_positions - span_lengths.cumsum() + span_lengths, span_lengths
    ) + np.arange(span_lengths.sum())
    sorted_positions = np.sort(positions)
    repeated_positions = sorted_positions[1:][sorted_positions[1:] == sorted_positions[:-1]]
    if len(repeated_positions):
        row, column = divmod(int(repeated_positions[0]), response_length)
        raise ValueError(f"two spans contain token {column} of the response of row {row}")
    flat_values = torch.zeros(shape[0] * response_length)
    flat_values[torch.from_numpy(positions)] = turn_values[
        torch.from_numpy(np.repeat(turns, span_lengths))
    ]
    return flat_values.reshape(shape)


def compute_level_count_bonus(levels: LevelColumn, group_index: Ids) -> PerTurn:
    """Return the bonus ``[S]`` for rare thinking levels: ``-log f_l`` minus its group mean.

    f_l is the frequency of the turn's level in its group. ``levels [S]`` is 0..3 (-1: unparsed, not
    counted, bonus 0). ``group_index [S]`` identifies the group of each turn. Bonuses of a group sum
    to 0, so only rare levels gain.

        levels 0, 0, 0, 1 in one group: -log f = 0.29, 0.29, 0.29, 1.39, with mean 0.56
        bonus -0.27, -0.27, -0.27, 0.82
    """
    all_group_ids = factorize_keys(group_index).to(levels.device)
    has_level = levels >= 0
    bonus = torch.zeros(len(levels), dtype=torch.float64, device=levels.device)
    if not has_level.any():
        return bonus.float()
    group_ids = all_group_ids[has_level]
    group_level_ids = group_ids * NUM_LEVELS + levels[has_level]  # one number per group and level
    ones = torch.ones_like(group_ids, dtype=torch.float64)
    zero_counts = torch.zeros(int(group_ids.max()) + 1, dtype=torch.float64, device=levels.device)
    group_sizes = zero_counts.index_add(0, group_ids, ones)[group_ids]
    level_counts = torch.bincount(group_level_ids)[group_level_ids].double()
    # f is the frequency of a level in its group. Up to a constant, -log f is the derivative of the
    # entropy of the levels with respect to f, so the bonus increases the entropy.
    neg_log_frequency = -(level_counts / group_sizes).log()
    bonus[has_level] = neg_log_frequency - compute_group_stats(neg_log_frequency, group_ids).mean
    return bonus.float()


def compute_level_posterior(
    level_log_probs: PerLevel, action_log_probs: PerLevel, valid: LevelMask
) -> PerLevel:
    """Return ``w [S, 4]`` float64, the probability of each thinking level given the turn's action.

    A turn has the same distribution if one thought z_k per level is drawn first and the level l
    afterwards. Given the thoughts and the action a, l = k has the probability::

        w_k = pi(k) p(a | k, z_k) / sum_j pi(j) p(a | j, z_j)

    With an advantage A_k per level, the expectation of the level's gradient ``A_l grad log pi(l)``
    is then ``sum_k w_k A_k grad log pi(k)`` (docs/rlvcr.md).

    ``level_log_probs [S, 4]`` are the log-probs of the four digits, ``action_log_probs [S, 4]`` the
    sums of the log-probs of the action's tokens after each thought. A level without a ``valid``
    thought gets 0: after a thought that was cut or is unreadable, the turn would have no action. A
    turn without a valid level gets four zeros.

        pi = (1/2, 1/2, 0, 0), p(a | c) = (0.2, 0.6, -, -): w = (1/4, 3/4, 0, 0)
    """
    joint_log_probs = torch.where(
        valid.bool(), level_log_probs.double() + action_log_probs.double(), -torch.inf
    )
    has_level = valid.bool().any(-1, keepdim=True)
    return torch.where(has_level, joint_log_probs, 0.0).softmax(-1) * has_level


def subtract_expected_token_cost(
    token_costs: PerLevel, level_log_probs: PerLevel, valid: LevelMask
) -> PerLevel:
    """Return ``token_costs [S, 4]`` minus their mean over the policy's distribution of levels.

    ``token_costs`` are the token costs of the thoughts of all levels; only ``valid`` levels count.
    The mean does not depend on the sampled level, so the expected gradient of the level digit stays
    the same. But the mean contains ``pi(l)`` times the cost of the sampled thought itself, where
    ``pi(l)`` is the probability of its level. The expected gradient of the cost on the tokens of
    this thought is therefore multiplied by ``1 - pi(l)``.

    >>> token_costs = torch.tensor([[0.0, 0.25, 0.5, 0.25]])  # equally likely levels: mean 0.25
    >>> subtract_expected_token_cost(token_costs, torch.zeros(1, 4), torch.ones(1, 4))
    tensor([[-0.2500,  0.0000,  0.2500,  0.0000]], dtype=torch.float64)
    """
    level_probs = compute_level_posterior(level_log_probs, torch.zeros_like(token_costs), valid)
    return token_costs - (level_probs * token_costs).sum(-1, keepdim=True)


# ---- prices relative to the group ----------------------------------------------------------------
#
# A turn of a successful trajectory is compared with the turns of the group's other successful
# trajectories in the same state (equal uid and anchor_obs). All of them succeeded, so the
# additional tokens of the longer thoughts were not needed. The price of a thought is its number of
# tokens minus the mean of the others, divided by the standard deviation (scale). It is subtracted
# from the advantage of the thought, so a negative price is a reward. The method (the estimator
# level_groups) needs no alternative thoughts and no price per token:
#
#     task 7, state "desk 3"
#     success, 5 tokens:  mean of the other trajectories 9, scale 2, price (5 - 9) / 2 = -2
#     success, 9 tokens:  mean of the other trajectories 5, scale 2, price (9 - 5) / 2 = +2
#     no success, 2 tokens:  not compared, price 0

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

        ``thought_tokens`` is [S], or [S, K] for K thoughts of each turn. The price is 0 if no other
        successful trajectory reached the state.
        """
        broadcast_shape = (-1,) + (1,) * (thought_tokens.dim() - 1)
        prices = (thought_tokens.double() - self.mean.view(broadcast_shape)) / self.scale.view(
            broadcast_shape
        )
        return torch.where(self.has_other_success.view(broadcast_shape), prices, 0.0)


def compute_thought_length_statistics(
    tokens: PerTurn, is_compared: TurnMask, states: Ids, trajectories: Ids
) -> ThoughtLengthStatistics:
    """Compute mean and scale of the thought lengths with which each of S turns is compared.

    The mean is over turns of the group's *other* successful trajectories in the same state. The
    scale is the population standard deviation over turns of *all* successful trajectories of the
    group in this state, at least ``MIN_SCALE``. It is ``MIN_SCALE`` for turns not compared.

    ``tokens [S]`` are the numbers of thought tokens of the turns. ``is_compared [S]`` marks the
    parsed turns of successful trajectories. ``states`` identifies the group and state of each turn,
    ``trajectories`` its trajectory. A trajectory may reach one state several times, and is never
    compared with itself.

    >>> tokens, is_success = torch.tensor([5, 9]), torch.tensor([True, True])
    >>> statistics = compute_thought_length_statistics(tokens, is_success, ["s", "s"], ["a", "b"])
    >>> torch.stack([statistics.mean, statistics.scale]).float()
    tensor([[9., 5.],
            [2., 2.]])
    """
    tokens = tokens.double()
    state_ids = factorize_keys(states)
    trajectory_state_ids = factorize_keys(zip(states, trajectories, strict=True))
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
        stats = compute_group_stats(tokens[is_compared], factorize_keys(state_ids[is_compared]))
        # Convert the std of compute_group_stats (divisor n - 1) to the population std (divisor n).
        population_std = stats.std * ((stats.count - 1).clamp(min=0) / stats.count).sqrt()
        scale[is_compared] = population_std.clamp(min=MIN_SCALE)
    return ThoughtLengthStatistics(mean, scale, is_compared & (num_other_turns > 0))
