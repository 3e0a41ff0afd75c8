"""Trajectories that stay in Ray's object store, while the driver has their summaries.

collector   trajectories ─┬─ tokens of the rows, summaries ──▶ driver: batch, metrics
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
    make_turn_records,
    pack_rows,
)
from agent_system.multi_turn_rollout.trajectory import Trajectory
from rlvcr.records import CreditedTurns, ThinkingTurnRecord, TurnRecords
from verl.protocol import DataProto
from verl.single_controller.base.worker_group import WorkerDiedError
from verl.single_controller.ray.calls import ray_get
from verl.utils.jsonl import EncodedLines, RowEncoder

logger = logging.getLogger(__name__)
LOAD_TIMEOUT_S = 600.0  # to transfer the trajectories of one collector between nodes
ENCODING_TIMEOUT_S = 1800.0
MAX_ENCODED_ROWS = 1024  # rows of the rollout log whose lines are in memory at a time


@dataclass(eq=False)
class StoredTrajectories:
    """Trajectories that collector number ``collector`` generated in one call, behind ``ref``."""

    ref: Any
    collector: int

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredTrajectories, (self.ref, self.collector)  # without the loaded values

    @cached_property
    def rows(self) -> list[list[TrajectoryRow]]:
        """Rows of each trajectory, loaded at the first access."""
        return load_rows(self.ref, f"trajectories of collector-{self.collector}")


# A collector gets several requests for rows of one result, one after another.
@lru_cache(maxsize=1)
def load_rows(ref: Any, label: str) -> list[list[TrajectoryRow]]:
    """Return the rows of each of the trajectories behind ``ref``, which errors call ``label``."""
    return [build_rows([trajectory]) for trajectory in ray_get(ref, LOAD_TIMEOUT_S, label)]


@dataclass(frozen=True, slots=True)
class TrajectoryReference:
    """Trajectory number ``index`` of ``source``."""

    source: StoredTrajectories
    index: int

    def load(self) -> Trajectory:
        """Return the trajectory with its texts and tokens."""
        return self.source.rows[self.index][0].trajectory

    def get_steps(self, row: int) -> "StoredSteps":
        """Return the turn records of ``row``, which are loaded at the first access."""
        return StoredSteps(self, row)


@dataclass(frozen=True, eq=False)
class StoredSteps(TurnRecords):
    """Turn records of row number ``row`` of a stored trajectory."""

    trajectory: TrajectoryReference
    row: int

    def load_row(self) -> TrajectoryRow:
        """Return the row with its texts and tokens."""
        return self.trajectory.source.rows[self.trajectory.index][self.row]

    def make_records(self) -> Sequence[ThinkingTurnRecord]:
        """Return the records of all turns of the row."""
        return make_turn_records(self.load_row())


def link_stored(summaries: Sequence[Trajectory], source: StoredTrajectories) -> None:
    """Set ``stored`` of ``summaries``, which are those of all trajectories of ``source``."""
    for index, summary in enumerate(summaries):
        summary.stored = TrajectoryReference(source, index)


def load_trajectories(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Return ``trajectories`` with their texts and tokens."""
    return [t if t.stored is None else t.stored.load() for t in trajectories]


def find_stored_steps(records: object) -> StoredSteps | None:
    """Return the stored records behind a value of the column ``steps``; None if they are here."""
    records = records.records if isinstance(records, CreditedTurns) else records
    return records if isinstance(records, StoredSteps) else None


def encode_on_collectors(
    data: DataProto, encode: RowEncoder, collectors: Sequence[Any], tokenizer: object
) -> Iterator[memoryview]:
    """Yield the JSON line of each row of ``data``.

    A collector encodes the rows that it generated; ``collectors`` are their actor handles. Other
    rows, and those of a collector that died, are encoded in this process.
    """
    keys = [key for key in encode.tensor_names if key in data.tensor_keys()]
    columns = [key for key in encode.column_names if key in data.non_tensor_batch]
    for window in data.split(MAX_ENCODED_ROWS):
        values = window.select(keys, columns, [])
        rows_by_source: dict[StoredTrajectories | None, list[int]] = {}
        for row, records in enumerate(window.non_tensor_batch["steps"]):
            steps = find_stored_steps(records) if collectors else None
            source = None if steps is None else steps.trajectory.source
            rows_by_source.setdefault(source, []).append(row)
        refs: dict[StoredTrajectories | None, Any] = {
            source: collectors[source.collector].encode_rows.remote(values[rows], encode)
            for source, rows in rows_by_source.items()
            if source is not None
        }
        lines: dict[int, memoryview] = {}
        for source, rows in rows_by_source.items():
            row_lines = _get_lines(refs.get(source)) or encode(window.select_idxs(rows), tokenizer)
            lines |= zip(rows, row_lines, strict=True)
        yield from (lines[row] for row in range(len(window)))


def _get_lines(ref: Any) -> EncodedLines | None:
    """Return the lines that a collector encodes, or None if it died or there is no ``ref``."""
    try:
        return ref and ray_get(ref, ENCODING_TIMEOUT_S, "lines of the rollout log")
    except WorkerDiedError as error:
        logger.warning("a collector died; this process writes its rollout log: %s", error)
        return None


def encode_stored_rows(values: DataProto, encode: RowEncoder, tokenizer: object) -> EncodedLines:
    """Return ``encode`` of rows of stored trajectories.

    The column ``steps`` of ``values`` names the rows. The other columns of ``values`` were computed
    later; tensors are [B, R] with another padding of the responses than the stored rows.
    """
    stored_steps = map(find_stored_steps, values.non_tensor_batch["steps"])
    rows = [steps.load_row() for steps in stored_steps if steps is not None]
    data = pack_rows(rows, 0, allow_retokenized=True)
    width = data.batch["responses"].shape[1]
    for key, tensor in values.batch.items():
        # A negative padding removes columns.
        data.batch[key] = pad(tensor, (0, width - tensor.shape[1]))
    data.non_tensor_batch |= values.non_tensor_batch
    return encode(data, tokenizer)
