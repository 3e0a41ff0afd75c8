"""Weights of a rollout correction multiply the loss of every token, in every registered loss. Token
losses are implemented here a second time, from the formulas of the papers."""

from typing import Any

import pytest
import torch

from verl.config.load import load_config
from verl.names import POLICY_LOSSES
from verl.protocol import DataProto
from verl.records import CORRECTION_WEIGHTS
from verl.workers.policy_loss import Denominators, PolicyLoss

ROWS, TOKENS = 3, 5
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 1, 1], [1, 1, 1, 1, 1]])
# The first token of each row is rejected, and all of the last row.
WEIGHTS = torch.tensor([[0.0, 0.5, 1.0, 2.0, 3.0], [0.0, 1.5, 9.0, 0.0, 1.0], [0.0] * 5])
DRAW = torch.Generator().manual_seed(4)
RATIOS = torch.tensor(
    [[0.5, 1.3, 0.95, 1.7, 1.0], [1.35, 0.8, 2.0, 1.1, 2.5], [0.93, 1.05, 1.9, 0.6, 1.4]]
)
OLD = torch.rand(ROWS, TOKENS, generator=DRAW) * -2 - 0.95
NEW = OLD + RATIOS.log()
ADVANTAGES = torch.randn(ROWS, TOKENS, generator=DRAW)
SELECTED = torch.zeros(ROWS, TOKENS, dtype=torch.bool)
SELECTED[:, :2] = True


class Rows:
    """Scatter that returns whole rows unchanged."""

    def scatter_to_responses(self, values, _index):
        return values


class Scores:
    def __init__(self, log_probs):
        self.log_probs = log_probs
        self.allowed_token_log_probs = None
        self.required_entropy = -log_probs


class Picker:
    def select_tokens(self, _old, _advantages, mask):
        return SELECTED & mask


def loss_and_gradient(weights: torch.Tensor | None, **changes: Any) -> tuple[float, torch.Tensor]:
    """Return loss and gradient of the configured loss, as the actor computes it."""
    overrides = [f"actor_rollout_ref.actor.{key}={value}" for key, value in changes.items()]
    section = load_config("ppo_trainer", overrides).actor_rollout_ref.actor
    tensors = {
        "response_mask": MASK,
        "old_log_probs": OLD,
        "advantages": ADVANTAGES,
        "ref_log_prob": OLD - 0.3,
    }
    if weights is not None:
        tensors[CORRECTION_WEIGHTS] = weights
    log_prob = NEW.clone().requires_grad_()
    whole = Denominators(float(MASK.sum()), float(MASK.sum()), 0.0, ROWS)
    policy_loss = PolicyLoss(section)
    scores: Any = Scores(log_prob)
    rows: Any = Rows()
    token_selector: Any = Picker() if policy_loss.loss_needs.picker else None
    data = DataProto.from_dict(tensors)
    loss, _ = policy_loss(scores, rows, data, [0, 1, 2], whole, token_selector)
    loss.backward()
    assert log_prob.grad is not None
    return loss.item(), log_prob.grad


# Shares of 13 tokens, bounds of their covariance, and the number of selected tokens.
PICKS = [
    ("clip_cov", {"clip_cov_ratio": 0.3, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0}, 3),
    ("clip_cov", {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0}, 1),
    ("clip_cov", {"clip_cov_ratio": 0.9, "clip_cov_lb": 0.2, "clip_cov_ub": 9.0}, None),
    ("clip_cov", {"clip_cov_ratio": 0.9, "clip_cov_lb": 0.0, "clip_cov_ub": 0.3}, None),
    ("kl_cov", {"kl_cov_ratio": 0.3}, 3),
    ("kl_cov", {"kl_cov_ratio": 0.1}, 1),
]


@pytest.mark.parametrize(("name", "keys", "count"), PICKS)
def test_covariance_keys_decide_which_tokens_are_selected(name, keys, count):
    overrides = [
        f"actor_rollout_ref.actor.policy_loss.{key}={value}" for key, value in keys.items()
    ]
    overrides.append(f"actor_rollout_ref.actor.policy_loss.loss_mode={name}")
    loss = PolicyLoss(load_config("ppo_trainer", overrides).actor_rollout_ref.actor)
    tensors = {"response_mask": MASK, "old_log_probs": OLD, "advantages": ADVANTAGES}
    token_selector: Any = loss.make_token_selector(DataProto.from_dict(tensors), [0, 1, 2])
    mask = MASK.bool()
    covariance = (ADVANTAGES - ADVANTAGES[mask].mean()) * (OLD - OLD[mask].mean())
    low, high = keys.get("clip_cov_lb", 0.0), keys.get("clip_cov_ub", 9.0)
    in_range = sorted(
        (c for c in covariance[mask].tolist() if max(low, 1e-9) <= c <= high), reverse=True
    )
    share = keys.get("clip_cov_ratio", keys.get("kl_cov_ratio"))
    expected = in_range[: int(share * int(MASK.sum()))]
    actual = covariance[token_selector.select_tokens(OLD, ADVANTAGES, MASK)].tolist()
    assert sorted(actual, reverse=True) == pytest.approx(expected)
    assert len(expected) == (len(in_range) if count is None else count)
    positive = [c for c in covariance[mask].tolist() if c > 0]
    assert 0 < len(expected) < len(positive)


LOW, HIGH, CEILING, TAU = 0.1, 0.25, 1.5, (0.8, 1.3)
SETTINGS = {
    "clip_ratio_low": LOW,
    "clip_ratio_high": HIGH,
    "clip_ratio_c": CEILING,
    "tau_pos": TAU[0],
    "tau_neg": TAU[1],
    "policy_loss.ppo_kl_coef": 0.7,
}


def surrogate(ratio):
    return torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * ratio.clip(1 - LOW, 1 + HIGH))


def row_mean(values):
    return (values * MASK).sum(-1, keepdim=True) / MASK.sum(-1, keepdim=True)


def vanilla(new):
    loss = surrogate((new - OLD).exp())
    return torch.where(ADVANTAGES < 0, torch.minimum(loss, -CEILING * ADVANTAGES), loss)


def gspo(new):
    return surrogate(row_mean(new - OLD).detach().exp() * (new - new.detach()).exp())


def cispo(new):
    return -(new - OLD).exp().clip(1 - LOW, 1 + HIGH).detach() * ADVANTAGES * new


def sapo(new):
    tau = torch.where(ADVANTAGES > 0, *map(torch.tensor, TAU))
    return -4 / tau * torch.sigmoid(tau * ((new - OLD).exp() - 1)) * ADVANTAGES


def geo_mean(new):
    d = new - OLD
    limited = torch.where(ADVANTAGES > 0, d.clamp(max=HIGH), d.clamp(min=-LOW))
    return -row_mean(limited).exp() * ADVANTAGES


def gpg(new):
    return -ADVANTAGES * new


def clip_cov(new):
    return torch.where(SELECTED, 0.0, surrogate((new - OLD).exp()))


def kl_cov(new):
    return -(new - OLD).exp() * ADVANTAGES + 0.7 * SELECTED * (new - OLD).abs()


def bounded(new, rose, fell):
    too_far = (ADVANTAGES > 0) & rose | (ADVANTAGES < 0) & fell
    limited = (new - OLD).exp().clamp(max=CEILING).detach() * (new - new.detach()).exp()
    return torch.where(too_far, 0.0, -limited * ADVANTAGES)


def dppo_tv(new):
    change = new.exp() - OLD.exp()
    return bounded(new, change > HIGH, change < -LOW)


def dppo_kl(new):
    p, q = OLD.double().exp(), new.detach().double().exp()
    divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    return bounded(new, (q > p) & (divergence > HIGH), (q < p) & (divergence > LOW))


FORMS = {f.__name__: f for f in (vanilla, gspo, cispo, sapo, geo_mean, gpg, clip_cov, kl_cov)}
FORMS |= {"gmpo": geo_mean, "dppo": dppo_tv, "dppo_tv": dppo_tv, "dppo_kl": dppo_kl}


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_weights_multiply_the_loss_of_every_token(name, weights):
    loss, gradient = loss_and_gradient(weights, **SETTINGS, **{"policy_loss.loss_mode": name})
    new = NEW.clone().requires_grad_()
    trained = new if weights is None else torch.where(weights == 0, new.detach(), new)
    counts = MASK if weights is None else MASK * weights
    expected = (FORMS[name](trained) * counts).sum() / MASK.sum()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, new.grad, rtol=1e-5, atol=1e-7)
    if weights is not None:
        assert (gradient[weights == 0] == 0).all()
        assert (gradient != 0).any()


def test_settings_reach_every_bound():
    """Otherwise the comparison above would not test the bounds."""
    ratio = (NEW - OLD).exp()[MASK.bool()]
    assert (ratio > CEILING).any() and (ratio < 1 - LOW).any()
    assert ((ratio > 1 + HIGH) & (ratio < CEILING)).any()


def test_other_loss_terms_are_not_weighted():
    plain_loss, plain = loss_and_gradient(WEIGHTS)
    kl_loss, kl = loss_and_gradient(WEIGHTS, use_kl_loss=True, kl_loss_type="k1", kl_loss_coef=0.5)
    torch.testing.assert_close(kl - plain, 0.5 * MASK / MASK.sum())
    assert kl_loss - plain_loss == pytest.approx(
        (0.5 * (NEW - OLD + 0.3) * MASK).sum().item() / MASK.sum().item(), rel=1e-4
    )
    _, entropy = loss_and_gradient(WEIGHTS, entropy_coeff=0.25)
    # The entropy of these scores is the negative log-prob.
    torch.testing.assert_close(entropy - plain, 0.25 * MASK / MASK.sum())


def proportional(old_log_prob, log_prob, advantages, response_mask, **_):
    loss = -((log_prob - old_log_prob).exp() * advantages * response_mask).sum()
    return loss, *torch.zeros(3)


def test_user_loss_receives_weighted_advantages(monkeypatch):
    monkeypatch.setattr("verl.workers.policy_loss.get_policy_loss_fn", lambda _: proportional)
    _, gradient = loss_and_gradient(WEIGHTS)
    expected = -(NEW - OLD).exp() * ADVANTAGES * WEIGHTS * MASK
    torch.testing.assert_close(gradient, expected)
