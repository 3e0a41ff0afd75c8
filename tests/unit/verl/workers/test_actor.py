"""Tests of the policy update: what changes the weights, and independence of the micro-batches."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.policy_rows import (
    actor_of,
    critic_config,
    gradients,
    policy_config,
    random_rows,
    share_prefixes,
    wait_for_files,
)
from tests.helpers.tiny_model import make_tiny_policy
from verl.algos import LOSS_AGG_MODES
from verl.config.schema.actor_rollout_ref import PolicyLossConfig
from verl.names import POLICY_LOSSES
from verl.records import RestrictedTokenLoss
from verl.trainer.ppo import core_algos
from verl.workers import policy_loss
from verl.workers.actor import ActorWorker
from verl.workers.critic import CriticWorker
from verl.workers.engine_state import gather_full_weights
from verl.workers.mini_batches import make_mini_batches
from verl.workers.policy_loss import create_policy_loss
from verl.workers.rows import PADDING_ROWS, Rows

CHOICE = RestrictedTokenLoss((20, 21, 22, 23), weight=0.5, name="level")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1, std=0.2)


def first_step_gradients(worker, data, monkeypatch):
    """Return the gradients of the first optimizer step by parameter, and the metrics of the
    update.
    """
    first_gradients: dict[str, torch.Tensor] = {}

    def step():
        if not first_gradients:
            first_gradients.update(gradients(worker.train_engine.module))
        return original()

    original = worker.train_engine.step
    monkeypatch.setattr(worker.train_engine, "step", step)
    update = worker.update_actor if isinstance(worker, ActorWorker) else worker.update_critic
    return first_gradients, update(data).meta_info["metrics"]


def assert_same_tensors(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    tolerance = tolerance or {"atol": 2e-6, "rtol": 1e-4}
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], **tolerance)


def max_weight_change(worker, before):
    return max(
        (tensor - before[name]).abs().max().item()
        for name, tensor in gather_full_weights(worker.train_engine).items()
    )


def test_zero_advantages_do_not_change_the_weights(policy):
    """Neither momentum of an earlier step nor weight decay changes them."""
    worker, data = actor_of(policy, ppo_mini_batches=2, ppo_epochs=2), random_rows()
    zero_advantages = random_rows()
    zero_advantages.batch["advantages"] = torch.zeros_like(zero_advantages.batch["advantages"])
    before = gather_full_weights(worker.train_engine)
    metrics = worker.update_actor(zero_advantages).meta_info["metrics"]
    assert max_weight_change(worker, before) == 0.0
    assert metrics["actor/zero_steps"] == metrics["actor/optimizer_steps"] == 4
    worker.update_actor(data)
    before = gather_full_weights(worker.train_engine)
    worker.update_actor(zero_advantages)
    assert max_weight_change(worker, before) == 0.0


def test_rows_without_advantage_are_not_computed(policy, monkeypatch):
    """Gradient and loss still equal those of the whole mini-batch."""
    data, packs = random_rows(), []
    data.batch["advantages"][[0, 3, 4, 5, 7]] = 0.0
    pack = Rows.pack_rows

    def record_and_pack(self, rows, *args):
        packs.append(list(rows))
        return pack(self, rows, *args)

    monkeypatch.setattr(Rows, "pack_rows", record_and_pack)
    actual, metrics = first_step_gradients(actor_of(policy), data, monkeypatch)
    assert sorted(row for rows in packs for row in rows) == [1, 2, 6]
    packs.clear()
    with monkeypatch.context() as patch:
        patch.setattr(policy_loss, "ADVANTAGES_ONLY", set())
        expected, whole = first_step_gradients(actor_of(policy), data, monkeypatch)
    assert sorted(row for rows in packs for row in rows) == list(range(8))
    assert_same_tensors(actual, expected)
    assert metrics["actor/pg_loss"] == pytest.approx(whole["actor/pg_loss"], rel=1e-5)
    packs.clear()
    data.batch["advantages"][:] = 0.0
    metrics = actor_of(policy).update_actor(data).meta_info["metrics"]
    assert packs == [] and metrics["actor/pg_loss"] == 0.0 and metrics["actor/zero_steps"] == 1


@pytest.mark.parametrize(
    "term",
    [
        {"entropy_coeff": 0.1},
        {"use_kl_loss": True},
        {"policy_loss": PolicyLossConfig(loss_mode="of_this_test")},
    ],
)
def test_other_loss_terms_are_computed_on_all_rows(policy, monkeypatch, term):
    monkeypatch.setitem(
        core_algos.POLICY_LOSSES, "of_this_test", core_algos.compute_policy_loss_vanilla
    )
    section, data = actor_of(policy, **term).config.actor, random_rows()
    data.batch["advantages"][:] = 0.0
    assert create_policy_loss(section, data).rows_with_gradient(data, [2, 5]) == [2, 5]


@pytest.mark.parametrize("term", [{"entropy_coeff": 0.1}, {"use_kl_loss": True}])
def test_mini_batch_without_advantage_is_skipped_on_request(policy, term):
    """AdamW would take a step of full size along the rest of the loss."""
    data = random_rows()
    data.batch["ref_log_prob"] = data.batch["old_log_probs"] - 0.1
    data.batch["advantages"][:] = 0.0
    for skips in (False, True):
        worker = actor_of(policy, skip_without_advantage=skips, **term)
        before = gather_full_weights(worker.train_engine)
        metrics = worker.update_actor(data).meta_info["metrics"]
        assert (max_weight_change(worker, before) == 0.0) == skips
        assert metrics["actor/zero_steps"] == float(skips)


def test_mini_batch_with_an_advantage_keeps_its_other_terms(policy, monkeypatch):
    data = random_rows()
    data.batch["advantages"][1:] = 0.0
    plain, _ = first_step_gradients(actor_of(policy, entropy_coeff=0.1), data, monkeypatch)
    skipping = actor_of(policy, entropy_coeff=0.1, skip_without_advantage=True)
    actual, _ = first_step_gradients(skipping, data, monkeypatch)
    assert_same_tensors(actual, plain)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_micro_batches_do_not_change_the_gradient(policy, monkeypatch, mode):
    """Every term of the loss is on, and the rows have weights."""
    terms = {"loss_agg_mode": mode, "entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2}
    terms["loss_scale_factor"] = 30.0
    data = random_rows()
    data.meta_info["choice"] = CHOICE
    whole, metrics = first_step_gradients(
        actor_of(policy, ppo_micro_batch_size_per_gpu=8, **terms), data, monkeypatch
    )
    for limits in (
        {"ppo_micro_batch_size_per_gpu": 1},
        {"ppo_micro_batch_size_per_gpu": 3},
        {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 60},
    ):
        split, split_metrics = first_step_gradients(
            actor_of(policy, **terms, **limits), data, monkeypatch
        )
        assert_same_tensors(split, whole)
        for key in (k for k in metrics if k.startswith("actor/")):
            assert split_metrics[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key


def make_tree_actor(policy, prefix_tree, **values):
    config = policy_config(policy, **values)
    config.model.prefix_tree = prefix_tree
    worker = ActorWorker(config, device="cpu")
    worker.init_model()
    return worker


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_merged_rows_do_not_change_log_probs_and_gradient(policy, monkeypatch, mode):
    terms = {"loss_agg_mode": mode, "entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2}
    data = share_prefixes(random_rows())
    plain = make_tree_actor(policy, False, **terms)
    log_probs = plain.compute_log_prob(data).batch["old_log_probs"]
    expected, plain_metrics = first_step_gradients(plain, data, monkeypatch)
    ratios = []
    for limits in (
        {"ppo_micro_batch_size_per_gpu": 8},
        {"ppo_micro_batch_size_per_gpu": 1},
        {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 60},
    ):
        worker = make_tree_actor(policy, True, **terms, **limits)
        scored = worker.compute_log_prob(data)
        torch.testing.assert_close(scored.batch["old_log_probs"], log_probs, atol=1e-5, rtol=0)
        merged, metrics = first_step_gradients(worker, data, monkeypatch)
        assert_same_tensors(merged, expected)
        for key in (k for k in metrics if k.startswith("actor/")):
            assert metrics[key] == pytest.approx(plain_metrics[key], rel=1e-4, abs=1e-6), key
        assert metrics["perf/update_actor_tokens"] == plain_metrics["perf/update_actor_tokens"]
        ratios.append(metrics["perf/tree_token_ratio"])
        assert metrics["perf/tree_token_ratio/log_prob"] == ratios[-1]
    assert plain_metrics["perf/tree_token_ratio"] == 1.0
    tokens = [row.tolist() for row in Rows(data).tokens]
    prefixes = {tuple(row[:end]) for row in tokens for end in range(1, len(row) + 1)}
    assert ratios[0] == pytest.approx(sum(map(len, tokens)) / len(prefixes))
    assert ratios[0] >= ratios[2] > 1.0


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_micro_batches_of_a_tree_keep_the_limit_where_rows_share_little(policy, monkeypatch, role):
    """20 rows share 2 of 36 tokens, too few for ``auto``; with 6 rows that share 30, it merges."""
    data = random_rows(rows=26)
    data.batch["attention_mask"][:] = 1
    data.batch["input_ids"][:20, :2] = 3
    data.batch["input_ids"][20:, :30] = 4
    data.batch["input_ids"][:, 30] = torch.arange(100, 126)
    data.batch["responses"] = data.batch["input_ids"][:, -data.batch["responses"].shape[1] :]
    limits = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 342}
    if role == "actor":
        worker = make_tree_actor(policy, "auto", **limits)
        calls = (worker.compute_log_prob, worker.update_actor)
    else:
        worker = CriticWorker(
            critic_config(policy, forward_max_token_len_per_gpu=342, **limits), device="cpu"
        )
        worker.init_model()
        calls = (worker.compute_values, worker.update_critic)
    sizes, pack = [], Rows.pack_rows

    def pack_and_record(self, *args):
        packed = pack(self, *args)
        sizes.append(len(packed.input_ids))
        return packed

    monkeypatch.setattr(Rows, "pack_rows", pack_and_record)
    for call in calls:
        sizes.clear()
        call(data)
        assert sizes == [36 + 9 * 34, 36 + 9 * 34, 36 + 5 * 6]


def test_merged_rows_do_not_change_values_and_their_gradient(policy, monkeypatch):
    data, results = share_prefixes(random_rows()), []
    for prefix_tree in (False, True):
        config = critic_config(policy)
        config.model.prefix_tree = prefix_tree
        critic = CriticWorker(config, device="cpu")
        critic.init_model()
        torch.nn.init.normal_(
            critic.train_engine.module.head_weight, generator=torch.Generator().manual_seed(0)
        )
        values = critic.compute_values(data).batch["values"]
        results.append((values, *first_step_gradients(critic, data, monkeypatch)))
    (expected, plain_gradients, plain), (values, merged_gradients, merged) = results
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    assert_same_tensors(merged_gradients, plain_gradients)
    assert plain["perf/tree_token_ratio/critic"] == 1.0 < merged["perf/tree_token_ratio/critic"]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_micro_batches_do_not_change_the_gradient_of_any_loss(policy, monkeypatch, name):
    loss_config = PolicyLossConfig(
        loss_mode=name, clip_cov_ratio=0.2, clip_cov_lb=0.0, kl_cov_ratio=0.2, ppo_kl_coef=0.5
    )
    terms = {"policy_loss": loss_config, "tau_neg": 1.5}
    data = random_rows()
    data.batch["old_log_probs"][data.batch["response_mask"] == 0] = torch.nan
    whole, metrics = first_step_gradients(actor_of(policy, **terms), data, monkeypatch)
    assert any(gradient.any() for gradient in whole.values())
    worker = actor_of(policy, ppo_micro_batch_size_per_gpu=3, **terms)
    split, split_metrics = first_step_gradients(worker, data, monkeypatch)
    assert_same_tensors(split, whole)
    for key in ("actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"):
        assert split_metrics[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key


def test_loss_reads_its_settings(policy):
    kl_cov = PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.0, ppo_kl_coef=0.25)
    data = random_rows()
    section = actor_of(policy, policy_loss=kl_cov).config.actor
    loss = create_policy_loss(section, data)
    assert loss.params == {"ppo_kl_coef": 0.25}
    mask = data.batch["response_mask"]
    token_selector = loss.make_token_selector(data, [0, 1, 2])
    assert token_selector is not None
    assert not token_selector.select_tokens(
        data.batch["old_log_probs"], data.batch["advantages"], mask
    ).any()
    sapo = PolicyLossConfig(loss_mode="sapo")
    section = actor_of(policy, policy_loss=sapo, tau_pos=0.5).config.actor
    loss = create_policy_loss(section, data)
    assert (
        loss.params == {"tau_pos": 0.5, "tau_neg": 1.05}
        and loss.make_token_selector(data, [0]) is None
    )


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradient_equals_that_of_the_written_out_loss(policy, monkeypatch, mode):
    """On-policy, the gradient of the clipped surrogate is that of sum_i c_i A_i log p_i, with the
    coefficients c_i of the mode.
    """
    worker, data = actor_of(policy, loss_agg_mode=mode, loss_scale_factor=30.0), random_rows()
    data.batch["old_log_probs"] = worker.compute_log_prob(data).batch["old_log_probs"]
    mask, shares = data.batch["response_mask"].float(), data.batch["row_shares"]
    tokens = mask.sum(-1)
    coefficients = {
        "token-mean": torch.ones_like(shares) / tokens.sum(),
        "token-sum": torch.ones_like(shares),
        "seq-mean-token-sum": torch.ones_like(shares) / shares.sum(),
        "seq-mean-token-mean": shares / shares.sum() / tokens,
        "seq-mean-token-sum-norm": torch.ones_like(shares) / shares.sum() / 30.0,
    }[mode]
    lm = actor_of(policy)
    rows = Rows(data)
    packed = rows.pack_rows(range(len(rows)))
    targets = rows.sampled_targets(packed, range(len(rows)))
    scores = lm.train_engine.module(
        packed.input_ids, packed.position_ids, packed.layout, [targets]
    )[0]
    new = rows.scatter_to_responses(scores.log_probs, range(len(rows)))
    (-(coefficients[:, None] * mask * data.batch["advantages"] * new).sum()).backward()
    expected = gradients(lm.train_engine.module)
    actual, metrics = first_step_gradients(worker, data, monkeypatch)
    assert_same_tensors(actual, expected)
    loss = -(coefficients[:, None] * mask * data.batch["advantages"]).sum().item()
    assert metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-5)


def test_kl_loss_moves_the_policy_towards_the_reference(policy):
    """With zero advantages, steps on the KL term alone reduce the KL to the reference."""
    worker, data = actor_of(policy, use_kl_loss=True, kl_loss_coef=1.0), random_rows()
    reference = make_reference(policy, data)
    data.batch["advantages"] = torch.zeros_like(data.batch["advantages"])
    data.batch["ref_log_prob"] = reference
    first = worker.update_actor(data).meta_info["metrics"]["actor/kl_loss"]
    later = [worker.update_actor(data).meta_info["metrics"]["actor/kl_loss"] for _ in range(4)]
    assert 0 < later[-1] < first


def make_reference(policy, data):
    """Return log-probs of the policy after a few other steps."""
    other = actor_of(policy)
    for _ in range(3):
        other.update_actor(data)
    return other.compute_log_prob(data).batch["old_log_probs"]


def test_reference_worker_scores_and_does_not_train(policy):
    data = random_rows()
    reference = ActorWorker(policy_config(policy), role="ref", device="cpu")
    reference.init_model()
    actual = reference.compute_ref_log_prob(data).batch["ref_log_prob"]
    torch.testing.assert_close(
        actual, actor_of(policy).compute_log_prob(data).batch["old_log_probs"]
    )
    assert not any(p.requires_grad for p in reference.train_engine.module.parameters())
    with pytest.raises(RuntimeError):
        reference.update_actor(data)


def test_level_entropy_bonus_raises_the_choice_entropy(policy):
    """The advantages are zero, so the bonus is the only term of the loss."""
    worker, data = actor_of(policy), random_rows()
    data.batch["advantages"] = torch.zeros_like(data.batch["advantages"])
    data.meta_info["choice"] = CHOICE
    first = worker.update_actor(data).meta_info["metrics"]["actor/level_entropy"]
    later = [
        worker.update_actor(data).meta_info["metrics"]["actor/level_entropy"] for _ in range(4)
    ]
    assert first < later[-1] <= torch.tensor(4.0).log().item() + 1e-5


def test_choice_entropy_uses_the_restricted_softmax(policy):
    data = random_rows()
    data.meta_info["choice"] = replace(CHOICE, weight=0.0)
    metrics = actor_of(policy).update_actor(data).meta_info["metrics"]
    model, batch = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32), data.batch
    with torch.no_grad():
        logits = compute_logits(model, batch)
    choice = logits[..., list(CHOICE.token_ids)].log_softmax(-1)
    entropy = -(choice.exp() * choice).sum(-1)
    expected = entropy[batch["choice_mask"].bool()].mean().item()
    assert metrics["actor/level_entropy"] == pytest.approx(expected, abs=1e-5)


def add_restricted_token_columns(data, model, posterior=None, credit=None):
    """Add ``CHOICE`` with old log-probs of ``model``; ``posterior`` and ``credit`` are [B, R,
    4].
    """
    data.meta_info["choice"] = replace(CHOICE, weight=0.0)
    logits = compute_logits(model, data.batch)
    old = logits.log_softmax(-1)[..., list(CHOICE.token_ids)]
    is_restricted = data.batch["choice_mask"].unsqueeze(-1).float()
    data.batch["choice_old_log_probs"] = (old * is_restricted).detach()
    if posterior is not None:
        data.batch["choice_posterior"] = posterior * is_restricted
    if credit is not None:
        data.batch["choice_credit"] = credit * is_restricted


def compute_logits(model, batch):
    """Return the logits that predict the response, [B, R, V], from a plain forward."""
    return model(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        position_ids=batch["position_ids"],
    ).logits[:, -batch["responses"].shape[1] - 1 : -1]


def test_one_hot_posterior_of_the_sampled_token_changes_nothing(policy, monkeypatch):
    data = random_rows()
    # Every sampled choice is the second token of ``CHOICE``.
    data.batch["responses"][data.batch["choice_mask"].bool()] = CHOICE.token_ids[1]
    data.batch["input_ids"][:, -data.batch["responses"].shape[1] :] = data.batch["responses"]
    data.batch["old_log_probs"] = actor_of(policy).compute_log_prob(data).batch["old_log_probs"]
    expected, _ = first_step_gradients(actor_of(policy), data, monkeypatch)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    shape = (*data.batch["responses"].shape, 4)
    one_hot = torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(shape)
    add_restricted_token_columns(data, model, posterior=one_hot)
    actual, _ = first_step_gradients(actor_of(policy), data, monkeypatch)
    assert_same_tensors(actual, expected)


@pytest.mark.parametrize("kl_loss_coef", [0.0, 0.5])
def test_gradient_of_posterior_and_credit_equals_the_formula(policy, monkeypatch, kl_loss_coef):
    """On-policy: ``sum_k (posterior_k A + credit_k) grad log p_k`` at choices, ``A grad log p``
    elsewhere. The KL term is that of the sampled token everywhere.
    """
    kl_keys = {"use_kl_loss": kl_loss_coef > 0, "kl_loss_type": "k2", "kl_loss_coef": kl_loss_coef}
    worker = actor_of(policy, loss_agg_mode="token-mean", **kl_keys)
    data = random_rows()
    data.batch["old_log_probs"] = worker.compute_log_prob(data).batch["old_log_probs"]
    g = torch.Generator().manual_seed(7)
    shape = (*data.batch["responses"].shape, 4)
    posterior = torch.rand(shape, generator=g).softmax(-1)
    credit = torch.randn(shape, generator=g)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    add_restricted_token_columns(data, model, posterior, credit)
    actual, _ = first_step_gradients(worker, data, monkeypatch)

    mask, is_restricted = data.batch["response_mask"].float(), data.batch["choice_mask"].float()
    assert is_restricted.sum() > 3
    log_probs = compute_logits(model, data.batch).log_softmax(-1)
    token_log_probs = log_probs.gather(-1, data.batch["responses"].unsqueeze(-1)).squeeze(-1)
    advantages = data.batch["advantages"]
    weights = posterior * advantages.unsqueeze(-1) + credit
    at_restricted_tokens = (weights * log_probs[..., list(CHOICE.token_ids)]).sum(-1)
    terms = torch.where(is_restricted.bool(), at_restricted_tokens, advantages * token_log_probs)
    difference = token_log_probs - data.batch["ref_log_prob"]
    terms = terms - kl_loss_coef * difference.square() / 2
    (-(mask * terms).sum() / mask.sum()).backward()
    expected = dict(model.named_parameters())
    for name, gradient in actual.items():
        torch.testing.assert_close(
            gradient, expected[name.removeprefix("lm.")].grad, atol=2e-6, rtol=1e-3
        )


def test_credit_of_a_choice_is_clipped_per_token(policy, monkeypatch):
    """A token whose ratio left the clip range in the direction of its credit has no gradient."""
    data = random_rows()
    data.batch["advantages"][:] = 0.0
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    shape = (*data.batch["responses"].shape, 4)
    add_restricted_token_columns(data, model, credit=torch.ones(shape))
    data.batch["choice_old_log_probs"] -= data.batch["choice_mask"].unsqueeze(-1).float()
    # Every ratio is e: above 1.2 with positive credit.
    raised, _ = first_step_gradients(actor_of(policy), data, monkeypatch)
    assert max(gradient.abs().max() for gradient in raised.values()) == 0.0
    data.batch["choice_credit"] *= -1
    lowered, _ = first_step_gradients(actor_of(policy), data, monkeypatch)
    assert max(gradient.abs().max() for gradient in lowered.values()) > 1e-4


def test_rows_with_credit_only_are_computed(policy):
    data = random_rows()
    data.batch["advantages"][:] = 0.0
    credit = torch.zeros(*data.batch["responses"].shape, 4)
    first_sampled = int(data.batch["response_mask"][3].argmax())
    credit[3, first_sampled, 2] = 1.0
    data.batch["choice_credit"] = credit
    loss = create_policy_loss(actor_of(policy).config.actor, data)
    assert loss.rows_with_advantage(data, list(range(len(data)))) == [3]


def test_padding_rows_do_not_count(policy, monkeypatch):
    """The dispatcher repeats rows so that all ranks have as many."""
    data = random_rows(rows=6)
    plain, _ = first_step_gradients(actor_of(policy), data, monkeypatch)
    padded = data.select_idxs([0, 1, 2, 3, 4, 5, 0, 1])
    padded.meta_info[PADDING_ROWS] = 2
    actual, _ = first_step_gradients(actor_of(policy), padded, monkeypatch)
    assert_same_tensors(actual, plain, atol=0, rtol=0)


def test_nan_advantage_skips_only_its_own_step(policy):
    worker, data = actor_of(policy, ppo_mini_batches=2), random_rows()
    data.batch["advantages"][0] = float("nan")
    before = gather_full_weights(worker.train_engine)
    metrics = worker.update_actor(data).meta_info["metrics"]
    assert metrics["actor/skipped_steps"] == 1 and metrics["actor/optimizer_steps"] == 2
    assert max_weight_change(worker, before) > 0
    assert all(
        torch.isfinite(tensor).all() for tensor in gather_full_weights(worker.train_engine).values()
    )


def test_positive_advantages_raise_the_log_probs(policy):
    worker, data = actor_of(policy), random_rows()
    data.batch["advantages"] = data.batch["response_mask"].float()
    before = worker.compute_log_prob(data).batch["old_log_probs"]
    data.batch["old_log_probs"] = before
    worker.update_actor(data)
    assert worker.compute_log_prob(data).batch["old_log_probs"].sum() > before.sum()


def test_mini_batches_keep_trajectories_and_groups_whole():
    data = random_rows(rows=16, group=4)  # 8 trajectories of 2 rows, 4 groups of 2 trajectories
    for steps in (1, 2, 4):
        mini_batch_rows = make_mini_batches(data, seed=1, num_steps=steps)
        assert sorted(row for part in mini_batch_rows for row in part) == list(range(16))
        groups = [{data.non_tensor_batch["uid"][row] for row in part} for part in mini_batch_rows]
        assert sum(len(part) for part in groups) == 4  # no group is cut
    assert len(make_mini_batches(data, seed=1, tasks_per_step=2)) == 2
    assert len(make_mini_batches(data, seed=1, tasks_per_step=100)) == 1
    mini_batch_rows = make_mini_batches(data, seed=1, num_steps=8)
    assert all(
        len({data.non_tensor_batch["traj_uid"][row] for row in part}) == 1
        for part in mini_batch_rows
    )
    assert len(make_mini_batches(data, seed=1, num_steps=50)) == 8  # no more than trajectories


def test_mini_batches_ignore_row_order_and_row_count():
    """The same trajectories share a step in any row order and with any number of rows each."""
    data = random_rows(rows=16)

    def list_trajectories(table):
        parts = make_mini_batches(table, seed=5, num_steps=4)
        return [sorted({table.non_tensor_batch["traj_uid"][row] for row in part}) for part in parts]

    expected = list_trajectories(data)
    assert list_trajectories(data[::2]) == expected
    shuffled = data.select_idxs(torch.randperm(16, generator=torch.Generator().manual_seed(0)))
    assert list_trajectories(shuffled) == expected
    assert [make_mini_batches(data, seed, num_steps=4) for seed in range(4)] != [
        make_mini_batches(data, 5, num_steps=4)
    ] * 4


def test_critic_micro_batches_do_not_change_the_gradient(policy, monkeypatch):
    data, gradients = random_rows(), []
    for size in (8, 3, 1):
        critic = CriticWorker(
            critic_config(policy, ppo_micro_batch_size_per_gpu=size), device="cpu"
        )
        critic.init_model()
        gradients.append(first_step_gradients(critic, data, monkeypatch)[0])
    assert_same_tensors(gradients[1], gradients[0])
    assert_same_tensors(gradients[2], gradients[0])


def test_critic_starts_at_zero_and_learns_the_returns(policy, tmp_path):
    critic = CriticWorker(critic_config(policy, cliprange_value=100.0), device="cpu")
    critic.init_model()
    data = random_rows()
    data.batch["values"] = critic.compute_values(data).batch["values"]
    assert (data.batch["values"] == 0).all()
    losses = [critic.update_critic(data).meta_info["metrics"]["critic/vf_loss"] for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]
    values = critic.compute_values(data).batch["values"]
    assert (values[~data.batch["response_mask"].bool()] == 0).all()
    critic.save_checkpoint(str(tmp_path))
    wait_for_files(critic)
    loaded = CriticWorker(critic_config(policy), seed=1, device="cpu")
    loaded.init_model()
    loaded.load_checkpoint(str(tmp_path))
    torch.testing.assert_close(loaded.compute_values(data).batch["values"], values)
