"""Rows of supervised training, as files and token ids, and the batches they are cut into."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np

from verl.config.schema.sft import SFTDataConfig
from verl.utils.message_rows import DataRow, episode_messages, read_table
from verl.utils.seeds import derive_seed

Record = dict[str, Any]
PLACE = "place"  # of a record of a file: where it is, as a message begins
TOKENS = "input_ids"
TOKEN_WEIGHTS = "loss_weights"
# Columns beside token ids that would be ignored, and why.
UNREAD = {"labels": f"which tokens are learnt is said by {TOKEN_WEIGHTS}"}
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


def token_row(record: Mapping[str, Any]) -> SFTRow:
    """The row of a record of token ids: ``input_ids`` and ``loss_weights`` of equal length."""
    return SFTRow(tuple(record[TOKENS]), tuple(float(w) for w in record[TOKEN_WEIGHTS]))


def read_records(data: SFTDataConfig, split: str) -> list[Record]:
    """The records of the files of ``split``: messages in their column, or token ids and weights.

    Raises ``BadRow`` for a file that cannot be read, and for a row that is no such record.
    """
    files = data.val_files if split == "val" else data.train_files
    return [
        {**_record(row, data.messages_key), PLACE: row.place}
        for row in read_table(f"data.{split}_files", files)
    ]


def _record(row: DataRow, column: str) -> Record:
    if row.read(TOKENS) is None:
        return {column: episode_messages(row, column, "data.messages_key")}
    row.refuse_unread(UNREAD)
    if not all(row.read("attention_mask") or [1]):
        raise row.bad("attention_mask", "hides tokens", "rows without padding", "cut it off")
    record = {
        TOKENS: _numbers(row, TOKENS, "token ids", int),
        TOKEN_WEIGHTS: _numbers(row, TOKEN_WEIGHTS, "a loss weight for each token", float),
    }
    try:
        token_row(record)
    except ValueError as error:
        allowed = "two tokens or more, as many weights, and one above 0 after the first"
        raise row.bad(TOKENS, f"is no row: {error}", allowed, "leave out the row") from error
    return record


def _numbers(row: DataRow, column: str, what: str, kind: type) -> list[Any]:
    """The list of numbers of ``column``, finite and 0 or more."""
    held = row.read(column)
    listed: list[Any] = held if isinstance(held, list) else [None]
    for one in listed:
        number = isinstance(one, (int, kind)) and not isinstance(one, bool)
        if not number or one < 0 or not math.isfinite(one):
            why = f"holds {str(held if one is None else one)[:80]!r}"
            raise row.bad(column, why, f"{what}, 0 or more", "leave out the row")
    return listed


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
