"""Three implementations of one loss: TRL's in ``GRPOEnvTrainer``, the masked one on whole
sequences, and our actor's.

They get one batch of sampled trials, the same weights and random advantages. The old log-probs
differ enough for the clip to bind.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from transformers import AutoModelForCausalLM

from tests.helpers.trl_trainer import make_trainer
from verl.config.schema.actor_rollout_ref import ActorConfig
from verl.models.policy import PolicyModel
from verl.protocol import DataProto
from verl.workers.policy_loss import PolicyLoss, compute_denominators
from verl.workers.rows import Rows

MODES: dict[str, Any] = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


def make_perturbed_batch(trainer, beta: float) -> dict[str, torch.Tensor]:
    """Return TRL's batch with random advantages, and with old and reference log-probs that
    differ.
    """
    rows = [{"solution": word} for word in ("dog", "cat") for _ in range(4)]
    batch = trainer._generate_and_score_completions(rows)
    g = torch.Generator().manual_seed(0)
    shape = batch["completion_ids"].shape
    batch["advantages"] = torch.randn(shape[0], generator=g)
    batch["old_per_token_logps"] = batch["old_per_token_logps"] + 0.4 * torch.randn(
        shape, generator=g
    )
    if beta:
        batch["ref_per_token_logps"] = batch["old_per_token_logps"] + 0.4 * torch.randn(
            shape, generator=g
        )
    return batch


def gradients(model, loss) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def actor_loss(directory, batch, loss_type: str, beta: float, max_completion_length: int):
    """Compute our actor's loss on the same rows: packed forward pass, policy loss, aggregation."""
    mask = batch["completion_mask"] * batch["tool_mask"]
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    tensors = {
        "input_ids": torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        "attention_mask": attention,
        "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
        "responses": batch["completion_ids"],
        "response_mask": mask,
        "advantages": batch["advantages"][:, None] * mask,
        "old_log_probs": batch["old_per_token_logps"],
    }
    if beta:
        tensors["ref_log_prob"] = batch["ref_per_token_logps"]
    data = DataProto.from_dict(tensors)
    mode = MODES[loss_type]
    actor = ActorConfig(
        loss_agg_mode=mode,
        clip_ratio=0.2,
        clip_ratio_c=1e9,
        use_kl_loss=bool(beta),
        kl_loss_coef=beta,
    )
    model = PolicyModel(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))
    rows, index = Rows(data), list(range(len(data)))
    packed = rows.pack_rows(index)
    scores = model(
        packed.input_ids, packed.position_ids, packed.layout, [rows.sampled_targets(packed, index)]
    )[0]
    loss, metrics = PolicyLoss(actor)(
        scores, rows, data, index, compute_denominators(data, index, mode)
    )
    if (
        loss_type == "dr_grpo"
    ):  # Our loss divides by the width of the batch, TRL's by the maximum completion length.
        loss = loss * mask.shape[1] / max_completion_length
    return model, loss, metrics


@pytest.mark.parametrize("beta", [0.0, 0.3], ids=["no-kl", "kl"])
@pytest.mark.parametrize("loss_type", sorted(MODES))
def test_three_losses_and_gradients_are_equal(tmp_path, loss_type, beta):
    trainer = make_trainer(tmp_path, loss_type=loss_type, beta=beta, use_bias_correction_kl=False)
    batch, model = make_perturbed_batch(trainer, beta), trainer.model
    trl_loss = trainer.compute_loss(model, batch)
    trainer.loss_path = "full_sequence"
    masked_loss = trainer.compute_loss(model, batch)
    policy, our_loss, metrics = actor_loss(
        model.name_or_path, batch, loss_type, beta, trainer.max_completion_length
    )
    assert metrics["pg_clipfrac"] > 0.05, "the clip must bind somewhere"
    assert (
        0
        < int((batch["completion_mask"] * batch["tool_mask"]).sum())
        < int(batch["completion_mask"].sum())
    )
    assert abs(trl_loss.item()) > 1e-3
    assert trl_loss.item() == pytest.approx(masked_loss.item(), abs=1e-5)
    assert trl_loss.item() == pytest.approx(our_loss.item(), abs=1e-5)
    trl_gradients = [gradients(model, trl_loss), gradients(model, masked_loss)]
    actor_gradients = {
        name.removeprefix("lm."): gradient for name, gradient in gradients(policy, our_loss).items()
    }
    for name, gradient in trl_gradients[0].items():
        torch.testing.assert_close(trl_gradients[1][name], gradient, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(actor_gradients[name], gradient, atol=1e-5, rtol=1e-3)
    # With three accumulation steps the loss of each is a third.
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 3
    masked_loss = trainer.compute_loss(model, batch)
    trainer.loss_path = "trl"
    assert masked_loss.item() == pytest.approx(trainer.compute_loss(model, batch).item(), abs=1e-5)
    if loss_type != "dapo":
        assert masked_loss.item() == pytest.approx(trl_loss.item() / 3, abs=1e-5)


@pytest.mark.parametrize("change", ["bias_correction", "sequence", "delta"])
def test_further_loss_terms_are_equal(tmp_path, change):
    options = {
        "bias_correction": {"beta": 0.3, "use_bias_correction_kl": True},
        "sequence": {"importance_sampling_level": "sequence"},
        "delta": {"delta": 1.3},
    }[change]
    trainer = make_trainer(tmp_path, loss_type="grpo", **options)
    batch = make_perturbed_batch(trainer, trainer.beta)
    trl_loss = trainer.compute_loss(trainer.model, batch).item()
    trainer.loss_path = "full_sequence"
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(trl_loss, abs=1e-5)


def test_batch_of_whole_sequences_is_accepted(tmp_path):
    """The batch has the keys of the source document's trainer, with ``completion_only_mask``."""
    from agent_system.integrations.trl import build_full_sequence_batch

    trainer = make_trainer(tmp_path, loss_type="grpo")
    batch = make_perturbed_batch(trainer, 0.0)
    whole = build_full_sequence_batch(batch)
    assert set(whole) == {
        "prompt_completion_ids",
        "attention_mask",
        "completion_only_mask",
        "old_per_token_logps",
        "advantages",
    }
    assert trainer.compute_loss(trainer.model, whole).item() == pytest.approx(
        trainer.compute_loss(trainer.model, batch).item(), abs=1e-5
    )


def test_masked_values_do_not_change_the_loss():
    """Values on environment tokens change nothing. A row without agent tokens gives 0, not NaN."""
    from agent_system.integrations.trl import masked_grpo_loss

    g = torch.Generator().manual_seed(1)
    logps = -torch.rand(3, 6, generator=g)
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    batch = {
        "completion_only_mask": mask,
        "old_per_token_logps": logps + 0.1,
        "advantages": torch.tensor([1.0, -2.0, 3.0]),
    }
    for loss_type in MODES:
        loss = masked_grpo_loss(logps, batch, loss_type=loss_type)
        changed_loss = masked_grpo_loss(
            torch.where(mask.bool(), logps, -7.0), batch, loss_type=loss_type
        )
        assert torch.isfinite(loss) and loss == changed_loss
    all_masked = SimpleNamespace(**batch)
    all_masked.completion_only_mask = torch.zeros_like(mask)
    assert masked_grpo_loss(logps, vars(all_masked), loss_type="dapo") == 0.0
