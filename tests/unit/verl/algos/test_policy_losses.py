"""Policy losses other than PPO's, against values and derivatives computed by hand."""

import math

import pytest
import torch

from tests.helpers.refusals import mentions
from verl.algos import (
    CovarianceRange,
    find_covariance_range,
    get_loss_needs,
    get_policy_loss_fn,
)
from verl.names import POLICY_LOSSES


def loss_and_gradient(name, old, new, advantages, mask=None, **kwargs):
    """Return the four results and the gradient with respect to the new log-probs."""
    log_prob = torch.tensor(new, requires_grad=True)
    mask = torch.ones(log_prob.shape) if mask is None else torch.tensor(mask)
    results = get_policy_loss_fn(name)(
        torch.tensor(old), log_prob, torch.tensor(advantages), mask, **kwargs
    )
    results[0].backward()
    assert log_prob.grad is not None
    return [result.item() for result in results], log_prob.grad.flatten().tolist()


def loss_of_ratios(name, ratios, advantages, **kwargs):
    """Evaluate one row whose old log-probs are -1."""
    new = [[-1 + math.log(ratio) for ratio in ratios]]
    return loss_and_gradient(name, [[-1.0] * len(ratios)], new, [advantages], **kwargs)


def loss_of_probabilities(name, pairs, advantages, **kwargs):
    """Evaluate one row of (old, new) probabilities."""
    old = [[math.log(pair[0]) for pair in pairs]]
    new = [[math.log(pair[1]) for pair in pairs]]
    return loss_and_gradient(name, old, new, [advantages], **kwargs)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_gspo_clips_the_ratio_of_the_row():
    # d = 0.2 and -0.1: s = exp(0.05) = 1.0513, above 1.04
    ratios = [math.exp(0.2), math.exp(-0.1)]
    results, gradient = loss_of_ratios("gspo", ratios, [2.0, -1.0], cliprange=0.04)
    s = math.exp(0.05)
    assert results == pytest.approx([(-2 * 1.04 + s) / 2, 0.5, -0.05, 0.0], rel=1e-5)
    assert gradient == pytest.approx([0.0, s / 2], rel=1e-5)


def test_gspo_gradient_equals_that_of_the_sequence_form():
    """With one advantage the loss is -s A, whose derivative is -s A / (number of tokens) at every
    token."""
    ratios = [math.exp(0.2), math.exp(-0.1), 1.0, math.exp(0.3)]
    options = {"cliprange": 0.5, "loss_agg_mode": "seq-mean-token-mean"}
    results, gradient = loss_of_ratios("gspo", ratios, [2.0] * 4, **options)
    s = math.exp(0.1)
    assert results[0] == pytest.approx(-2 * s, rel=1e-5)
    assert gradient == pytest.approx([-2 * s / 4] * 4, rel=1e-5)


def test_gspo_rows_have_separate_ratios_without_unsampled_tokens():
    old = [[-1.0, -1.0], [-1.0, 5.0]]
    new = [[-0.9, -0.7], [-1.2, 9.0]]
    mask = [[1, 1], [1, 0]]
    results, gradient = loss_and_gradient(
        "gspo", old, new, [[1.0, 1.0], [1.0, 7.0]], mask, cliprange=0.9
    )
    assert results[0] == pytest.approx(-(2 * math.exp(0.2) + math.exp(-0.2)) / 3, rel=1e-5)
    assert gradient[3] == 0.0


def test_cispo_weights_the_log_prob_by_the_clipped_ratio():
    results, gradient = loss_of_ratios("cispo", [2.0, 0.5, 1.1], [1.0, -1.0, 3.0], cliprange=0.2)
    logs = [-1 + math.log(r) for r in (2.0, 0.5, 1.1)]
    expected = (-1.2 * logs[0] + 0.8 * logs[1] - 1.1 * 3 * logs[2]) / 3
    assert results[:2] == pytest.approx([expected, 2 / 3], rel=1e-5)
    assert gradient == pytest.approx([-1.2 / 3, 0.8 / 3, -3.3 / 3], rel=1e-5)


def test_cispo_has_two_bounds():
    bounds = {"cliprange": 0.5, "cliprange_low": 0.1, "cliprange_high": 0.3}
    _, gradient = loss_of_ratios("cispo", [2.0, 0.5], [1.0, 1.0], **bounds)
    assert gradient == pytest.approx([-1.3 / 2, -0.9 / 2], rel=1e-5)


def test_sapo_gates_by_a_sigmoid():
    results, gradient = loss_of_ratios("sapo", [2.0, 0.5], [1.0, -1.0], tau_pos=1.0, tau_neg=2.0)
    up = sigmoid(1.0)
    down = sigmoid(-1.0)
    assert results[0] == pytest.approx((-4 * up + 2 * down) / 2, rel=1e-5)
    assert results[1] == results[3] == 0.0
    # d/dr of 4/tau sigmoid(tau (r - 1)) is 4 s (1 - s), and dr/d log p is r
    by_hand = [-4 * up * (1 - up) * 2 / 2, 4 * down * (1 - down) * 0.5 / 2]
    assert gradient == pytest.approx(by_hand, rel=1e-5)


def test_sapo_at_the_old_policy_has_the_gradient_of_the_ratio():
    _, gradient = loss_of_ratios("sapo", [1.0, 1.0], [3.0, -2.0])
    assert gradient == pytest.approx([-1.5, 1.0], rel=1e-5)
    assert loss_of_ratios("sapo", [2.0], [1.0])[0][0] == pytest.approx(-4 * sigmoid(1.0), rel=1e-5)
    assert loss_of_ratios("sapo", [0.5], [-1.0])[0][0] == pytest.approx(
        4 / 1.05 * sigmoid(-0.525), rel=1e-5
    )


@pytest.mark.parametrize("wrong", [{"tau_pos": 0.0}, {"tau_neg": 0.0}, {"tau_neg": -1.0}])
def test_sapo_refuses_tau_that_is_not_positive(wrong):
    with pytest.raises(ValueError, check=mentions("tau_pos", "tau_neg")):
        loss_of_ratios("sapo", [1.0], [1.0], **wrong)


def test_sapo_accepts_any_positive_tau():
    results, _ = loss_of_ratios("sapo", [0.5], [-1.0], tau_pos=0.5, tau_neg=0.5)
    assert results[0] == pytest.approx(8 * sigmoid(-0.25), rel=1e-5)


@pytest.mark.parametrize("name", ["geo_mean", "gmpo"])
def test_geo_mean_limits_log_ratios_and_averages_them(name):
    options = {"cliprange": 0.4, "loss_agg_mode": "seq-mean-token-mean"}
    results, gradient = loss_of_ratios(name, [math.exp(0.5), math.exp(-0.1)], [1.0, 1.0], **options)
    g = math.exp((0.4 - 0.1) / 2)
    assert results[:2] == pytest.approx([-g, 0.5], rel=1e-5)
    assert gradient == pytest.approx([0.0, -g / 2], rel=1e-5)
    # A change against the advantage is not limited: ratio below the range, A > 0.
    results, gradient = loss_of_ratios(name, [math.exp(-0.9), 1.0], [1.0, 1.0], **options)
    assert results[:2] == pytest.approx([-math.exp(-0.45), 0.0], rel=1e-5)
    results, gradient = loss_of_ratios(
        name, [math.exp(-0.9), math.exp(0.9)], [-1.0, -1.0], **options
    )
    g = math.exp((-0.4 + 0.9) / 2)
    assert results[:2] == pytest.approx([g, 0.5], rel=1e-5)
    assert gradient == pytest.approx([0.0, g / 2], rel=1e-5)


def test_geo_mean_does_not_limit_tokens_without_advantage():
    results, _ = loss_of_ratios(
        "geo_mean", [math.exp(0.9), math.exp(0.1)], [0.0, 1.0], cliprange=0.4
    )
    assert results[:2] == pytest.approx([-math.exp(0.5) / 2, 0.0], rel=1e-5)
    results, _ = loss_of_ratios(
        "geo_mean", [math.exp(-0.9), math.exp(0.1)], [0.0, 1.0], cliprange=0.4
    )
    assert results[:2] == pytest.approx([-math.exp(-0.4) / 2, 0.0], rel=1e-5)


def test_geo_mean_limits_nothing_within_its_range():
    results, _ = loss_of_ratios("geo_mean", [math.exp(0.1)], [-1.0], cliprange=0.4)
    assert results[:2] == pytest.approx([math.exp(0.1), 0.0], rel=1e-5)
    # The bounds are inside the range.
    for new, advantage in ((-0.5, 1.0), (-1.5, -1.0)):
        results, gradient = loss_and_gradient(
            "geo_mean", [[-1.0]], [[new]], [[advantage]], cliprange=0.5
        )
        expected = -advantage * math.exp(new + 1)
        assert results[:2] == pytest.approx([expected, 0.0], rel=1e-5)
        assert gradient == pytest.approx([expected], rel=1e-5)


def test_gpg_is_reinforce():
    results, gradient = loss_of_ratios("gpg", [2.0, 0.5], [3.0, -1.0])
    expected = (-3 * (-1 + math.log(2)) + (-1 + math.log(0.5))) / 2
    assert results == pytest.approx([expected, 0.0, 0.0, 0.0], rel=1e-5, abs=1e-7)
    assert gradient == pytest.approx([-1.5, 0.5])


@pytest.mark.parametrize("name", ["dppo", "dppo_tv"])
def test_dppo_masks_tokens_whose_probability_changed_too_much(name):
    pairs = [(0.1, 0.5), (0.5, 0.6), (0.01, 0.05), (0.5, 0.2), (0.01, 0.0001), (0.1, 0.5)]
    advantages = [1.0, 1.0, 1.0, -1.0, -1.0, -1.0]
    results, gradient = loss_of_probabilities(
        name, pairs, advantages, cliprange=0.2, clip_ratio_c=3.0
    )
    losses = [0.0, -1.2, -3.0, 0.0, 0.01, 3.0]
    assert results[0] == pytest.approx(sum(losses) / 6, rel=1e-4)
    assert results[1] == pytest.approx(2 / 6) and results[3] == pytest.approx(2 / 6)
    assert gradient == pytest.approx([loss / 6 for loss in losses], rel=1e-4)


def test_dppo_has_a_bound_for_each_direction():
    pairs = [(0.3, 0.4), (0.3, 0.2)]
    bounds = {"cliprange_low": 0.05, "cliprange_high": 0.15}
    _, gradient = loss_of_probabilities("dppo_tv", pairs, [1.0, -1.0], **bounds)
    assert gradient == pytest.approx([-4 / 3 / 2, 0.0], rel=1e-4)


def test_dppo_trains_on_a_token_that_did_not_change():
    results, gradient = loss_of_ratios("dppo_tv", [1.0, 1.0], [1.0, -1.0], cliprange=0.0)
    assert results[1] == 0.0 and gradient == [-0.5, 0.5]


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_masks_no_token_without_advantage(name):
    pairs = [(0.1, 0.5), (0.5, 0.1), (0.1, 0.5)]
    results, gradient = loss_of_probabilities(name, pairs, [0.0, 0.0, 0.5], cliprange=0.2)
    assert results[1] == pytest.approx(1 / 3) and gradient == [0.0, 0.0, 0.0]
    # an advantage of 0.5 does not count as negative
    results, gradient = loss_of_probabilities(name, [(0.5, 0.1)], [0.5], cliprange=0.2)
    assert results[1] == 0.0 and gradient == pytest.approx([-0.5 * 0.2], rel=1e-5)


def test_ratio_at_the_ceiling_is_not_above_it():
    results, _ = loss_of_ratios("dppo_tv", [1.0], [1.0], clip_ratio_c=1.0)
    assert results == [-1.0, 0.0, 0.0, 0.0]


def test_ceiling_fraction_is_a_share_of_all_tokens():
    results, _ = loss_of_ratios("dppo_tv", [2.0, 1.0], [-1.0, 1.0], clip_ratio_c=1.5, num_tokens=8)
    assert results[3] == pytest.approx(1 / 8)


def test_dppo_kl_at_exactly_its_bound_is_within():
    # A token of probability 1 whose new probability is 1/e: 1 ln(1 / (1/e)) = 1.
    options = {"cliprange_low": 1.0, "cliprange_high": 0.0}
    results, gradient = loss_and_gradient("dppo_kl", [[0.0]], [[-1.0]], [[-1.0]], **options)
    assert results[1] == 0.0 and gradient == pytest.approx([math.exp(-1)])
    # A probability of e^-800, which rounds to 0, that rose to e^-700: 0.
    results, gradient = loss_and_gradient("dppo_kl", [[-800.0]], [[-700.0]], [[1.0]], **options)
    assert results[1] == 0.0 and gradient == pytest.approx([-3.0])


def test_dppo_kl_is_the_divergence_of_the_token_from_the_rest():
    # 0.1 ln(0.1 / 0.5) + 0.9 ln(0.9 / 0.5) = 0.3681
    for threshold, masked in ((0.36, True), (0.37, False)):
        results, gradient = loss_of_probabilities(
            "dppo_kl", [(0.1, 0.5)], [2.0], cliprange=threshold
        )
        assert gradient == pytest.approx([0.0 if masked else -6.0], rel=1e-5)
        assert results[1] == masked
    # 0.5 ln(0.5 / 0.1) + 0.5 ln(0.5 / 0.9) = 0.5108
    for threshold, masked in ((0.51, True), (0.52, False)):
        bounds = {"cliprange_low": threshold, "cliprange_high": 0.0}
        _, gradient = loss_of_probabilities("dppo_kl", [(0.5, 0.1)], [-2.0], **bounds)
        assert gradient == pytest.approx([0.0 if masked else 0.4], rel=1e-5)
    # It moved against its advantage: nothing is masked.
    _, gradient = loss_of_probabilities("dppo_kl", [(0.5, 0.1)], [2.0], cliprange=0.1)
    assert gradient == pytest.approx([-0.4], rel=1e-5)


def test_dppo_kl_of_a_certain_token_is_finite():
    results, gradient = loss_and_gradient("dppo_kl", [[0.0, -1.0]], [[-1.0, 0.0]], [[1.0, 1.0]])
    assert all(map(math.isfinite, [*results, *gradient]))


# ---------------------------------------------------------------- covariance

ADVANTAGES = torch.tensor([3.0, 0.0, -1.0, -2.0])
OLD = torch.tensor([-1.0, -2.0, -2.0, -3.0])  # covariances 3, 0, 0, 2


def select_tokens_of(*settings):
    covariance_range = find_covariance_range(OLD, ADVANTAGES, *settings)
    return (
        covariance_range.select_tokens(OLD[None], ADVANTAGES[None], torch.ones(1, 4))
        .int()
        .tolist()[0]
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((0.25,), [1, 0, 0, 0]),
        ((0.5,), [1, 0, 0, 1]),
        ((1.0,), [1, 0, 0, 1]),  # a covariance of 0 lowers no entropy
        ((0.001,), [1, 0, 0, 0]),  # at least one
        ((0.0,), [0, 0, 0, 0]),
        ((0.25, 1.0, 2.5), [0, 0, 0, 1]),
        ((0.5, 2.0, 3.0), [1, 0, 0, 1]),
        ((0.5, 2.1, 2.9), [0, 0, 0, 0]),
        ((0.25, 2.0, 3.0), [1, 0, 0, 0]),
    ],
)
def test_largest_covariances_in_the_range_are_selected(settings, expected):
    assert select_tokens_of(*settings) == expected


def test_covariance_range_uses_the_means_of_the_whole_batch():
    covariance_range = find_covariance_range(OLD, ADVANTAGES, 0.5)
    assert covariance_range == CovarianceRange(0.0, -2.0, 2.0, math.inf)
    mask = torch.tensor([[1, 0], [1, 1]])
    part = covariance_range.select_tokens(OLD.view(2, 2), ADVANTAGES.view(2, 2), mask)
    assert part.tolist() == [[True, False], [False, True]]
    unsampled = covariance_range.select_tokens(OLD.view(2, 2), ADVANTAGES.view(2, 2), 1 - mask)
    assert not unsampled.any()


def test_covariances_are_taken_from_the_mean():
    covariance_range = find_covariance_range(OLD, ADVANTAGES + 10, 0.5)
    assert covariance_range == CovarianceRange(10.0, -2.0, 2.0, math.inf)
    selected = covariance_range.select_tokens(OLD[None], ADVANTAGES[None] + 10, torch.ones(1, 4))
    assert selected.int().tolist() == [[1, 0, 0, 1]]


def test_equal_covariances_are_selected_together():
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    old = torch.tensor([-1.0, -1.0, -2.0, -3.0])
    covariance_range = find_covariance_range(old, advantages, 0.25)  # 0.75, 0.75, 0.25, 1.25
    assert covariance_range.lowest == 1.25
    covariance_range = find_covariance_range(old, advantages, 0.5)
    selected = covariance_range.select_tokens(old[None], advantages[None], torch.ones(1, 4))
    assert selected.int().tolist() == [[1, 1, 0, 1]]


def test_nothing_is_selected_without_advantages_or_tokens():
    for old, advantages in ((OLD, torch.zeros(4)), (OLD[:0], ADVANTAGES[:0])):
        covariance_range = find_covariance_range(old, advantages, 0.5)
        assert not covariance_range.select_tokens(
            OLD[None], ADVANTAGES[None], torch.ones(1, 4)
        ).any()


SELECTED = torch.tensor([[True, False, False]])


def test_clip_cov_removes_selected_tokens_from_the_ppo_loss():
    ratios = [1.1, 1.1, 2.0]
    results, gradient = loss_of_ratios("clip_cov", ratios, [1.0, 1.0, 1.0], selected=SELECTED)
    assert results[:2] == pytest.approx([-(1.1 + 1.2) / 3, 2 / 3], rel=1e-5)
    assert gradient == pytest.approx([0.0, -1.1 / 3, 0.0], rel=1e-5)


def test_kl_cov_penalises_selected_tokens_and_clips_none():
    results, gradient = loss_of_ratios(
        "kl_cov", [1.1, 1.1, 2.0], [1.0, 1.0, 1.0], selected=SELECTED, ppo_kl_coef=0.5
    )
    penalty = 0.5 * math.log(1.1)
    assert results[0] == pytest.approx((-4.2 + penalty) / 3, rel=1e-5)
    assert gradient == pytest.approx([(-1.1 + 0.5) / 3, -1.1 / 3, -2 / 3], rel=1e-5)
    assert loss_of_ratios("kl_cov", [0.5], [0.0], selected=torch.tensor([[True]]))[1] == [-1.0]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_covariance_loss_needs_the_selected_tokens(name):
    assert get_loss_needs(name).picker is find_covariance_range
    with pytest.raises(ValueError, check=mentions(f"'{name}'", "selected=")):
        loss_of_ratios(name, [1.0], [1.0])


# ---------------------------------------------------------------- all of them


def extra_arguments(name, mask):
    selected = {"selected": torch.ones_like(mask)} if get_loss_needs(name).picker else {}
    return selected


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_unsampled_tokens_reach_no_gradient(name):
    nan = math.nan
    mask = torch.tensor([[True, False], [False, False]])
    log_prob = torch.tensor([[-0.5, nan], [nan, nan]], requires_grad=True)
    old = torch.tensor([[-0.6, nan], [nan, nan]])
    advantages = torch.tensor([[1.0, nan], [nan, nan]])
    results = get_policy_loss_fn(name)(
        old, log_prob, advantages, mask, **extra_arguments(name, mask)
    )
    results[0].backward()
    assert all(result.isfinite() for result in results)
    assert log_prob.grad is not None
    assert log_prob.grad.isfinite().all()
    assert (log_prob.grad[~mask] == 0).all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_refuse_unknown_arguments(name):
    mask = torch.ones(1, 1)
    zeros = torch.zeros(1, 1)
    with pytest.raises(TypeError, check=mentions("sharpness")):
        get_policy_loss_fn(name)(
            zeros, zeros, zeros, mask, sharpness=1.0, **extra_arguments(name, mask)
        )


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_very_large_ratio_has_a_finite_loss(name):
    mask = torch.ones(1, 2)
    old = torch.tensor([[-800.0, 0.0]])
    log_prob = torch.tensor([[0.0, -800.0]], requires_grad=True)
    advantages = torch.tensor([[-1.0, 1.0]])
    loss, *_ = get_policy_loss_fn(name)(
        old, log_prob, advantages, mask, **extra_arguments(name, mask)
    )
    loss.backward()
    assert loss.isfinite() and log_prob.grad is not None and log_prob.grad.isfinite().all()
