"""Trajectories that stay in Ray's object store, and their rows and summaries in the driver.

    collector   trajectories ─┬─ packed rows, summaries ──▶ driver: batch, metrics, advantages
                              └─ texts, tokens of turns ──▶ object store ──▶ rollout log, audits

The driver loads the stored trajectories only if something reads their texts.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Protocol

from torch.nn.functional import pad

from agent_system.multi_turn_rollout.packing import (
    PackedRows,
    TrajectoryRow,
    build_row_turns,
    build_rows,
    compress_rows,
    join_rows,
    make_turn_records,
)
from agent_system.multi_turn_rollout.trajectory import Trajectory
from rlvcr.records import CreditedTurns, ThinkingTurnRecord, TurnRecords
from rlvcr.scoring import RowTurn
from verl.protocol import DataProto, object_array
from verl.single_controller.base.worker_group import WorkerDiedError
from verl.single_controller.ray.calls import ray_get
from verl.utils.seqlen_balancing import order_for_ranks

logger = logging.getLogger(__name__)
LOAD_TIMEOUT_S = 600.0  # to transfer the trajectories of one collector between nodes
ENCODING_TIMEOUT_S = 1800.0
MAX_ENCODED_ROWS = 1024  # rows of the rollout log whose lines are in memory at a time


class RowEncoder(Protocol):
    """Function that encodes rows for the rollout log, and the columns that it reads.

    ``tensor_names`` and ``column_names`` are those that the driver computes or changes. The other
    ones are stored with the trajectories.
    """

    @property
    def tensor_names(self) -> Collection[str]: ...
    @property
    def column_names(self) -> Collection[str]: ...
    def __call__(self, data: DataProto, tokenizer: Any, /) -> Iterable[memoryview]: ...


@dataclass(slots=True)
class CollectedRows:
    """Rows of the trajectories of one call of a collector.

    ``row_turns`` [B] are the turns from which RLVCR builds score requests. An entry is None if a
    turn of the row was not parsed, as in runs without thinking levels. ``row_counts`` has the
    number of rows of each trajectory.
    """

    packed: PackedRows
    row_turns: list[list[RowTurn] | None]
    row_counts: list[int]


class StoredRows:
    """Rows and trajectories of one call of a collector.

    The trajectories are in this process, or in the object store behind ``ref``. Pickling passes on
    ``ref`` only. ``collector`` is the number of the collector that generated them.
    """

    def __init__(
        self,
        rows: CollectedRows | None,
        trajectories: Sequence[Trajectory] | None = None,
        ref: Any = None,
        collector: int = 0,
    ) -> None:
        self.rows = rows
        self.ref = ref
        self.collector = collector
        self._trajectories = trajectories

    def __reduce__(self) -> tuple[Any, ...]:
        trajectories = self._trajectories if self.ref is None else None
        return StoredRows, (None, trajectories, self.ref, self.collector)

    @cached_property
    def trajectories(self) -> Sequence[Trajectory]:
        """All trajectories with their texts and tokens, loaded at the first access."""
        if self._trajectories is not None:
            return self._trajectories
        return ray_get(self.ref, LOAD_TIMEOUT_S, f"trajectories of collector-{self.collector}")

    @cached_property
    def trajectory_rows(self) -> list[TrajectoryRow]:
        """Rows of all trajectories [B]."""
        return build_rows(self.trajectories)

    @cached_property
    def turn_records(self) -> list[list[ThinkingTurnRecord]]:
        """Turn records of all rows [B]."""
        return [make_turn_records(row) for row in self.trajectory_rows]

    def get_steps(self, row: int) -> Sequence[ThinkingTurnRecord]:
        """Return the turn records of ``row``, which are loaded later if they are not here."""
        return self.turn_records[row] if self.ref is None else StoredSteps(self, row)

    def pack(self, rows: Sequence[int]) -> DataProto:
        """Return the rows at indices ``rows`` as tensors and columns, without ``steps``."""
        packed_rows = compress_rows([self.trajectory_rows[row] for row in rows])
        return join_rows([packed_rows], range(len(rows)), 0, allow_retokenized=True)


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """Trajectory number ``index`` of ``source``, which has the rows ``rows``."""

    source: StoredRows
    index: int
    rows: range

    def load(self) -> Trajectory:
        """Return the trajectory with its texts and tokens."""
        return self.source.trajectories[self.index]


@dataclass(frozen=True, eq=False)
class StoredSteps(TurnRecords):
    """Turn records of row ``row`` of ``source``, which are loaded at the first access."""

    source: StoredRows
    row: int

    def make(self) -> list[ThinkingTurnRecord]:
        """Return the records of all turns of the row."""
        return self.source.turn_records[self.row]


def collect_rows(trajectories: Sequence[Trajectory]) -> CollectedRows:
    """Return the rows of ``trajectories`` without padding, in order."""
    rows_by_trajectory = [build_rows([trajectory]) for trajectory in trajectories]
    rows = [row for trajectory_rows in rows_by_trajectory for row in trajectory_rows]
    row_turns = [
        build_row_turns([row])[0] if all(turn.parsed is not None for turn in row.turns) else None
        for row in rows
    ]
    return CollectedRows(compress_rows(rows), row_turns, list(map(len, rows_by_trajectory)))


def attach_rows(trajectories: Sequence[Trajectory], source: StoredRows) -> None:
    """Set ``stored`` of ``trajectories``, which are those of ``source`` in order."""
    ends = accumulate(source.rows.row_counts, initial=0)
    for index, (trajectory, (start, end)) in enumerate(
        zip(trajectories, pairwise(ends), strict=True)
    ):
        trajectory.stored = StoredTrajectory(source, index, range(start, end))


def list_stored(trajectories: Sequence[Trajectory]) -> list[StoredTrajectory]:
    """Return ``stored`` of ``trajectories``. First pack those of this process, which have none."""
    local_trajectories = [t for t in trajectories if t.stored is None]
    attach_rows(
        local_trajectories, StoredRows(collect_rows(local_trajectories), local_trajectories)
    )
    return [trajectory.stored for trajectory in trajectories if trajectory.stored is not None]


def join_trajectories(
    trajectories: Sequence[Trajectory],
    pad_token_id: int,
    allow_retokenized: bool = False,
    num_ranks: int = 1,
) -> DataProto:
    """Return the rows of ``trajectories``, in the order of ``order_for_ranks``.

    For one rank this is the order of the trajectories. Raises the errors of ``join_rows``.
    """
    stored = list_stored(trajectories)
    rows = [(trajectory.source, row) for trajectory in stored for row in trajectory.rows]
    lengths = [int(source.rows.packed.lengths[row]) for source, row in rows]
    rows = [rows[index] for index in order_for_ranks(lengths, num_ranks)]
    tables = {source: source.rows.packed for source, _ in rows}
    starts = accumulate((len(table.lengths) for table in tables.values()), initial=0)
    start_by_source = dict(zip(tables, starts, strict=False))
    order = [start_by_source[source] + row for source, row in rows]
    data = join_rows(list(tables.values()), order, pad_token_id, allow_retokenized)
    data.non_tensor_batch["steps"] = object_array([source.get_steps(row) for source, row in rows])
    return data


def load_trajectories(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return ``trajectories`` with their texts and tokens."""
    return [trajectory.load() for trajectory in list_stored(trajectories)]


def collect_row_turns(trajectories: Sequence[Trajectory]) -> list[list[RowTurn]]:
    """Return the turns of every row of ``trajectories``. RLVCR builds its score requests from them.

    Raises ``ValueError`` if a turn was not parsed into level, thought and action.
    """
    row_turns: list[list[RowTurn]] = []
    for trajectory in list_stored(trajectories):
        for row in trajectory.rows:
            turns = trajectory.source.rows.row_turns[row]
            if turns is None:
                turns = build_row_turns([trajectory.source.trajectory_rows[row]])[0]
            row_turns.append(turns)
    return row_turns


def split_by_source(steps: Sequence[object]) -> dict[StoredRows | None, list[int]]:
    """Return the indices of rows by the place where their texts are stored.

    ``steps`` [B] is the column ``steps``. The key None has the rows whose texts are in this
    process.
    """
    indices: dict[StoredRows | None, list[int]] = {}
    for index, records in enumerate(steps):
        records = find_stored_steps(records)
        source = records.source if isinstance(records, StoredSteps) else None
        indices.setdefault(source if source and source.ref is not None else None, []).append(index)
    return indices


def find_stored_steps(records: object) -> object:
    """Return the records without the credit that RLVCR added to them."""
    return records.records if isinstance(records, CreditedTurns) else records


def encode_on_collectors(
    data: DataProto, encode: RowEncoder, collectors: Sequence[Any], tokenizer: object
) -> Iterator[memoryview]:
    """Yield a JSON line for each row of ``data``, which ``encode`` returns.

    A collector encodes the rows that it generated; ``collectors`` are their actor handles. Other
    rows, and those of a collector that died, are encoded in this process.
    """
    keys = [key for key in encode.tensor_names if key in data.tensor_keys()]
    columns = [key for key in encode.column_names if key in data.non_tensor_batch]
    for window in data.split(MAX_ENCODED_ROWS):
        values = window.select(keys, columns, [])
        rows_by_source = split_by_source(window.non_tensor_batch["steps"])
        refs = {
            source: collectors[source.collector].encode_rows.remote(values[rows], encode)
            for source, rows in rows_by_source.items()
            if source is not None and collectors
        }
        lines = {
            source: iter(
                _get_lines(refs.get(source)) or encode(window.select_idxs(rows), tokenizer)
            )
            for source, rows in rows_by_source.items()
        }
        source_by_row = {row: source for source, rows in rows_by_source.items() for row in rows}
        for row in range(len(window)):
            yield next(lines[source_by_row[row]])


def _get_lines(ref: Any) -> Iterable[memoryview] | None:
    """Return the lines that a collector encodes, or None if it died or there is no ``ref``."""
    if ref is None:
        return None
    try:
        return ray_get(ref, ENCODING_TIMEOUT_S, "lines of the rollout log")
    except WorkerDiedError as error:
        logger.warning("a collector died; this process writes its rollout log: %s", error)
        return None


def encode_stored_rows(values: DataProto, encode: RowEncoder, tokenizer: object) -> Any:
    """Return ``encode`` of rows that are stored with the trajectories of one collector.

    The column ``steps`` of ``values`` names the rows. The other columns of ``values`` were computed
    later; tensors are [B, R] with another padding of the responses than the stored rows.
    """
    stored_steps = [find_stored_steps(records) for records in values.non_tensor_batch["steps"]]
    rows = [records for records in stored_steps if isinstance(records, StoredSteps)]
    data = rows[0].source.pack([records.row for records in rows])
    width = data.batch["responses"].shape[1]
    for key, tensor in values.batch.items():
        # A negative padding removes columns.
        data.batch[key] = pad(tensor, (0, width - tensor.shape[1]))
    data.non_tensor_batch |= values.non_tensor_batch
    return encode(data, tokenizer)
