"""Which rank gets which rows, so that none waits for another.

    passes that score    all rows of a call, by their tokens and those of their branches
    updates              every mini-batch by itself: ranks wait for each other at its optimizer step

What a mini-batch is made of, and so the gradient, does not depend on who computes which row.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from verl.config.schema import PPOConfig
from verl.protocol import DataProto
from verl.records import PROFILE, ProfileOrder
from verl.single_controller.base.decorator import ROWS_PER_RANK
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, spread_rows
from verl.workers.policy_loss import learnt_rows
from verl.workers.update import epoch_mini_batches

SCORED = ("input_ids", "attention_mask", "responses", "response_mask")
ASKED = ("branches", "spans")
# What an update reads of a row besides tensors: not its texts.
NAMED = ("uid", "traj_uid")
# Columns of tokens that no update reads: input_ids and attention_mask say the same, or advantages
# and returns have been made of them.
UNREAD = (
    *("prompts", "position_ids", "step_ids"),
    *("rollout_log_probs", "entropys", "token_level_scores", "token_level_rewards"),
)


def narrowed(data: DataProto, tensors: Iterable[str] | None, others: Iterable[str]) -> DataProto:
    """``data`` with those of the named columns that it has; ``tensors`` None: with all of them.

    What no rank reads is not sent to any.
    """
    kept = None if tensors is None else [key for key in tensors if key in data.tensor_keys()]
    return data.select(kept, [key for key in others if key in data.non_tensor_batch])


def score_on_ranks(
    call: Callable[[DataProto], DataProto], data: DataProto, ranks: int, balanced: bool = True
) -> DataProto:
    """``call(data)``, a row of answer for each row, with the rows spread over ``ranks`` by what
    they cost; ``balanced`` false, or one rank: in the order in which they come.
    """
    if ranks == 1 or not balanced:
        return call(data)
    shares = spread_rows(row_sizes(data), ranks)
    order = np.concatenate([np.asarray(share, dtype=np.int64) for share in shares])
    answer = call(dealt(data, shares))
    return answer.select_idxs(np.argsort(order))


def put_in_order(batch: DataProto, ranks: int) -> None:
    """Reorder rows so that ``ranks`` that get them in order get about as many tokens each."""
    if ranks == 1 or len(batch) < ranks:
        return
    lengths = batch.batch["attention_mask"].sum(-1).tolist()
    even = len(batch) % ranks == 0
    parts = get_seqlen_balanced_partitions(lengths, k_partitions=ranks, equal_size=even)
    batch.reorder(torch.tensor([row for part in parts for row in part]))


def deal_update(batch: DataProto, config: PPOConfig, role: str, step: int, ranks: int) -> DataProto:
    """What the update of ``role`` (``actor``, ``critic``) reads of ``batch`` at ``step``, with
    every mini-batch spread over the ``ranks`` by itself.

    With ``shuffle`` later epochs cut other mini-batches: those of the first one are even.
    """
    tensors = [key for key in batch.tensor_keys() if key not in UNREAD]
    sent = narrowed(batch, tensors, NAMED)
    if step in config.trainer.profile_steps:
        place = Path(config.trainer.default_local_dir) / "profile"
        ranks_traced = tuple(config.trainer.profile_ranks)
        sent.meta_info[PROFILE] = ProfileOrder(str(place), ranks_traced, step)
    if not config.trainer.balance_batch or ranks == 1:
        return sent
    section = config.critic if role == "critic" else config.actor_rollout_ref.actor
    seed = (f"update_{role}", config.trainer.seed, step)  # as the workers have it
    parts = epoch_mini_batches(sent, section, 0, *seed)
    sizes = row_sizes(sent)
    if role == "actor":
        learnt = set(learnt_rows(config.actor_rollout_ref.actor, sent))
        # A row that is not computed costs nothing; it goes where it may.
        sizes = [size if row in learnt else 0 for row, size in enumerate(sizes)]
    return dealt(sent, deal_mini_batches(parts, sizes, ranks))


def dealt(data: DataProto, shares: Sequence[Sequence[int]]) -> DataProto:
    """A copy of ``data`` in which the rows ``shares[r]`` are those of rank ``r``."""
    order = np.concatenate([np.asarray(share, dtype=np.int64) for share in shares])
    ordered = data.select_idxs(order)
    ordered.meta_info[ROWS_PER_RANK] = [len(share) for share in shares]
    return ordered


def row_sizes(data: DataProto) -> list[int]:
    """Tokens of each row, those of its branches included."""
    sizes = data.batch["attention_mask"].sum(-1).tolist()
    branches = data.non_tensor_batch.get("branches")
    if branches is None:
        return sizes
    asked = [sum(len(branch.token_ids) for branch in row) for row in branches]
    return [own + more for own, more in zip(sizes, asked, strict=True)]


def deal_mini_batches(
    parts: Sequence[Sequence[int]], sizes: Sequence[int], ranks: int
) -> list[list[int]]:
    """The rows of every rank where each of ``parts`` (rows of one mini-batch) is spread by itself;
    ``sizes`` [B] what a row costs.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for part in parts:
        spread = spread_rows([sizes[row] for row in part], ranks)
        for share, found in zip(shares, spread, strict=True):
            share += [part[position] for position in found]
    return shares
