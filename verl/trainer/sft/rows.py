"""Rows of supervised training, and the batches they are cut into."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np

from verl.utils.seeds import derive_seed

AGENT_WEIGHT = 1.0  # loss weight of the agent's own tokens


@dataclass(frozen=True, slots=True)
class SFTRow:
    """Token ids and, for each, its weight in the loss; the first token is never a target."""

    input_ids: tuple[int, ...]
    loss_weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.input_ids) != len(self.loss_weights):
            lengths = f"{len(self.input_ids)} tokens but {len(self.loss_weights)} loss weights"
            raise ValueError(f"a row has {lengths}")
        if len(self.input_ids) < 2 or not any(self.loss_weights[1:]):
            raise ValueError(
                "a row needs at least two tokens and a positive loss weight after the first"
            )

    def __len__(self) -> int:
        return len(self.input_ids)


def token_row(record: dict[str, Any]) -> SFTRow:
    """The row of a record of token ids: ``input_ids`` and ``loss_weights`` of equal length."""
    return SFTRow(tuple(record["input_ids"]), tuple(float(w) for w in record["loss_weights"]))


def plan_batches(
    lengths: Sequence[int],
    tokens_per_batch: int,
    epochs: int,
    total_steps: int | None,
    seed: int,
    shuffle: bool = True,
) -> list[list[int]]:
    """Row indices of every optimizer step: batches of about ``tokens_per_batch`` tokens, epoch
    after epoch.

    ``total_steps`` replaces ``epochs``. Every epoch is a permutation that depends on ``seed`` and
    its number alone.
    """
    if not lengths:
        raise ValueError("there are no rows to train on")

    def batches() -> Iterator[list[int]]:
        # With total_steps, as many epochs as they take: islice below ends them.
        for epoch in count() if total_steps else range(epochs):
            rng = np.random.default_rng(derive_seed("sft", seed, epoch))
            order = rng.permutation(len(lengths)).tolist() if shuffle else range(len(lengths))
            yield from _cut(order, lengths, tokens_per_batch)

    return list(islice(batches(), total_steps))


def _cut(order: Sequence[int], lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    batch: list[int] = []
    tokens = 0
    for row in order:
        # A row goes where the batch ends up nearer to its size.
        if batch and tokens + lengths[row] / 2 > size:
            yield batch
            batch = []
            tokens = 0
        batch.append(row)
        tokens += lengths[row]
    if batch:
        yield batch
