"""Forward passes without gradient over all micro-batches of a batch: scores, values."""

from collections.abc import Callable, Sequence

import torch

from verl.workers.collectives import max_over_ranks
from verl.workers.engine import TrainEngine
from verl.workers.rows import MicroBatchLimits, micro_batches


def common_passes(cuts: Sequence[Sequence[int]]) -> int:
    """How many passes every rank has to run: as many as the rank with most micro-batches.

    A forward or backward through a sharded model is a collective operation, so a rank that runs
    one pass less than the others leaves them waiting for ever.
    """
    return int(max_over_ranks([len(cuts)])[0])


def cut_rows(
    engine: TrainEngine, sizes: Sequence[int], limits: MicroBatchLimits
) -> list[list[int]]:
    """Micro-batches of rows of ``sizes`` tokens. ``limits`` are a device's: ranks that compute a
    row together hold as many times the tokens.
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
    """Call ``score`` with the rows of every micro-batch, the model resident and without gradient.

    ``sizes`` are the tokens of this rank's rows. Every rank of the engine must call it; ``score``
    runs equally often on each of them and may see a row twice.
    """
    cuts = cut_rows(engine, sizes, limits)
    with engine.resident():
        for number in range(common_passes(cuts)):
            for turn in range(engine.sequence_ranks):
                if engine.has_turn(turn):
                    # a rank that has finished repeats a row, to take part in the others' passes
                    score(cuts[number] if number < len(cuts) else [0])
                else:
                    engine.module.take_part()
