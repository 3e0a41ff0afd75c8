"""Properties of estimators, losses and row weights that hold for any batch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvcr.thinking import compute_reweight_factors, compute_thinking_advantage
from verl.algos import (
    LOSS_AGG_MODES,
    agg_loss,
    compute_group_stats,
    compute_loss_denominator,
    compute_row_shares,
    get_adv_estimator_fn,
    get_loss_needs,
    get_policy_loss_fn,
)
from verl.names import POLICY_LOSSES

settings.register_profile("quick", max_examples=40, deadline=None)
settings.load_profile("quick")

numbers = st.floats(-100, 100, width=32)
parts = st.lists(st.integers(0, 3), min_size=10, max_size=10)
OUTCOME = ("grpo", "rloo", "opo")


@st.composite
def batches(draw, max_rows=10, max_width=6):
    rows, width = draw(st.integers(1, max_rows)), draw(st.integers(1, max_width))
    lengths = draw(st.lists(st.integers(1, width), min_size=rows, max_size=rows))
    scores = draw(st.lists(numbers, min_size=rows, max_size=rows))
    index = draw(st.lists(st.sampled_from("abc"), min_size=rows, max_size=rows))
    mask = torch.tensor([[int(t < n) for t in range(width)] for n in lengths])
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), torch.tensor(lengths) - 1] = torch.tensor(scores)
    return rewards, mask, index


@given(st.lists(st.tuples(numbers, st.integers(0, 3)), min_size=1, max_size=20))
def test_group_statistics_equal_those_of_each_group_alone(pairs):
    values = torch.tensor([v for v, _ in pairs], dtype=torch.float64)
    groups = torch.tensor([g for _, g in pairs])
    stats = compute_group_stats(values, groups)
    for i, group in enumerate(groups):
        members = values[groups == group]
        torch.testing.assert_close(stats.mean[i], members.mean())
        expected = members.std() if len(members) > 1 else torch.tensor(0.0, dtype=torch.float64)
        torch.testing.assert_close(stats.std[i], expected, atol=1e-9, rtol=1e-7)


@given(batches(), st.sampled_from(OUTCOME), st.randoms())
def test_advantages_follow_a_permutation_and_ignore_padding(batch, name, random):
    rewards, mask, index = batch
    estimator = get_adv_estimator_fn(name)
    whole, _ = estimator(rewards, mask, index=index)
    assert whole.isfinite().all() and (whole[mask == 0] == 0).all()
    order = list(range(len(index)))
    random.shuffle(order)
    permuted, _ = estimator(rewards[order], mask[order], index=[index[i] for i in order])
    torch.testing.assert_close(permuted, whole[order])
    pad = torch.nn.functional.pad
    padded, _ = estimator(pad(rewards, (0, 2)), pad(mask, (0, 2)), index=index)
    torch.testing.assert_close(padded, pad(whole, (0, 2)))


@given(batches(), st.sampled_from(OUTCOME), st.data())
def test_repeated_rows_of_a_trajectory_keep_the_advantages(batch, name, data):
    rewards, mask, index = batch
    if name == "opo":
        mask = torch.ones_like(
            mask
        )  # opo weights trajectories by their tokens, which repetition multiplies
    times = data.draw(st.lists(st.integers(1, 3), min_size=len(index), max_size=len(index)))
    times = [times[0]] * len(index) if name == "opo" else times
    rows = [i for i, n in enumerate(times) for _ in range(n)]
    estimator = get_adv_estimator_fn(name)
    whole, _ = estimator(rewards, mask, index=index, traj_index=list(range(len(index))))
    repeated, _ = estimator(
        rewards[rows], mask[rows], index=[index[i] for i in rows], traj_index=rows
    )
    torch.testing.assert_close(repeated, whole[rows])


@given(batches(), st.sampled_from(OUTCOME), numbers)
def test_constant_added_to_the_returns_of_a_group_is_ignored(batch, name, constant):
    rewards, mask, _ = batch
    if len(rewards) < 2:
        return
    index = ["a"] * len(rewards)
    estimator = get_adv_estimator_fn(name)
    shifted = rewards.double().clone()
    shifted[:, 0] += constant
    options = {"norm_adv_by_std_in_grpo": False} if name == "grpo" else {}
    before, _ = estimator(rewards.double(), mask, index=index, **options)
    after, _ = estimator(shifted, mask, index=index, **options)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-5)


@given(batches(), st.sampled_from(LOSS_AGG_MODES), st.data())
def test_micro_batch_losses_sum_to_the_whole_loss(batch, mode, data):
    losses, mask, index = batch
    losses = losses + torch.randn(losses.shape, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor(
        data.draw(st.lists(st.floats(0.125, 4, width=32), min_size=len(index), max_size=len(index)))
    )
    part_of = torch.tensor(
        data.draw(st.lists(st.integers(0, 3), min_size=len(index), max_size=len(index)))
    )
    whole = agg_loss(losses, mask, mode, weights)
    parts = [part_of == k for k in range(4)]
    denominator = sum(compute_loss_denominator(mask[p], mode, weights[p]) for p in parts)
    total = sum(agg_loss(losses[p], mask[p], mode, weights[p], denominator) for p in parts)
    torch.testing.assert_close(total, whole, atol=1e-4, rtol=1e-4)


@given(st.lists(st.tuples(st.sampled_from("tuv"), st.integers(1, 9)), min_size=1, max_size=8))
def test_row_shares_of_a_trajectory_sum_to_one(rows):
    traj, tokens = [t for t, _ in rows], torch.tensor([n for _, n in rows])
    shares = compute_row_shares(traj, "trajectory", tokens)
    totals = [shares[[i for i, t in enumerate(traj) if t == name]].sum() for name in set(traj)]
    torch.testing.assert_close(torch.stack(totals), torch.ones(len(totals)))


groups_of_four = st.lists(st.floats(-50, 50, width=32), min_size=4, max_size=4)


@given(
    groups_of_four,
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.sampled_from(["mean_norm", "mean_std_norm"]),
)
def test_thinking_advantages_sum_to_zero_and_are_bounded(scores, valid, mode):
    members = [k for k in range(4) if valid[k]]
    rows = torch.tensor([scores] * 4)
    masks, costs = torch.tensor([valid] * 4), torch.zeros(4, 4)
    advantage, _ = compute_thinking_advantage(rows, masks, torch.arange(4), costs, mode=mode)
    assert advantage.isfinite().all()
    torch.testing.assert_close(advantage.sum(), torch.tensor(0.0), atol=1e-3, rtol=0)
    if mode == "mean_std_norm":
        assert advantage.abs().max() <= 3**0.5 + 1e-4
    factor = compute_reweight_factors(rows, masks, torch.arange(4), costs)
    if len(members) >= 2:
        torch.testing.assert_close(factor[members].mean(), torch.tensor(1.0))
    assert (factor > 0).all()


PICKED = {"share": 0.4, "lowest": 0.0}  # chosen for batches of few tokens


@given(
    batches(), st.sampled_from(POLICY_LOSSES), st.sampled_from(LOSS_AGG_MODES), st.randoms(), parts
)
def test_every_policy_loss_sums_over_any_split(batch, name, mode, random, part_of):
    """Loss, gradient and metrics of the parts (micro-batches, ranks) equal those of the whole."""
    _, mask, index = batch
    generator = torch.Generator().manual_seed(random.randrange(1000))

    def noise():
        return torch.randn(mask.shape, generator=generator)

    old = -2 + noise()
    new = (old + 0.3 * noise()).requires_grad_()
    advantages = noise() * mask
    shares = torch.rand(len(index), generator=generator) + 0.25
    needs = get_loss_needs(name)
    sampled = mask.bool()
    order = torch.randperm(int(sampled.sum()), generator=generator)

    def compute_loss(rows, picker, **whole):
        picks = {}
        if picker is not None:
            picks["selected"] = picker.select_tokens(old[rows], advantages[rows], mask[rows])
        return get_policy_loss_fn(name)(
            old[rows],
            new[rows],
            advantages[rows],
            mask[rows],
            loss_agg_mode=mode,
            row_shares=shares[rows],
            loss_scale_factor=7.0,
            **picks,
            **whole,
        )

    def make_token_selector(order):
        if needs.picker is None:
            return None
        return needs.picker(old[sampled][order], advantages[sampled][order], **PICKED)

    rows = torch.arange(len(index))
    whole = compute_loss(rows, make_token_selector(torch.arange(len(order))))
    expected = torch.autograd.grad(whole[0], new)[0]
    parts = [rows[[part_of[row] == k for row in range(len(index))]] for k in range(4)]
    denominator = sum(compute_loss_denominator(mask[p], mode, shares[p]) for p in parts)
    totals = {"denominator": denominator, "num_tokens": float(mask.sum())}
    part_results = [compute_loss(p, make_token_selector(order), **totals) for p in parts]
    gradient = torch.autograd.grad(torch.stack([part[0] for part in part_results]).sum(), new)[0]
    torch.testing.assert_close(gradient, expected, atol=1e-4, rtol=1e-4)
    for number, value in enumerate(whole):
        total = sum(part[number] for part in part_results)
        torch.testing.assert_close(total, value, atol=1e-4, rtol=1e-4)
