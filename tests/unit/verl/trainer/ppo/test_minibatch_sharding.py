"""Rows are assigned to ranks so that ranks finish together. The results do not depend on it."""

import pickle

import numpy as np
import pytest
import torch

from scripts.dev.bench import balance
from tests.helpers.model_families import ROW_WISE, SCALED, WINDOWED, build_family
from tests.helpers.policy_rows import add_branches, random_rows, share_prefixes
from tests.helpers.refusals import mentions
from tests.helpers.trainer_fakes import Group, make_fake_run
from verl.models.forward_kind import PACKED_SETTINGS, ForwardSettings, RowWiseForward
from verl.models.loader import prepare_for_training
from verl.models.policy import PolicyModel
from verl.models.prefix_tree import sort_sequences
from verl.protocol import DataProto, object_array
from verl.records import NUM_RANKS, PROFILE, BranchRequest, ProfileRequest
from verl.single_controller.base.decorator import (
    ROWS_PER_RANK,
    Dispatch,
    MethodRegistration,
    plan_calls,
)
from verl.trainer.ppo import resources
from verl.trainer.ppo.minibatch_sharding import (
    UNREAD_COLUMNS,
    balance_rows,
    call_with_balanced_rows,
    count_row_tokens,
    list_mergeable_rows,
    reorder_by_rank,
    shard_minibatches,
    split_mini_batches,
    split_rows,
)
from verl.utils.seqlen_balancing import order_rows_for_ranks, partition_rows
from verl.workers.branch_scores import compute_log_probs_and_scores
from verl.workers.engine import TrainEngine
from verl.workers.update import epoch_mini_batches

TO_RANKS = MethodRegistration(Dispatch.DP_COMPUTE_PROTO)


def numbered_rows(rows: int) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(rows)}, {"name": [f"row {i}" for i in range(rows)]}
    )


def call_on(ranks: int, data: DataProto) -> tuple[list[DataProto], DataProto]:
    """Return the shard of each rank of ``data``, and the joined results ``2 * x`` of ranks."""
    calls, collect = plan_calls(TO_RANKS, ranks, (data,), {})
    shards = [args[0] for args, _ in calls]
    return shards, collect([DataProto.from_dict({"y": 2 * shard.batch["x"]}) for shard in shards])


# ---------------------------------------------------------------- partition


def test_rows_are_partitioned_by_their_cost():
    # Differencing gives 14 and 16; longest first gives 13 and 17.
    assert sorted(partition_rows([8, 7, 6, 5, 4], 2)) == [[0, 2], [1, 3, 4]]
    parts = partition_rows([5, 0, 9], 5)
    assert sorted(map(len, parts)) == [0, 0, 1, 1, 1] and partition_rows([], 2) == [[], []]


@pytest.mark.parametrize("case", [c for c in balance.CASES if c.optimizer_steps < 8], ids=str)
def test_updates_are_efficient_at_8_64_and_1024_ranks(case):
    unbalanced, balanced, bound = balance.measure_efficiency(case)
    assert balanced >= 0.95 and unbalanced < 0.65 and bound >= balanced


def test_longest_row_limits_efficiency_with_many_ranks():
    unbalanced, balanced, bound = balance.measure_efficiency(balance.BalanceCase(1024, 10240, 8))
    assert unbalanced < 0.25 and balanced > 0.99 * bound and bound < 0.85


# ---------------------------------------------------------------- dispatch


def test_every_rank_gets_its_assigned_rows():
    shards, result = call_on(3, reorder_by_rank(numbered_rows(4), [[2, 0], [], [1, 3]]))
    assert [shard.batch["x"].tolist() for shard in shards] == [[2, 0], [2], [1, 3]]
    assert [shard.meta_info["padding_rows"] for shard in shards] == [0, 1, 0]
    assert not any(ROWS_PER_RANK in shard.meta_info for shard in shards)
    assert result.batch["y"].tolist() == [4, 0, 2, 6]


@pytest.mark.parametrize("counts", [[2, 3], [4], [5, -1], [1, 1, 2]])
def test_row_counts_that_do_not_match_are_refused(counts):
    data = numbered_rows(4)
    data.meta_info[ROWS_PER_RANK] = counts
    with pytest.raises(ValueError, check=mentions(4, 2)):
        call_on(2, data)


def test_result_with_too_few_rows_is_refused():
    _, collect = plan_calls(TO_RANKS, 2, (reorder_by_rank(numbered_rows(4), [[0], [1, 2, 3]]),), {})
    with pytest.raises(ValueError, check=mentions(1, 3)):
        collect([numbered_rows(1), numbered_rows(1)])


def test_metrics_without_rows_are_joined():
    _, collect = plan_calls(TO_RANKS, 2, (reorder_by_rank(numbered_rows(2), [[0, 1], []]),), {})
    joined = collect([DataProto(meta_info={"metrics": {"n": rank}}) for rank in range(2)])
    assert set(joined.meta_info) == {"metrics"} and len(joined.meta_info["metrics"]["n"]) == 2


# ---------------------------------------------------------------- scoring


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("balanced", [True, False])
def test_results_are_returned_in_the_order_of_the_rows(ranks, balanced):
    data = random_rows(rows=7)
    data.batch["x"] = torch.arange(7)
    shards_seen = []

    def call(rows: DataProto) -> DataProto:
        shards, result = call_on(ranks, rows)
        shards_seen.extend(shards)
        return result

    result = call_with_balanced_rows(call, data, ranks, balanced)
    assert result.batch["y"].tolist() == [2 * row for row in range(7)] and len(shards_seen) == ranks


# Family and ``prefix_tree`` of models with packed, merged and row-wise passes. The window of the
# last one is shorter than the rows.
FORWARD_CASES = {
    "packed": (SCALED["qwen3"], False),
    "tree": (SCALED["qwen3"], True),
    "row-wise": (ROW_WISE["qwen3.5"], True),
    "windowed": (WINDOWED["gemma3"], True),
}


@pytest.mark.parametrize("case", FORWARD_CASES)
def test_driver_counts_the_tokens_that_a_worker_computes(case):
    family, prefix_tree = FORWARD_CASES[case]
    policy = PolicyModel(prepare_for_training(build_family(family())))
    engine = TrainEngine(policy, device="cpu", prefix_tree=prefix_tree)
    data = add_branches(share_prefixes(random_rows(rows=6)))
    num_tokens = sum(count_row_tokens(data, engine.forward_settings.kind))
    token_ids, _ = list_mergeable_rows(data, engine.forward_settings)
    assert bool(token_ids) == (case == "tree")
    num_shared_tokens = sum(sort_sequences(token_ids).shared_lengths)
    size = compute_log_probs_and_scores(engine, data, max_rows=len(data)).forward_size
    # Row-wise passes compute all tokens of each sequence.
    is_row_wise = case in ("row-wise", "windowed")
    expected = size.sequence_tokens if is_row_wise else size.tokens
    assert num_tokens - num_shared_tokens == expected
    assert size.tokens < size.sequence_tokens, "branches have a prefix"


def split_by_rank(data: DataProto, forward_settings: ForwardSettings) -> list[list[int]]:
    """Return the rows of ``data`` that each of two ranks computes."""
    data.batch["x"] = torch.arange(len(data))
    rows_by_rank = []

    def call(rows: DataProto) -> DataProto:
        shards, result = call_on(2, rows)
        rows_by_rank.extend(sorted(shard.batch["x"].tolist()) for shard in shards)
        return result

    call_with_balanced_rows(call, data, 2, forward_settings=forward_settings)
    return sorted(rows_by_rank)


def test_row_with_many_branch_tokens_gets_a_rank_alone():
    data = random_rows(rows=4)
    long_branch = BranchRequest(1, [0] * 5000)
    data.non_tensor_batch["branches"] = object_array([[], [long_branch], [], []])
    assert split_by_rank(data, PACKED_SETTINGS) == [[0, 2, 3], [1]]


def test_prefixes_of_branches_are_balanced_only_for_row_wise_passes():
    data = random_rows(rows=4)
    data.batch["attention_mask"][:] = 1  # 36 tokens
    short_branches = [BranchRequest(36, [token]) for token in range(3)]
    data.non_tensor_batch["branches"] = object_array([[], short_branches, [], []])
    assert split_by_rank(data, ForwardSettings(RowWiseForward("eager"))) == [[0, 2, 3], [1]]
    assert [len(rows) for rows in split_by_rank(data, PACKED_SETTINGS)] == [2, 2]


def test_counts_use_the_model_of_the_group(monkeypatch):
    """The critic may have another model than actor and reference."""
    settings_by_call = []

    def call(compute_on_ranks, data, num_ranks, is_balanced, forward_settings):
        settings_by_call.append(forward_settings)
        return compute_on_ranks(data)

    monkeypatch.setattr(resources, "call_with_balanced_rows", call)
    actor, critic = ForwardSettings(RowWiseForward("eager")), ForwardSettings(prefix_tree=True)
    workers = resources.TrainingWorkers(
        Group([], "actor"),
        [],
        critic_group=Group([], "critic"),
        actor_forward=actor,
        critic_forward=critic,
    )
    workers.compute_log_prob(random_rows(rows=2))
    workers.compute_values(random_rows(rows=2))
    assert settings_by_call == [actor, critic]


# ---------------------------------------------------------------- updates


def update_rows(rows: int = 24) -> DataProto:
    data = random_rows(rows=rows, group=4)
    data.non_tensor_batch["steps"] = object_array([["a long text"]] * rows)
    return data


def test_update_is_sharded_by_mini_batch():
    trainer, *_ = make_fake_run()
    config = trainer.config
    actor = config.actor_rollout_ref.actor
    actor.ppo_mini_batches = 3
    actor.use_kl_loss = True  # every row is computed
    data = update_rows()
    sent = shard_minibatches(data, config, "actor", 5, 4)
    counts = sent.meta_info[ROWS_PER_RANK]
    assert sum(counts) == len(data) == len(sent)
    seed = ("update_actor", config.trainer.seed, 5)
    parts = epoch_mini_batches(sent, actor, 0, *seed)
    # Every assignment of rows to ranks gives the same mini-batches.
    names = [sorted(sent.non_tensor_batch["traj_uid"][part]) for part in parts]
    plain = epoch_mini_batches(data, actor, 0, *seed)
    assert names == [sorted(data.non_tensor_batch["traj_uid"][part]) for part in plain]
    bounds = np.cumsum([0, *counts])
    sizes = count_row_tokens(sent, PACKED_SETTINGS.kind)
    loads = [
        [sum(sizes[row] for row in part if bounds[r] <= row < bounds[r + 1]) for r in range(4)]
        for part in parts
    ]
    longest = max(sizes)
    assert all(max(load) - min(load) <= longest for load in loads)


def test_rows_without_a_gradient_have_no_cost():
    trainer, *_ = make_fake_run()
    config = trainer.config
    config.actor_rollout_ref.actor.ppo_mini_batches = 1
    data = update_rows(8)
    data.batch["advantages"][2:] = 0.0  # two rows remain, one for each rank
    sent = shard_minibatches(data, config, "actor", 1, 2)
    counts = sent.meta_info[ROWS_PER_RANK]
    trained = (sent.batch["advantages"] != 0).any(-1)
    assert [int(part.sum()) for part in trained.split(counts)] == [1, 1]


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_ranks_get_the_values_and_dtypes_of_the_batch(role):
    trainer, *_ = make_fake_run()
    data = update_rows()
    data.batch["returns"] = torch.randn(data.batch["responses"].shape)
    data.batch["input_ids"][0, 0] = 2**31 - 1
    sent = shard_minibatches(data, trainer.config, role, 5, 4)
    assert ("returns" in sent.tensor_keys()) == (role == "critic"), "the actor does not read them"
    assert sent.batch["input_ids"].dtype == torch.int32
    assert sent.batch["response_mask"].dtype == torch.int8
    # A shard is a slice, which is pickled.
    received = pickle.loads(pickle.dumps(sent[:7]))
    row_by_id = {id(uid): row for row, uid in enumerate(data.non_tensor_batch["traj_uid"])}
    rows = [row_by_id[id(uid)] for uid in sent[:7].non_tensor_batch["traj_uid"]]
    for key, tensor in received.batch.items():
        assert tensor.dtype == data.batch[key].dtype and tensor.equal(data.batch[key][rows]), key
    assert "restored_dtypes" not in received.meta_info


@pytest.mark.parametrize(("rows", "ranks"), [(24, 4), (23, 4), (3, 4), (8, 1)])
def test_rows_joined_in_order_are_not_ordered_again(rows, ranks):
    data = random_rows(rows=rows)
    data.batch["number"] = torch.arange(rows)
    order = order_rows_for_ranks(data.batch["attention_mask"].sum(-1).tolist(), ranks)
    joined = data[order]
    joined.meta_info[NUM_RANKS] = ranks
    for table in (data, joined):
        balance_rows(table, ranks)
        assert table.batch["number"].tolist() == order
    joined.meta_info[NUM_RANKS] = ranks + 1
    balance_rows(joined, ranks)
    again = order_rows_for_ranks(data.batch["attention_mask"].sum(-1).tolist(), ranks)
    assert joined.batch["number"].tolist() == [order[row] for row in again]


def test_unread_columns_are_not_sent_and_single_rank_keeps_order():
    trainer, *_ = make_fake_run()
    data = update_rows()
    for unread in UNREAD_COLUMNS:
        data.batch[unread] = data.batch["input_ids"].clone()
    sent = shard_minibatches(data, trainer.config, "critic", 1, 1)
    assert sorted(sent.non_tensor_batch) == ["traj_uid", "uid"]
    assert set(data.tensor_keys()) - set(sent.tensor_keys()) == set(UNREAD_COLUMNS)
    assert ROWS_PER_RANK not in sent.meta_info
    trainer.config.trainer.balance_batch = False
    assert ROWS_PER_RANK not in shard_minibatches(data, trainer.config, "actor", 1, 2).meta_info


def test_profiled_steps_are_traced_on_selected_ranks():
    trainer, *_ = make_fake_run()
    section = trainer.config.trainer
    section.profile_steps = [2, 5]
    section.profile_ranks = [0, 3]
    section.default_local_dir = "/somewhere/run"
    data = update_rows()
    requests = {
        step: shard_minibatches(data, trainer.config, "actor", step, ranks).meta_info.get(PROFILE)
        for step, ranks in ((1, 4), (2, 4), (5, 1))
    }
    expected = {step: ProfileRequest("/somewhere/run/profile", (0, 3), step) for step in (2, 5)}
    assert requests == expected | {1: None}
    assert PROFILE not in data.meta_info


def chat_rows(families: int, turns: int) -> list[np.ndarray]:
    """Return the rows of trajectories in any order: each turn repeats the earlier ones."""
    draw = np.random.default_rng(0)
    rows = []
    for family in range(families):
        history = np.full(40, family)
        for _ in range(turns):
            rows.append(np.concatenate([history, draw.integers(100, 900, 12)]))
            history = np.concatenate([history, draw.integers(100, 900, 10)])
    return [rows[i] for i in draw.permutation(len(rows))]


def count_tree_tokens(rows: list[np.ndarray]) -> int:
    return len({tuple(row[:end].tolist()) for row in rows for end in range(1, len(row) + 1)})


@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_that_share_prefixes_go_to_one_rank_where_balance_allows(ranks):
    ids = chat_rows(families=6, turns=8)
    sizes = [len(row) for row in ids]
    parts = split_rows(sizes, ranks, ids, "auto")
    assert sorted(row for part in parts for row in part) == list(range(48))
    tree_tokens = [count_tree_tokens([ids[row] for row in part]) for part in parts]
    assert max(tree_tokens) - min(tree_tokens) <= 2 * max(sizes)
    families = [{int(ids[row][0]) for row in part} for part in parts]
    assert sum(map(len, families)) < 6 + ranks, "at most one family is cut between two ranks"
    # Rows without a pass cost nothing. Rows are not merged if that saves too little.
    idle = split_rows([0] * 24 + sizes[24:], ranks, ids, True)
    assert sorted(row for part in idle for row in part) == list(range(48))
    apart = [np.append(row[-12:], row) for row in ids]
    lengths = [len(row) for row in apart]
    assert split_rows(lengths, ranks, apart, "auto") == partition_rows(lengths, ranks)
    assert split_rows(sizes, ranks, ids, False) == partition_rows(sizes, ranks)


def test_prefix_tree_does_not_change_the_rows_of_a_mini_batch():
    trainer, *_ = make_fake_run()
    config = trainer.config
    config.actor_rollout_ref.actor.ppo_mini_batches = 3
    config.actor_rollout_ref.actor.use_kl_loss = True
    data = share_prefixes(update_rows())
    names = []
    for prefix_tree in (False, True):
        sent = shard_minibatches(
            data, config, "actor", 5, 3, ForwardSettings(prefix_tree=prefix_tree)
        )
        seed = ("update_actor", config.trainer.seed, 5)
        parts = epoch_mini_batches(sent, config.actor_rollout_ref.actor, 0, *seed)
        names.append([sorted(sent.non_tensor_batch["traj_uid"][part]) for part in parts])
        assert sum(sent.meta_info[ROWS_PER_RANK]) == len(data)
    assert names[0] == names[1]


def test_mini_batch_with_fewer_rows_than_ranks_leaves_empty_ranks():
    shares = split_mini_batches([[3, 1], [0, 2]], [1, 1, 1, 1], 3)
    assert sorted(row for share in shares for row in share) == [0, 1, 2, 3] and [] in shares
