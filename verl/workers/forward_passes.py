"""Forward passes without gradient over all micro-batches of a batch, for scores and values."""

from collections.abc import Callable, Sequence
from itertools import product

import torch

from verl.workers.collectives import max_over_ranks
from verl.workers.engine import TrainEngine
from verl.workers.rows import MicroBatchLimits, micro_batches


def common_passes(cuts: Sequence[Sequence[int]]) -> int:
    """Return the number of passes of every rank: the largest number of micro-batches of any rank.

    Passes through a sharded model are collective operations. If a rank ran fewer passes, the others
    would wait for it forever.
    """
    return int(max_over_ranks([len(cuts)])[0])


def cut_rows(
    engine: TrainEngine, sizes: Sequence[int], limits: MicroBatchLimits
) -> list[list[int]]:
    """Cut rows of ``sizes`` tokens into micro-batches of row indices.

    ``limits`` are per device: with sequence parallelism the token limit is multiplied by the number
    of ranks that compute a row together.
    """
    tokens = limits.get("max_tokens")
    if tokens:
        limits = MicroBatchLimits(max_tokens=tokens * engine.sequence_ranks)
    return micro_batches(sizes, **limits)


@torch.no_grad()
def score_micro_batches(
    engine: TrainEngine,
    sizes: Sequence[int],
    limits: MicroBatchLimits,
    score: Callable[[list[int]], None],
) -> None:
    """Call ``score`` with the rows of every micro-batch, with the model on the device and without
    gradient.

    ``sizes`` are the numbers of tokens of the rows of this rank. Every rank of the engine must call
    this function. ``score`` runs equally often on each rank. A rank with fewer micro-batches calls
    it with row 0 again.
    """
    micro_batch_rows = cut_rows(engine, sizes, limits)
    with engine.model_on_device():
        for pass_index, turn in product(
            range(common_passes(micro_batch_rows)), range(engine.sequence_ranks)
        ):
            if engine.begin_turn(turn):
                # a rank that has finished repeats row 0, to join the collective calls
                score(micro_batch_rows[pass_index] if pass_index < len(micro_batch_rows) else [0])
            else:
                engine.module.compute_zero_loss()
