"""Tests that two ranks that compute rows together equal one rank in scores and gradients."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config

from tests.helpers.policy_rows import add_branches, gradients, random_rows
from tests.helpers.ranks import run_two_ranks
from tests.helpers.refusals import mentions, missing_parts
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.schema.model import OptimConfig
from verl.models import sequence_parallel
from verl.models.loader import load_causal_lm
from verl.models.policy import PolicyModel
from verl.models.prefix_tree import pack_rows
from verl.models.sequence_parallel import create_sequence_group
from verl.records import BranchRequest
from verl.workers.branch_scores import compute_log_probs_and_scores
from verl.workers.collectives import TIMEOUT
from verl.workers.engine import TrainEngine
from verl.workers.mini_batches import split_into_micro_batches
from verl.workers.rows import MicroBatchLimits, Rows

OPTIM = OptimConfig()
PLAIN, CHECKPOINTED, FLEX = "plain", "checkpointed", "flex"
CASES = (PLAIN, CHECKPOINTED, FLEX)


def make_engine(policy: Path, case: str, ranks: int) -> TrainEngine:
    lm = load_causal_lm(
        policy,
        gradient_checkpointing=case == CHECKPOINTED,
        attention="flex" if case == FLEX else "sdpa",
    )
    optim = None if case == FLEX else OPTIM  # torch has no gradient of flex attention on a CPU
    return TrainEngine(PolicyModel(lm), device="cpu", optim=optim, sequence_ranks=ranks)


def make_rows(rank: int):
    """Return the rows of a rank: each rank has other numbers of rows, tokens and branches."""
    return add_branches(random_rows(rows=2 + rank, seed=rank), seed=rank)


def compute_numbers(
    policy: Path, case: str, ranks: int, owners: list[int]
) -> dict[str, torch.Tensor]:
    """Return the scores of the rows of ``owners``, and the gradient of their log-probs."""
    engine = make_engine(policy, case, ranks)
    numbers: dict[str, torch.Tensor] = {}
    for owner in owners:
        scores = compute_log_probs_and_scores(engine, make_rows(owner), max_rows=2)
        numbers[f"log_probs {owner}"] = scores.log_probs
        numbers[f"entropy {owner}"] = scores.entropy
        assert scores.branch_scores is not None
        records = [record for row in scores.branch_scores for record in row]
        numbers[f"branches {owner}"] = torch.tensor([[r.logprob, r.entropy] for r in records])
    if case == FLEX:
        return numbers
    engine.module.train()
    for turn in range(ranks):
        if not engine.begin_pass_for_rank(turn):
            engine.backward(
                engine.module.compute_zero_loss(), is_last_micro_batch=turn == ranks - 1
            )
            continue
        for number, owner in enumerate(owners):
            rows = Rows(make_rows(owner))
            index = list(range(len(rows)))
            packed = rows.pack_rows(index)
            inputs = (packed.input_ids, packed.position_ids, packed.layout)
            scores = engine.module(*inputs, [rows.sampled_targets(packed, index)])[0]
            loss = (scores.log_probs + 0.1 * scores.required_entropy).sum() / 50
            engine.backward(
                loss, is_last_micro_batch=number == len(owners) - 1 and turn == ranks - 1
            )
    return numbers | {f"gradient {name}": value for name, value in gradients(engine.module).items()}


def run_rank(rank: int, policy: Path, directory: Path) -> None:
    dist.init_process_group("gloo")
    for case in CASES:
        save_file(compute_numbers(policy, case, 2, [rank]), directory / f"{case}.{rank}")
    messages = []
    for size in (3, 4):
        config = Qwen3Config(num_attention_heads=12, num_key_value_heads=2)
        with pytest.raises(ValueError) as error:
            create_sequence_group(config, size, "cpu", TIMEOUT)
        messages.append(str(error.value))
    (directory / f"messages.{rank}.json").write_text(json.dumps(messages))


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The policy has four query heads and two key heads, one key head for each rank."""
    return make_tiny_policy(
        tmp_path_factory.mktemp("policy"), hidden=128, layers=2, std=0.2, tie=False
    )


@pytest.fixture(scope="module")
def joint_results(policy, tmp_path_factory):
    directory = tmp_path_factory.mktemp("together")
    run_two_ranks(run_rank, policy, directory)
    return directory


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_rank(policy, joint_results, case):
    alone = compute_numbers(policy, case, 1, [0, 1])
    joint = [load_file(joint_results / f"{case}.{rank}") for rank in (0, 1)]
    assert any(name.startswith("gradient lm.lm_head") for name in alone) == (case != FLEX)
    for name, expected in alone.items():
        kind, _, owner = name.partition(" ")
        if kind != "gradient":
            torch.testing.assert_close(joint[int(owner)][name], expected, atol=1e-5, rtol=1e-4)
            continue
        assert expected.abs().max() > 0
        for actual in joint:  # reduced over the ranks
            torch.testing.assert_close(actual[name], expected, atol=1e-6, rtol=1e-4, msg=name)


def test_impossible_sizes_are_refused(joint_results):
    for rank in (0, 1):
        heads, ranks = json.loads((joint_results / f"messages.{rank}.json").read_text())
        assert "ulysses_sequence_parallel_size=3: " in heads and "[1, 2, 4, 6, 12]" in heads
        assert not missing_parts(ranks, "ulysses_sequence_parallel_size=4", 2)


@pytest.mark.parametrize("nested", [False, True])
def test_rotations_that_depend_on_the_longest_position_are_refused(nested):
    config = Qwen3Config(num_attention_heads=4, num_key_value_heads=2)
    for kind in ("dynamic", "longrope"):
        rope = {"rope_type": kind}
        config.rope_parameters = {"full_attention": rope} if nested else rope
        with pytest.raises(
            ValueError, check=mentions(f"({kind})", "ulysses_sequence_parallel_size=1")
        ):
            create_sequence_group(config, 2, "cpu", TIMEOUT)
    assert create_sequence_group(config, 1, "cpu", TIMEOUT) is None


def test_layout_survives_encoding():
    rows = [torch.arange(7), torch.arange(8), torch.arange(3)]
    branches = [
        [BranchRequest(4, [1, 2]), BranchRequest(2, [3])],
        [],
        [BranchRequest(3, list(range(99))), BranchRequest(1, [4])],
    ]
    for packed in (pack_rows(rows), pack_rows(rows, branches), pack_rows(rows, prefix_tree=True)):
        numbers = sequence_parallel._encode_layout(packed.layout)
        assert sequence_parallel._decode_layout(numbers) == packed.layout


def test_joint_ranks_hold_more_tokens_per_micro_batch(policy):
    engine = make_engine(policy, PLAIN, 1)
    by_tokens = MicroBatchLimits(max_tokens=10)
    assert split_into_micro_batches(engine, [6, 6, 6], by_tokens)[0] == [[0], [1], [2]]
    engine.sequence_ranks = 2
    assert split_into_micro_batches(engine, [6, 6, 6], by_tokens)[0] == [[0, 1, 2]]
    by_rows = MicroBatchLimits(max_rows=1)
    assert split_into_micro_batches(engine, [6, 6, 6], by_rows)[0] == [[0], [1], [2]]
