"""Tests that two gloo ranks equal one rank in scores, gradients, weights, values and
checkpoints.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.policy_rows import (
    add_branches,
    critic_config,
    policy_config,
    random_rows,
    share_prefixes,
    wait_for_files,
)
from tests.helpers.ranks import run_two_ranks
from tests.helpers.tiny_model import make_tiny_policy
from verl.algos import LOSS_AGG_MODES
from verl.config.schema.actor_rollout_ref import PolicyLossConfig
from verl.protocol import DataProto
from verl.records import RestrictedTokenLoss
from verl.single_controller.base.decorator import (
    ROWS_PER_RANK,
    Dispatch,
    MethodRegistration,
    plan_calls,
)
from verl.workers.actor import ActorWorker
from verl.workers.collectives import get_rank
from verl.workers.critic import CriticWorker
from verl.workers.engine_state import gather_full_weights

EPS = 1e-2  # AdamW would turn rounding errors of vanishing gradients into whole steps
ROWS = 7  # odd, so that the second rank gets a padding row
PLAIN = (
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)  # advantages are the only term of the loss
LONE = "one row"  # the second rank has only a padding copy of it
PICKING = "kl_cov"  # a loss that picks tokens by numbers of all ranks
UNEVEN = "five rows and two"  # rows are assigned to ranks by their tokens
JOINT = "rows computed by both"  # each rank takes a part of the tokens, and of the heads
TREE = "rows that share prefixes"
JOINT_TREE = "rows that share prefixes, computed by both"
MODES = (
    *("token-mean", "seq-mean-token-mean", *PLAIN),
    *(LONE, PICKING, UNEVEN, JOINT, TREE, JOINT_TREE),
)


def make_batch(mode: str) -> DataProto:
    """Return three groups; the last has one row, so a rank sometimes has none of a mini-batch.

    In the plain modes the rows of the second rank have no advantage: it has nothing to compute.
    """
    data = random_rows(rows=ROWS, group=3)
    data = add_branches(share_prefixes(data) if mode in (TREE, JOINT_TREE) else data)
    if mode in PLAIN:
        data.batch["advantages"][4:] = 0.0
    else:
        data.meta_info["choice"] = RestrictedTokenLoss((20, 21, 22, 23), weight=0.3)
    return data[:1] if mode == LONE else data


def get_sequence_ranks(mode):
    return int(os.environ.get("WORLD_SIZE", "1")) if mode in (JOINT, JOINT_TREE) else 1


def make_config(path, mode):
    aggregation = mode if mode in LOSS_AGG_MODES else "token-mean"
    terms = {
        "loss_agg_mode": aggregation,
        "ppo_mini_batches": 3,
        "ppo_micro_batch_size_per_gpu": 2,
        "loss_scale_factor": 30.0,
    }
    if mode not in PLAIN:
        terms |= {"entropy_coeff": 0.05, "use_kl_loss": True}
    if mode == PICKING:
        terms["policy_loss"] = PolicyLossConfig(loss_mode=PICKING, kl_cov_ratio=0.2)
    config = policy_config(path, **terms)
    config.model.prefix_tree = mode in (TREE, JOINT_TREE)
    config.actor.optim.eps = EPS
    config.actor.ulysses_sequence_parallel_size = get_sequence_ranks(mode)
    config.actor.fsdp_config.reduce_every_micro_batch = mode != "token-mean"
    return config


def train(path, data, directory, mode):
    """Run one rank's part of a small training; return tensors by name, and metrics."""
    worker = ActorWorker(make_config(path, mode), device="cpu", seed=3)
    worker.init_model()
    scored = worker.compute_log_prob(data)
    metrics = worker.update_actor(data).meta_info["metrics"]
    worker.save_checkpoint(str(directory / "actor"))
    written = wait_for_files(worker)
    note = {"writer": written.writer, "sizes": dict(written.sizes)}
    (directory / f"written{get_rank()}.json").write_text(json.dumps(note))
    values = critic_config(path, ppo_mini_batches=2)
    values.ulysses_sequence_parallel_size = get_sequence_ranks(mode)
    values.optim.eps = EPS
    values.model.prefix_tree = mode in (TREE, JOINT_TREE)
    critic = CriticWorker(values, device="cpu", seed=3)
    critic.init_model()
    metrics |= critic.update_critic(data).meta_info["metrics"]
    tensors = {name: torch.from_numpy(value) for name, value in worker.export_weights()}
    tensors |= {
        f"critic.{name}": tensor
        for name, tensor in gather_full_weights(critic.train_engine).items()
    }
    tensors["rows.log_probs"] = scored.batch["old_log_probs"]
    tensors["rows.entropys"] = scored.batch["entropys"]
    tensors["rows.values"] = critic.compute_values(data).batch["values"]
    records = [
        r
        for key in ("branch_scores", "span_scores")
        for row in scored.non_tensor_batch[key]
        for r in row
    ]
    numbers = [[r.logprob, r.entropy, r.mean_prob, r.num_tokens] for r in records]
    tensors["records"] = torch.tensor(numbers, dtype=torch.float64)
    return tensors, metrics


def run_rank(number, path, directory):
    registration = MethodRegistration(Dispatch.DP_COMPUTE_PROTO)
    for mode in MODES:
        data = make_batch(mode)
        if mode == UNEVEN:
            data.meta_info[ROWS_PER_RANK] = [5, 2]
        calls, _ = plan_calls(registration, 2, (data,), {})
        (data,), _ = calls[number]
        mode_directory = directory / mode
        mode_directory.mkdir(exist_ok=True)
        tensors, metrics = train(path, data, mode_directory, mode)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            mode_directory / f"rank{number}.safetensors",
        )
        (mode_directory / f"rank{number}.json").write_text(json.dumps(metrics))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=32, layers=1, std=0.2)


@pytest.fixture(scope="module")
def two_ranks(policy, tmp_path_factory):
    """Return the directory with the results of two ranks, one folder for each mode."""
    directory = tmp_path_factory.mktemp("two")
    run_two_ranks(run_rank, policy, directory)
    return directory


@pytest.fixture(scope="module", params=MODES)
def both(request, policy, two_ranks, tmp_path_factory):
    """Return (tensors, metrics, directory) of one rank, the same lists of two ranks, and the
    mode.
    """
    alone, pair = tmp_path_factory.mktemp("one"), two_ranks / request.param
    tensors, metrics = train(policy, make_batch(request.param), alone, request.param)
    ranks = [load_file(pair / f"rank{number}.safetensors") for number in (0, 1)]
    reports = [json.loads((pair / f"rank{number}.json").read_text()) for number in (0, 1)]
    return (tensors, metrics, alone), (ranks, reports, pair), request.param


def test_weights_after_an_update_are_equal(both):
    (tensors, _, _), (ranks, _, _), _ = both
    weights = [name for name in tensors if not name.startswith(("rows.", "records"))]
    assert any(name.startswith("critic.") for name in weights)
    for name in weights:
        torch.testing.assert_close(ranks[0][name], tensors[name], atol=2e-6, rtol=1e-4, msg=name)
    assert not any(name in ranks[1] for name in weights)  # only rank 0 exports weights


def test_scores_and_values_are_equal(both):
    (tensors, _, _), (ranks, _, _), _ = both
    for name in ("rows.log_probs", "rows.entropys", "rows.values"):
        joined = torch.cat([rank[name] for rank in ranks])[: len(tensors[name])]
        torch.testing.assert_close(joined, tensors[name], atol=1e-5, rtol=1e-4, msg=name)
    assert len(ranks[0]["records"]) + len(ranks[1]["records"]) >= len(tensors["records"])
    for record in tensors["records"]:  # padding repeats branches and spans, and their order changes
        together = torch.cat([rank["records"] for rank in ranks])
        assert (together - record).abs().max(dim=1).values.min() < 1e-5


def test_metrics_are_equal_on_both_ranks(both):
    (_, metrics, _), (_, reports, _), mode = both
    assert (metrics["actor/zero_steps"] > 0) == (mode in PLAIN)
    cost = ("seconds", "memory_used_gb", "tflops")
    for name in (n for n in metrics if not any(part in n for part in cost)):
        assert reports[1][name] == reports[0][name], name
        # Which rows share a pass depends on the rank that has them.
        if "tree_token_ratio" in name:
            assert (reports[0][name] > 1.0) == (metrics[name] > 1.0), name
        else:
            assert reports[0][name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-6), name


def test_every_rank_lists_its_own_checkpoint_files(both):
    _, (_, _, pair), _ = both
    notes = [json.loads((pair / f"written{number}.json").read_text()) for number in (0, 1)]
    assert [note["writer"].split(" on ")[0] for note in notes] == [
        "ActorWorker rank 0",
        "ActorWorker rank 1",
    ]
    assert sorted(Path(path).name for path in notes[1]["sizes"]) == [
        "rng_rank1.safetensors",
        # Weights and two moments. The step counters are the same on all ranks, and rank 0 writes
        # them.
        *(f"shard-00002-model-0000{kind}-of-00004.safetensors" for kind in (1, 2, 3)),
    ]
    files = {str(path): path.stat().st_size for path in (pair / "actor").iterdir()}
    assert notes[0]["sizes"] | notes[1]["sizes"] == files
    assert not notes[0]["sizes"].keys() & notes[1]["sizes"].keys()


def test_checkpoint_of_two_ranks_continues_on_one(policy, both):
    (tensors, _, alone), (_, _, pair), mode = both
    after = []
    for directory in (alone, pair):
        worker = ActorWorker(make_config(policy, mode), device="cpu", seed=3)
        worker.init_model()
        worker.load_checkpoint(str(directory / "actor"))
        worker.update_actor(make_batch(mode))
        after.append(dict(worker.export_weights()))
    for name, value in after[0].items():
        assert np.abs(value - tensors[name].numpy()).max() > 0
        np.testing.assert_allclose(after[1][name], value, atol=4e-6, rtol=1e-3, err_msg=name)
