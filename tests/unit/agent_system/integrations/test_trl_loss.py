"""Three ways to the same loss: TRL's in ``GRPOEnvTrainer``, the masked one on whole sequences, and
our actor's.

One batch of real trials, the same weights, old log-probs far enough away that the clip binds,
random advantages.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from transformers import AutoModelForCausalLM

from tests.helpers.trl_trainer import make_trainer
from verl.config.schema.actor import ActorConfig
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


def perturbed_batch(trainer, beta: float) -> dict[str, torch.Tensor]:
    """TRL's batch of a generation step, with advantages and old and reference log-probs that make
    the terms differ.
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
    """Our actor's loss on the same rows: its packed forward pass, its policy loss, the matching
    aggregation.
    """
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
    ):  # ours divides by the width of the batch, TRL by the longest completion allowed
        loss = loss * mask.shape[1] / max_completion_length
    return model, loss, metrics


@pytest.mark.parametrize("beta", [0.0, 0.3], ids=["no-kl", "kl"])
@pytest.mark.parametrize("loss_type", sorted(MODES))
def test_three_ways_to_the_same_loss_and_gradient(tmp_path, loss_type, beta):
    trainer = make_trainer(tmp_path, loss_type=loss_type, beta=beta, use_bias_correction_kl=False)
    batch, model = perturbed_batch(trainer, beta), trainer.model
    theirs = trainer.compute_loss(model, batch)
    trainer.loss_path = "full_sequence"
    source = trainer.compute_loss(model, batch)
    policy, ours, metrics = actor_loss(
        model.name_or_path, batch, loss_type, beta, trainer.max_completion_length
    )
    assert metrics["pg_clipfrac"] > 0.05, "the clip must bind somewhere"
    assert (
        0
        < int((batch["completion_mask"] * batch["tool_mask"]).sum())
        < int(batch["completion_mask"].sum())
    )
    assert abs(theirs.item()) > 1e-3
    assert theirs.item() == pytest.approx(source.item(), abs=1e-5)
    assert theirs.item() == pytest.approx(ours.item(), abs=1e-5)
    found = [gradients(model, theirs), gradients(model, source)]
    actors = {
        name.removeprefix("lm."): gradient for name, gradient in gradients(policy, ours).items()
    }
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-3)
        torch.testing.assert_close(actors[name], gradient, atol=1e-5, rtol=1e-3)
    # Of three accumulated windows each is a third of the mean.
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 3
    source = trainer.compute_loss(model, batch)
    trainer.loss_path = "trl"
    assert source.item() == pytest.approx(trainer.compute_loss(model, batch).item(), abs=1e-5)
    if loss_type != "dapo":
        assert source.item() == pytest.approx(theirs.item() / 3, abs=1e-5)


@pytest.mark.parametrize("change", ["bias_correction", "sequence", "delta"])
def test_the_other_terms_of_the_loss_agree_as_well(tmp_path, change):
    options = {
        "bias_correction": {"beta": 0.3, "use_bias_correction_kl": True},
        "sequence": {"importance_sampling_level": "sequence"},
        "delta": {"delta": 1.3},
    }[change]
    trainer = make_trainer(tmp_path, loss_type="grpo", **options)
    batch = perturbed_batch(trainer, trainer.beta)
    theirs = trainer.compute_loss(trainer.model, batch).item()
    trainer.loss_path = "full_sequence"
    assert trainer.compute_loss(trainer.model, batch).item() == pytest.approx(theirs, abs=1e-5)


def test_a_batch_of_whole_sequences_is_taken_as_it_is(tmp_path):
    """The dictionary that the source's trainer returns: whole sequences and
    ``completion_only_mask``.
    """
    from agent_system.integrations.trl import full_sequence_batch

    trainer = make_trainer(tmp_path, loss_type="grpo")
    batch = perturbed_batch(trainer, 0.0)
    whole = full_sequence_batch(batch)
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


def test_what_is_masked_does_not_matter():
    """Values on tokens of the environment change nothing; a row without an agent's token gives 0,
    not NaN.
    """
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
        other = masked_grpo_loss(torch.where(mask.bool(), logps, -7.0), batch, loss_type=loss_type)
        assert torch.isfinite(loss) and loss == other
    nothing = SimpleNamespace(**batch)
    nothing.completion_only_mask = torch.zeros_like(mask)
    assert masked_grpo_loss(logps, vars(nothing), loss_type="dapo") == 0.0
