"""Rows of supervised training: records from files, token rows, and batches of rows."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np

from verl.config.schema.sft import SFTDataConfig
from verl.utils.message_rows import DataRow, read_episode_messages, read_table
from verl.utils.seeds import derive_seed

Record = dict[str, Any]
LOCATION_KEY = "place"  # key of a record: its file and row, for error messages
TOKENS_COLUMN = "input_ids"
WEIGHTS_COLUMN = "loss_weights"
# Column -> reason why rows with token ids must not have it. The column would be ignored.
REFUSED_COLUMNS = {"labels": f"the column {WEIGHTS_COLUMN} defines the loss of each token"}
AGENT_WEIGHT = 1.0  # loss weight of the agent's tokens


@dataclass(frozen=True, slots=True)
class SFTRow:
    """Token ids of one sequence and their loss weights; the first weight has no effect."""

    input_ids: tuple[int, ...]
    loss_weights: tuple[float, ...]
    agent_mask: tuple[bool, ...] = ()  # default: tokens with at least AGENT_WEIGHT

    def __post_init__(self) -> None:
        if not self.agent_mask:
            agent_flags = tuple(weight >= AGENT_WEIGHT for weight in self.loss_weights)
            object.__setattr__(self, "agent_mask", agent_flags)  # the class is frozen
        if len(self.input_ids) != len(self.loss_weights):
            lengths_text = f"{len(self.input_ids)} tokens but {len(self.loss_weights)} loss weights"
            raise ValueError(f"a row has {lengths_text}; it needs one weight per token")
        if len(self.input_ids) < 2 or not any(self.loss_weights[1:]):
            raise ValueError(
                "a row needs at least two tokens and a positive loss weight after the first"
            )

    def __len__(self) -> int:
        return len(self.input_ids)


def make_token_row(record: Mapping[str, Any]) -> SFTRow:
    """Convert a record that has token ids (``input_ids``) and ``loss_weights`` into a row."""
    return SFTRow(tuple(record[TOKENS_COLUMN]), tuple(float(w) for w in record[WEIGHTS_COLUMN]))


def read_records(data: SFTDataConfig, split: str) -> list[Record]:
    """Return the records of the files of ``split`` (``train`` or ``val``).

    A record has messages, or token ids with loss weights. Raises ``InvalidRowError`` if a file
    cannot be read, or if a row has neither.
    """
    files = data.val_files if split == "val" else data.train_files
    return [
        {**_parse_record(row, data.messages_key), LOCATION_KEY: row.row_location}
        for row in read_table(f"data.{split}_files", files)
    ]


def _parse_record(row: DataRow, messages_key: str) -> Record:
    if row.read_cell(TOKENS_COLUMN) is None:
        return {messages_key: read_episode_messages(row, messages_key, "data.messages_key")}
    row.refuse_unread_columns(REFUSED_COLUMNS)
    if not all(row.read_cell("attention_mask") or [1]):
        raise row.make_error(
            "attention_mask", "masks tokens", "rows without padding", "remove the padding"
        )
    record = {
        TOKENS_COLUMN: _read_numbers(row, TOKENS_COLUMN, "token ids", int),
        WEIGHTS_COLUMN: _read_numbers(row, WEIGHTS_COLUMN, "a loss weight for each token", float),
    }
    try:
        make_token_row(record)
    except ValueError as error:
        allowed = "two or more tokens, one weight per token, and one above 0 after the first"
        raise row.make_error(
            TOKENS_COLUMN, f"is invalid: {error}", allowed, "remove the row"
        ) from error
    return record


def _read_numbers(row: DataRow, column: str, allowed_text: str, number_type: type) -> list[Any]:
    """Return the list of finite, non-negative numbers in ``column``."""
    cell_value = row.read_cell(column)
    numbers: list[Any] = cell_value if isinstance(cell_value, list) else [None]
    for item in numbers:
        is_number = isinstance(item, (int, number_type)) and not isinstance(item, bool)
        if not is_number or item < 0 or not math.isfinite(item):
            why = f"contains {str(cell_value if item is None else item)[:80]!r}"
            raise row.make_error(column, why, f"{allowed_text}, 0 or more", "remove the row")
    return numbers


def plan_batches(
    lengths: Sequence[int],
    tokens_per_batch: int,
    epochs: int,
    total_steps: int | None,
    seed: int,
    shuffle: bool = True,
) -> list[list[int]]:
    """Return the row indices of every optimizer step: batches of about ``tokens_per_batch`` tokens.

    If given, ``total_steps`` replaces ``epochs``. The row order of an epoch depends only on
    ``seed`` and the number of the epoch.
    """
    if not lengths:
        raise ValueError("lengths is empty: there are no rows to train on")

    def iterate_batches() -> Iterator[list[int]]:
        # With total_steps the number of epochs is unlimited: islice below limits the batches.
        for epoch in count() if total_steps else range(epochs):
            rng = np.random.default_rng(derive_seed("sft", seed, epoch))
            row_order = rng.permutation(len(lengths)).tolist() if shuffle else range(len(lengths))
            yield from _split_into_batches(row_order, lengths, tokens_per_batch)

    return list(islice(iterate_batches(), total_steps))


def _split_into_batches(
    row_order: Sequence[int], lengths: Sequence[int], tokens_per_batch: int
) -> Iterator[list[int]]:
    batch: list[int] = []
    batch_tokens = 0
    for row in row_order:
        # Start a new batch if the current batch is closer to ``tokens_per_batch`` without the row.
        if batch and batch_tokens + lengths[row] / 2 > tokens_per_batch:
            yield batch
            batch = []
            batch_tokens = 0
        batch.append(row)
        batch_tokens += lengths[row]
    if batch:
        yield batch
