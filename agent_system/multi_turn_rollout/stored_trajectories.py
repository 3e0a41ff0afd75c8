"""Trajectories that stay in Ray's object store, while the driver has copies without texts.

collector   trajectories ─┬─ tokens of the rows, copies without texts ──▶ driver: batch, metrics
                          └─ whole, with texts ──▶ object store ──▶ rollout log, audits
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from torch.nn.functional import pad

from agent_system.multi_turn_rollout.packing import (
    TrajectoryRow,
    build_rows,
    collate_rows,
    load_or_make_turn_records,
)
from agent_system.multi_turn_rollout.trajectory import Trajectory
from rlvcr.records import CreditedTurns, ThinkingTurnRecord, TurnRecords
from verl.protocol import DataProto
from verl.single_controller.base.worker_group import WorkerDiedError
from verl.single_controller.ray.calls import ray_get
from verl.utils.jsonl import EncodedLines, RowEncoder

logger = logging.getLogger(__name__)
LOAD_TIMEOUT_S = 600.0  # seconds to transfer the trajectories of one collector between nodes
ENCODING_TIMEOUT_S = 1800.0  # seconds for a collector to encode the JSON lines of its rows
MAX_ENCODED_ROWS = 1024  # rows of the rollout log whose lines are in memory at a time


@dataclass(eq=False)
class StoredTrajectories:
    """Trajectories of one call of collector number ``collector``, in Ray's object store."""

    ref: Any  # Ray reference of the list of trajectories
    collector: int  # number of the collector

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredTrajectories, (self.ref, self.collector)  # without the loaded values

    @cached_property
    def rows(self) -> list[list[TrajectoryRow]]:
        """Rows of each trajectory, loaded at the first access."""
        return load_rows(self.ref, f"trajectories of collector-{self.collector}")


# Cache the last result: a collector gets several successive requests for rows of one result.
@lru_cache(maxsize=1)
def load_rows(ref: Any, label: str) -> list[list[TrajectoryRow]]:
    """Load the trajectories of the Ray reference ``ref``, and return the rows of each."""
    return [build_rows([trajectory]) for trajectory in ray_get(ref, LOAD_TIMEOUT_S, label)]


@dataclass(frozen=True, slots=True)
class TrajectoryReference:
    """Reference to one stored trajectory: number ``index`` of the trajectories in ``source``."""

    source: StoredTrajectories
    index: int

    def load(self) -> Trajectory:
        return self.source.rows[self.index][0].trajectory

    def get_turn_records(self, row: int) -> "StoredTurnRecords":
        """Return the records of row number ``row``, which are loaded at the first access."""
        return StoredTurnRecords(self, row)


@dataclass(frozen=True, eq=False)
class StoredTurnRecords(TurnRecords):
    """Turn records of row number ``row``, loaded from Ray's object store at the first access."""

    trajectory: TrajectoryReference
    row: int  # number of the row in the trajectory

    def load_row(self) -> TrajectoryRow:
        return self.trajectory.source.rows[self.trajectory.index][self.row]

    def make_records(self) -> Sequence[ThinkingTurnRecord]:
        return load_or_make_turn_records(self.load_row())


def link_stored_trajectories(
    trajectories_without_texts: Sequence[Trajectory], source: StoredTrajectories
) -> None:
    """Link each of ``trajectories_without_texts`` with its whole trajectory in ``source``.

    Both have the same trajectories in the same order.
    """
    for index, trajectory in enumerate(trajectories_without_texts):
        trajectory.stored_reference = TrajectoryReference(source, index)


def load_trajectories(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Return ``trajectories`` with their texts and tokens."""
    return [t if t.stored_reference is None else t.stored_reference.load() for t in trajectories]


def get_stored_record_reference(records: object) -> StoredTurnRecords | None:
    """Return the reference to turn records in Ray's object store, if ``records`` has one.

    ``records`` is a value of the column ``steps``. Return None if it contains the records itself.
    """
    records = records.records if isinstance(records, CreditedTurns) else records
    return records if isinstance(records, StoredTurnRecords) else None


def encode_rows_on_collectors(
    data: DataProto, encode: RowEncoder, collectors: Sequence[Any], tokenizer: object
) -> Iterator[memoryview]:
    """Yield the JSON line of each row of ``data``.

    A collector encodes the rows that it generated; ``collectors`` are their actor handles. Other
    rows, and those of a collector that died, are encoded in this process.
    """
    tensor_names = [key for key in encode.tensor_names if key in data.tensor_keys()]
    column_names = [key for key in encode.column_names if key in data.non_tensor_batch]
    for data_chunk in data.split(MAX_ENCODED_ROWS):
        selected_data = data_chunk.select(tensor_names, column_names, [])
        row_indices_by_source: dict[StoredTrajectories | None, list[int]] = {}
        for row, records in enumerate(data_chunk.non_tensor_batch["steps"]):
            record_reference = get_stored_record_reference(records) if collectors else None
            source = None if record_reference is None else record_reference.trajectory.source
            row_indices_by_source.setdefault(source, []).append(row)
        refs_by_source: dict[StoredTrajectories | None, Any] = {
            source: collectors[source.collector].encode_rows.remote(
                selected_data[row_indices], encode
            )
            for source, row_indices in row_indices_by_source.items()
            if source is not None
        }
        line_by_row: dict[int, memoryview] = {}
        for source, row_indices in row_indices_by_source.items():
            row_lines = _wait_for_encoded_lines(refs_by_source.get(source)) or encode(
                data_chunk.select_idxs(row_indices), tokenizer
            )
            line_by_row |= zip(row_indices, row_lines, strict=True)
        yield from (line_by_row[row] for row in range(len(data_chunk)))


def _wait_for_encoded_lines(ref: Any) -> EncodedLines | None:
    """Wait for the JSON lines from a collector. Return None without ``ref``, or if it died."""
    try:
        return ref and ray_get(ref, ENCODING_TIMEOUT_S, "lines of the rollout log")
    except WorkerDiedError as error:
        logger.warning("a collector died; this process writes its rollout log: %s", error)
        return None


def encode_stored_rows(values: DataProto, encode: RowEncoder, tokenizer: object) -> EncodedLines:
    """Encode rows of stored trajectories as JSON lines, together with columns computed later.

    Tensors of ``values`` are [B, R]; their R may differ from the padded response length of the
    stored rows.
    """
    stored_turn_records = map(get_stored_record_reference, values.non_tensor_batch["steps"])
    rows = [
        turn_records.load_row() for turn_records in stored_turn_records if turn_records is not None
    ]
    data = collate_rows(rows, 0, allow_retokenized=True)
    response_width = data.batch["responses"].shape[1]
    for key, tensor in values.batch.items():
        # A negative padding removes columns.
        data.batch[key] = pad(tensor, (0, response_width - tensor.shape[1]))
    data.non_tensor_batch |= values.non_tensor_batch
    return encode(data, tokenizer)
