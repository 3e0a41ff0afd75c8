"""Compare whole updates of actor and critic with a second implementation.

The second implementation has no packing, micro-batches or engines: transformers' forward over
padded rows, the losses written out, and AdamW by hand. Each compared setting uses values that have
an effect: the test checks that another value of the key gives other weights. So an ignored or
misread key makes the test fail.
"""

import math
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.policy_rows import PROMPT, critic_config, policy_config, random_rows
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.schema.model import OptimConfig
from verl.protocol import DataProto
from verl.records import CORRECTION_WEIGHTS, RestrictedTokenLoss
from verl.utils.seeds import derive_seed
from verl.workers import actor as actor_module
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker
from verl.workers.engine_state import gather_full_weights
from verl.workers.mini_batches import make_mini_batches

CHOICE = RestrictedTokenLoss((20, 21, 22, 23), weight=0.3, name="level")
OPTIM = {
    "lr": 0.02,
    "betas": (0.6, 0.8),
    "eps": 3e-3,
    "weight_decay": 0.2,
    "lr_warmup_steps": -1,
    "lr_warmup_steps_ratio": 0.4,
    "warmup_style": "cosine",
    "min_lr_ratio": 0.3,
    "total_training_steps": 6,
}
BATCHES = {"ppo_mini_batches": 2, "ppo_mini_batch_size": 1, "ppo_epochs": 2, "shuffle": True}
ACTOR = BATCHES | {
    "grad_clip": 0.05,
    "clip_ratio": 0.9,
    "clip_ratio_low": 0.1,
    "clip_ratio_high": 0.3,
    "clip_ratio_c": 1.4,
    "loss_agg_mode": "seq-mean-token-sum-norm",
    "loss_scale_factor": 7.0,
    "entropy_coeff": 0.4,
    "use_kl_loss": True,
    "kl_loss_coef": 0.6,
    "kl_loss_type": "k3",
}
CRITIC = BATCHES | {
    "grad_clip": 0.3,
    "cliprange_value": 0.2,
    "loss_agg_mode": "seq-mean-token-sum-norm",
    "loss_scale_factor": 7.0,
}
# Changes to the settings above, by name. The changes under one name are compared together.
OPTIM_CHANGES: dict[str, dict[str, Any]] = {
    "rates": {"lr": 0.01, "betas": (0.8, 0.6), "eps": 1e-2, "weight_decay": 0.5},
    "schedule": {"min_lr_ratio": 0.9, "lr_warmup_steps_ratio": 0.2, "total_training_steps": 12},
    "constant": {"warmup_style": "constant", "lr_warmup_steps": 1},
}
BATCH_CHANGES: dict[str, dict[str, Any]] = {
    "batches": {"ppo_mini_batches": 3, "shuffle": False},
    "epochs": {"ppo_epochs": 1},
    "tasks": {"ppo_mini_batches": None, "ppo_mini_batch_size": 3},
}
ACTOR_CHANGES = BATCH_CHANGES | {
    "clip": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.05, "clip_ratio_c": 1.1},
    "terms": {"entropy_coeff": -0.4, "kl_loss_coef": 1.5, "kl_loss_type": "k2"},
    "no term": {"use_kl_loss": False, "grad_clip": 0.02},
    "scale": {"loss_scale_factor": 3.0},
    "tokens": {"loss_agg_mode": "token-mean"},
    "sum": {"loss_agg_mode": "token-sum"},
    "sums": {"loss_agg_mode": "seq-mean-token-sum"},
    "means": {"loss_agg_mode": "seq-mean-token-mean"},
}
CRITIC_CHANGES = BATCH_CHANGES | {
    "clip": {"cliprange_value": 1.0, "grad_clip": 0.1},
    "scale": {"loss_scale_factor": 90.0},
    "means": {"loss_agg_mode": "seq-mean-token-mean"},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=16, layers=1, std=0.3)


@cache
def load_policy(path: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def make_training_rows() -> DataProto:
    data = random_rows(rows=6, group=2)
    g = torch.Generator().manual_seed(5)
    mask = data.batch["response_mask"]
    data.batch["old_log_probs"] = (-5.9 + 0.5 * torch.randn(mask.shape, generator=g)) * mask
    data.batch[CORRECTION_WEIGHTS] = torch.rand(mask.shape, generator=g) * 1.5 * mask
    data.meta_info["temperature"] = 0.7
    data.meta_info["choice"] = CHOICE
    return data


# ------------------------------------------------------------------ second implementation


def compute_learning_rate(step: int, optim: dict[str, Any]) -> float:
    """Return the learning rate of optimizer step ``step``, counted from 0."""
    total = optim["total_training_steps"]
    warm = optim["lr_warmup_steps"]
    warm = int(optim["lr_warmup_steps_ratio"] * total) if warm < 0 else warm
    if step < warm:
        return optim["lr"] * (step + 1) / warm
    if optim["warmup_style"] == "constant":
        return optim["lr"]
    progress = min(1.0, (step - warm) / (total - 1 - warm))
    low = optim["min_lr_ratio"]
    return optim["lr"] * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)


class ReferenceAdamW:
    """AdamW over ``parameters`` by name, with clipped gradients."""

    def __init__(self, parameters: dict[str, torch.Tensor], optim: dict[str, Any], clip: float):
        self.parameters, self.optim, self.clip, self.steps = parameters, optim, clip, 0
        self.moments = {
            n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in parameters.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        lr = compute_learning_rate(self.steps, self.optim)
        self.steps += 1
        (b1, b2), eps = self.optim["betas"], self.optim["eps"]
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()
        }
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        shrink = min(1.0, self.clip / (norm + 1e-6))
        for name, p in self.parameters.items():
            gradient = gradients[name] * shrink
            first, second = self.moments[name]
            first.mul_(b1).add_((1 - b1) * gradient)
            second.mul_(b2).add_((1 - b2) * gradient**2)
            if p.dim() >= 2:
                p.mul_(1 - lr * self.optim["weight_decay"])
            corrected = first / (1 - b1**self.steps)
            p.sub_(lr * corrected / ((second / (1 - b2**self.steps)).sqrt() + eps))
            p.grad = None


def token_coefficients(mode: str, scale: float, data: DataProto, part: list[int]) -> torch.Tensor:
    """Return the coefficient of each token's value in the loss of the mini-batch, [b, R]."""
    mask = data.batch["response_mask"][part].float()
    shares = data.batch["row_shares"][part]
    tokens = mask.sum(-1)
    row_coefficients = {
        "token-mean": torch.ones_like(shares) / tokens.sum(),
        "token-sum": torch.ones_like(shares),
        "seq-mean-token-sum": torch.ones_like(shares) / shares.sum(),
        "seq-mean-token-mean": shares / tokens / shares.sum(),
        "seq-mean-token-sum-norm": torch.ones_like(shares) / scale / shares.sum(),
    }[mode]
    return row_coefficients[:, None] * mask


def list_mini_batches(data: DataProto, settings: dict[str, Any], role: str) -> list[list[int]]:
    """Return the rows of all optimizer steps, epoch by epoch."""
    parts: list[list[int]] = []
    for epoch in range(settings["ppo_epochs"]):
        seed = derive_seed(f"update_{role}", 0, 1, epoch if settings["shuffle"] else 0)
        size, count = settings["ppo_mini_batch_size"], settings["ppo_mini_batches"]
        parts += make_mini_batches(data, seed, size, count)
    return parts


def select_inputs(data: DataProto, part: list[int]) -> dict[str, torch.Tensor]:
    names = ("input_ids", "attention_mask", "position_ids")
    return {name: data.batch[name][part] for name in names}


def compute_entropy(logits: torch.Tensor) -> torch.Tensor:
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1)


def policy_loss(lm: Any, data: DataProto, part: list[int], s: dict[str, Any]) -> torch.Tensor:
    batch = data.batch[part]
    logits = (
        lm(**select_inputs(data, part)).logits[:, PROMPT - 1 : -1] / data.meta_info["temperature"]
    )
    new = logits.log_softmax(-1).gather(-1, batch["responses"][..., None])[..., 0]
    ratio = (new - batch["old_log_probs"]).exp()
    a = batch["advantages"]
    low, high = 1 - s["clip_ratio_low"], 1 + s["clip_ratio_high"]
    losses = torch.maximum(-a * ratio, -a * ratio.clip(low, high))
    losses = torch.where(a < 0, torch.minimum(losses, -a * s["clip_ratio_c"]), losses)
    losses = losses * batch[CORRECTION_WEIGHTS] - s["entropy_coeff"] * compute_entropy(logits)
    if s["use_kl_loss"]:
        d = new - batch["ref_log_prob"]
        kl = {"k3": ((-d).exp() - 1 + d).clamp(max=10), "k2": d**2 / 2}[s["kl_loss_type"]]
        losses = losses + s["kl_loss_coef"] * kl
    chosen = (batch["choice_mask"] * batch["response_mask"]).float()
    levels = compute_entropy(logits[..., list(CHOICE.token_ids)])
    bonus = CHOICE.weight * (levels * chosen).sum() / chosen.sum()
    weights = token_coefficients(s["loss_agg_mode"], s["loss_scale_factor"], data, part)
    return (weights * losses).sum() - bonus


def train_policy_by_hand(
    path: Any, data: DataProto, settings: dict[str, Any], optim: dict[str, Any]
):
    lm = deepcopy(load_policy(path))
    optimizer = ReferenceAdamW(dict(lm.named_parameters()), optim, settings["grad_clip"])
    for part in list_mini_batches(data, settings, "actor"):
        policy_loss(lm, data, part, settings).backward()
        optimizer.step()
    return {name: p.detach() for name, p in lm.named_parameters()}


def value_loss(
    values: torch.Tensor, data: DataProto, part: list[int], s: dict[str, Any]
) -> torch.Tensor:
    batch = data.batch[part]
    old, clip_range = batch["values"], s["cliprange_value"]
    clipped = torch.maximum(torch.minimum(values, old + clip_range), old - clip_range)
    errors = torch.maximum((values - batch["returns"]) ** 2, (clipped - batch["returns"]) ** 2)
    weights = token_coefficients(s["loss_agg_mode"], s["loss_scale_factor"], data, part)
    return (weights * errors / 2).sum()


class ReferenceCritic:
    """Backbone with a linear map of the state before each response position."""

    def __init__(self, path: Any) -> None:
        self.backbone = deepcopy(load_policy(path).model)
        width = self.backbone.config.hidden_size
        self.weight, self.bias = torch.zeros(1, width), torch.zeros(1)
        self.parameters = {f"backbone.{n}": p for n, p in self.backbone.named_parameters()}
        self.parameters |= {"value_head.weight": self.weight, "value_head.bias": self.bias}
        for tensor in (self.weight, self.bias):
            tensor.requires_grad_()

    def values(self, data: DataProto, part: list[int]) -> torch.Tensor:
        hidden = self.backbone(**select_inputs(data, part)).last_hidden_state[:, PROMPT - 1 : -1]
        return hidden @ self.weight[0] + self.bias


def train_critic_by_hand(
    path: Any, data: DataProto, settings: dict[str, Any], optim: dict[str, Any]
):
    critic = ReferenceCritic(path)
    optimizer = ReferenceAdamW(critic.parameters, optim, settings["grad_clip"])
    for part in list_mini_batches(data, settings, "critic"):
        value_loss(critic.values(data, part), data, part, settings).backward()
        optimizer.step()
    values = critic.values(data, list(range(len(data)))) * data.batch["response_mask"]
    return {n: p.detach() for n, p in critic.parameters.items()} | {"values": values.detach()}


# ------------------------------------------------------------------ comparisons


def run_actor_update(path: Any, data: DataProto, settings: dict[str, Any], optim: dict[str, Any]):
    values = settings | {"optim": OptimConfig(**optim), "ppo_micro_batch_size_per_gpu": 2}
    worker = ActorWorker(policy_config(path, **values), device="cpu")
    worker.init_model()
    worker.update_actor(data)
    weights = gather_full_weights(worker.train_engine)
    return {name.removeprefix("lm."): tensor for name, tensor in weights.items()}


def run_critic_update(path: Any, data: DataProto, settings: dict[str, Any], optim: dict[str, Any]):
    config = critic_config(path, **settings, optim=OptimConfig(**optim))
    worker = CriticWorker(config, device="cpu")
    worker.init_model()
    worker.update_critic(data)
    return gather_full_weights(worker.train_engine) | {
        "values": worker.compute_values(data).batch["values"]
    }


def max_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest absolute difference between two sets of weights."""
    assert {*other} <= {*one}
    return max(float((one[name] - tensor.detach()).abs().max()) for name, tensor in other.items())


def apply_change(change: str, base: dict, changes: dict) -> tuple[dict, dict]:
    """Return the settings of the model and of its optimizer with the changes named ``change``."""
    return base | changes.get(change, {}), OPTIM | OPTIM_CHANGES.get(change, {})


def restore_key(key: str, changed: dict, base: dict) -> dict:
    """Return ``changed`` with the value that ``key`` has in ``base``."""
    return changed | ({key: base[key]} if key in changed else {})


@pytest.mark.parametrize("change", ["", *ACTOR_CHANGES, *OPTIM_CHANGES])
def test_actor_update_equals_reference_for_every_key(policy, change):
    data, (settings, optim) = make_training_rows(), apply_change(change, ACTOR, ACTOR_CHANGES)
    expected = train_policy_by_hand(policy, data, settings, optim)
    assert max_difference(run_actor_update(policy, data, settings, optim), expected) < 1e-5
    for key in {**ACTOR_CHANGES, **OPTIM_CHANGES}.get(change, {}):
        other = restore_key(key, settings, ACTOR), restore_key(key, optim, OPTIM)
        assert max_difference(train_policy_by_hand(policy, data, *other), expected) > 1e-4, key


@pytest.mark.parametrize("change", ["", *CRITIC_CHANGES, *OPTIM_CHANGES])
def test_critic_update_equals_reference_for_every_key(policy, change):
    data, (settings, optim) = make_training_rows(), apply_change(change, CRITIC, CRITIC_CHANGES)
    expected = train_critic_by_hand(policy, data, settings, optim)
    assert max_difference(run_critic_update(policy, data, settings, optim), expected) < 1e-5
    for key in {**CRITIC_CHANGES, **OPTIM_CHANGES}.get(change, {}):
        other = restore_key(key, settings, CRITIC), restore_key(key, optim, OPTIM)
        assert max_difference(train_critic_by_hand(policy, data, *other), expected) > 1e-4, key


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_actor_update_uses_the_rollout_temperature(policy, temperature):
    data = make_training_rows()
    data.meta_info["temperature"] = temperature
    expected = train_policy_by_hand(policy, data, ACTOR, OPTIM)
    assert max_difference(run_actor_update(policy, data, ACTOR, OPTIM), expected) < 1e-5
    at_one = make_training_rows()
    at_one.meta_info["temperature"] = 1.0
    assert max_difference(train_policy_by_hand(policy, at_one, ACTOR, OPTIM), expected) > 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_old_and_reference_log_probs_use_the_rollout_temperature(policy, temperature):
    data = make_training_rows()
    data.meta_info["temperature"] = temperature
    lm = load_policy(policy)
    with torch.no_grad():
        logits = lm(**select_inputs(data, list(range(6)))).logits[:, PROMPT - 1 : -1] / temperature
    expected = logits.log_softmax(-1).gather(-1, data.batch["responses"][..., None])[..., 0]
    mask = data.batch["response_mask"]
    worker = ActorWorker(policy_config(policy), "ref", device="cpu")
    worker.init_model()
    actual = worker.compute_ref_log_prob(data).batch["ref_log_prob"]
    torch.testing.assert_close(actual, expected * mask, atol=1e-5, rtol=1e-5)
    actual = worker.compute_log_prob(data).batch
    torch.testing.assert_close(actual["old_log_probs"], expected * mask, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        actual["entropys"], compute_entropy(logits) * mask, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(("other_rows", "is_step_taken"), [(0, False), (3, True)])
def test_step_is_skipped_only_without_advantage_on_any_rank(
    policy, monkeypatch, other_rows, is_step_taken
):
    """``skip_without_advantage`` is set, and the entropy bonus alone would change the weights."""
    data = make_training_rows()
    data.batch["advantages"] = torch.zeros_like(data.batch["advantages"])
    monkeypatch.setattr(actor_module, "sum_over_ranks", lambda weights: [weights[0] + other_rows])
    settings = ACTOR | {"skip_without_advantage": True}
    weights = run_actor_update(policy, data, settings, OPTIM)
    change = max_difference(weights, dict(load_policy(policy).named_parameters()))
    assert (change > 1e-3) == is_step_taken
    if is_step_taken:
        assert max_difference(weights, train_policy_by_hand(policy, data, ACTOR, OPTIM)) < 1e-5
